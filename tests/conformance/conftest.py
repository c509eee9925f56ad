"""One child process per transport serves all checks with two processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvferry.testing import Child


@pytest.fixture(scope="session")
def children() -> Iterator[dict[str, Child]]:
    """The processes for far engines, by transport; each serves one check after the other."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Child("import kvferry.testing.pairs"))
            for name in ("shm", "staged", "tcp")
        }
