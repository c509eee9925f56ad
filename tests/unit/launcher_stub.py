"""Stands in for ``kvferry engine`` and ``kvferry route``: reports a port, answers /health.

The model's name says how it behaves. Imports little, because tests start many of it.
"""

import os
import signal
import socket
import sys


def flag(name, default=""):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def say(text):
    os.write(1, text.encode() + b"\n")


model = flag("--model")
if model == "dies" and flag("--role") == "decode":
    os.write(2, b"no such weights\n")
    sys.exit(3)
if model == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((flag("--host"), int(flag("--port"))))
listener.listen()
say(f"argv {' '.join(sys.argv[1:])}")
say(f"greeting {os.environ.get('GREETING')}")
if model != "silent":
    os.write(1, b"ready http://127.0.0.1:%d\n" % listener.getsockname()[1])
if model == "forks" and not os.fork():
    # A grandchild that keeps the pipe open and does not care about anything.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
while True:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        status = b"503 Unwell" if model == "unwell" else b"200 OK"
        connection.sendall(b"HTTP/1.0 " + status + b"\r\nContent-Length: 0\r\n\r\n")
