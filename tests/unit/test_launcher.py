"""The launcher, over stub processes that start quickly and misbehave on request."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvferry.errors import ClosedError, DeadlineError, PeerLostError, UsageError
from kvferry.launcher import Fleet

STUB = Path(__file__).with_name("launcher_stub.py")
COMMAND = (sys.executable, "-I", "-S", str(STUB))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]


class Lines(list):
    on_line = staticmethod(str)

    def __call__(self, name, line):
        self.append((name, line))
        self.on_line(line)

    def of(self, name):
        return [line for each, line in self if each == name]


def fleet(model="good", **settings):
    lines = Lines()
    made = Fleet(model, command=COMMAND, log=lines, **{"start_s": 10.0, "stop_s": 4.0, **settings})
    return made, lines


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_gone(pids, limit_s=5.0):
    """Wait until no process of ``pids`` runs. A pidfd becomes readable when its process ends."""
    deadline = time.monotonic() + limit_s
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pid} still runs"
        finally:
            os.close(pidfd)


def children() -> set[int]:
    """Other suites of the same run keep some of their own."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in text.split()}


@pytest.fixture(autouse=True)
def _nothing_is_left_over():
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    before = children()
    yield
    assert set(threading.enumerate()) == threads
    assert set(os.listdir("/proc/self/fd")) == files
    assert not [pid for pid in children() - before if is_running(pid)]


def test_it_starts_all_names_them_and_stops_them():
    made, lines = fleet(
        prefill=2, decode=1, transports=("shm", "tcp"), env={"GREETING": "hello"},
        engine_flags=("--blocks", "7"),
    )  # fmt: skip
    with made:
        names = ["prefill-0", "prefill-1", "decode-0", "router"]
        assert list(made.processes) == names
        urls = [*made.prefill_urls, *made.decode_urls, made.router_url]
        assert len(set(urls)) == 4
        pids = [popen.pid for popen in made.processes.values()]
        argv = lines.of("prefill-1")[0]
        assert argv.startswith("argv engine --model good --role prefill --host 127.0.0.1")
        assert argv.endswith("--drain-s 1 --transport shm --transport tcp --blocks 7 --port 0")
        sockets = re.search(r"--socket-dir (\S+)", argv)[1]
        assert Path(sockets).stat().st_mode & 0o777 == 0o700
        assert "greeting hello" in lines.of("decode-0")
        route = lines.of("router")[0]
        for role, url in zip(("prefill", "prefill", "decode"), urls, strict=False):
            assert f"--{role} {url}" in route
    assert not [pid for pid in pids if is_running(pid)]
    assert not Path(sockets).exists()
    made.stop()


def test_a_process_starts_as_it_is_dressed_and_each_start_asks_anew():
    greetings = iter(["first", "second"])

    def dress(name, argv):
        return argv if name == "router" else ["env", f"GREETING={next(greetings)}", *argv]

    made, lines = fleet(prefill=0, dress=dress)
    with made:
        pid = made.processes["decode-0"].pid
        made.restart("decode-0")
        assert made.processes["decode-0"].pid != pid
        wanted = ["greeting first", "greeting second"]
        assert [line for line in lines.of("decode-0") if line in wanted] == wanted
        assert "greeting None" in lines.of("router")


def test_a_child_that_ends_early_is_named_with_its_last_words():
    made, _ = fleet("dies")
    with pytest.raises(PeerLostError, match=r"decode-0 ended with exit code 3.*no such weights"):
        made.start()


@pytest.mark.parametrize("model", ["silent", "unwell"])
def test_starting_has_a_deadline(model):
    made, _ = fleet(model, start_s=0.5)
    with pytest.raises(DeadlineError, match=r"prefill-0, decode-0 not healthy"):
        made.start()


def test_starting_can_be_interrupted():
    made, _ = fleet("silent")
    made.interrupt()
    with pytest.raises(ClosedError, match="interrupted"):
        made.start()


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_restart_takes_the_same_port(harm):
    made, lines = fleet()
    with made:
        before, urls = made.processes["decode-0"], made.decode_urls
        before.send_signal(harm)
        made.restart("decode-0")
        assert made.decode_urls == urls
        assert made.processes["decode-0"].pid != before.pid
        assert made.processes["decode-0"].poll() is None
        port = urlsplit(urls[0]).port
        assert lines.of("decode-0")[-3].endswith(f"--port {port}")


def test_a_restart_from_a_thread_that_ends_lasts():
    # The kernel ties the child to the thread that made it; that must not be this one.
    made, _ = fleet(prefill=0)
    with made:
        thread = threading.Thread(target=made.restart, args=("decode-0",))
        thread.start()
        thread.join()
        with pytest.raises(subprocess.TimeoutExpired):
            made.processes["decode-0"].wait(0.2)


def test_a_child_that_does_not_end_is_killed():
    made, _ = fleet("stubborn", prefill=0, stop_s=0.4)
    with made:
        engine = made.processes["decode-0"]
    assert engine.returncode == -signal.SIGKILL


def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_launcher():
    made, _ = fleet("forks", prefill=0)
    made.start()
    engine = made.processes["decode-0"]
    children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    try:
        started = time.monotonic()
        made.stop()
        assert time.monotonic() - started < 3.0
    finally:
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)


def test_waiting_ends_with_an_error_when_a_child_dies():
    made, _ = fleet(prefill=0)
    with made:
        made.processes["decode-0"].kill()
        with pytest.raises(PeerLostError, match="decode-0 was ended by SIGKILL"):
            made.wait()


def test_waiting_with_restart_brings_a_child_back():
    made, lines = fleet(prefill=0)
    with made:
        old = made.processes["decode-0"]
        back = threading.Event()
        lines.on_line = lambda line: back.set() if line.startswith("ready") else None
        waiting = threading.Thread(target=made.wait, kwargs={"restart": True})
        waiting.start()
        old.kill()
        assert back.wait(5.0)
        made.interrupt()
        waiting.join(5.0)
        assert made.processes["decode-0"] is not old
        assert made.processes["decode-0"].poll() is None
    assert "decode-0 was ended by SIGKILL; starting it again in 0.5 s" in lines.of("kvferry")


def test_children_die_with_a_launcher_that_is_killed(tmp_path):
    script = (
        "import sys; from kvferry.launcher import Fleet\n"
        f"fleet = Fleet('good', command={COMMAND!r}); fleet.start()\n"
        "print(*[popen.pid for popen in fleet.processes.values()], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody is left to remove its directory
    ) as launcher:
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 3
        assert all(is_running(pid) for pid in pids)
        launcher.kill()
        launcher.wait()
        try:
            wait_gone(pids)
        finally:
            for pid in pids:
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)


def test_a_fleet_without_decode_is_refused():
    with pytest.raises(UsageError, match="decode"):
        Fleet("good", decode=0)
