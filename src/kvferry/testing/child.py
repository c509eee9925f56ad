"""Another process under a test's control: for peers that are killed or frozen."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from typing import Any

START_S = 30.0


class ChildError(AssertionError):
    """The statements failed in the child; the text is its traceback."""


class Child:
    """A fresh interpreter that runs statements sent to it and returns JSON values.

    One namespace serves all statements. The child ends when this process does, since its standard
    input then ends. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, setup: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from kvferry.testing.child import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._buffer = b""
        if setup:
            self.run(setup, timeout_s=START_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, statements: str) -> None:
        """Have statements run, without waiting for them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(statements).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = START_S) -> Any:
        """What the oldest statements sent left in ``result``. Raises ChildError or TimeoutError."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], timeout_s)[0]:
                raise TimeoutError(f"the child did not answer within {timeout_s:g} s")
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise ChildError(f"the child ended with {self._process.wait()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if answer["error"]:
            raise ChildError(answer["error"])
        return answer["result"]

    def run(self, statements: str, timeout_s: float = START_S) -> Any:
        """Run statements and return what they left in ``result``, or None."""
        self.send(statements)
        return self.answer(timeout_s)

    def kill(self) -> None:
        """SIGKILL, and wait until the system has taken everything back."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGSTOP: it freezes with everything open. Returns when it has."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, whatever its state."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve() -> None:
    """The child's side: read statements line by line, run them, answer."""
    answers = os.dup(1)
    os.dup2(2, 1)  # What the statements print must not look like an answer.
    namespace: dict[str, Any] = {}
    for line in sys.stdin:
        namespace["result"] = None
        error = ""
        try:
            exec(json.loads(line), namespace)
        except BaseException:
            error = traceback.format_exc()
        text = json.dumps({"result": None if error else namespace["result"], "error": error})
        os.write(answers, text.encode() + b"\n")
    os._exit(0)
