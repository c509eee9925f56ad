"""The last lines that a fleet's processes wrote, shown when a test fails."""

from __future__ import annotations

from kvferry.testing.chaos.journal import Journal


class Log(Journal):
    """A journal that is printed when the block ends in an error."""

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            print(self.last())
