"""Reading a fleet's lines: who is linked to whom, who noticed whose loss, what is a bug."""

from __future__ import annotations

import threading
import time

from kvferry.testing.chaos.journal import Journal

UP = "2026-01-01 INFO kvferry.connections: engine-7: peer engine-9 is up (unix:/x.sock)"
GONE = "2026-01-01 INFO kvferry.connections: engine-7: peer engine-9 is gone: it was closed; see"
DOWN = "2026-01-01 WARNING kvferry.router.health: decode worker 127.0.0.1:80 is down: it refused"


def test_a_peer_is_gone_with_its_last_connection() -> None:
    journal = Journal()
    for line in (UP, UP, GONE):
        journal("decode-0", line)
    assert journal.linked_to("engine-9") == {"decode-0"}
    assert journal.losses(0) == []
    before = time.monotonic()
    journal("decode-0", GONE)
    journal("router", DOWN)
    assert journal.linked_to("engine-9") == set()
    assert [(loss.observer, loss.peer) for loss in journal.losses(before)] == [
        ("decode-0", "engine-9"),
        ("router", "127.0.0.1:80"),
    ]
    assert journal.losses(time.monotonic() + 1) == []


def test_a_process_that_starts_again_is_linked_to_nobody() -> None:
    journal = Journal()
    journal("decode-0", UP)
    journal("kvferry", "starting decode-0")
    assert journal.linked_to("engine-9") == set()


def test_traces_and_bugs_are_complaints_once_each() -> None:
    journal = Journal()
    for _ in range(2):
        journal("decode-0", "Traceback (most recent call last):")
        journal("decode-0", '  File "x.py", line 3, in go')
        journal("decode-0", "    1 / 0")
        journal("decode-0", "    ~~^~~")
        journal("prefill-0", "nothing special")
        journal("decode-0", "ZeroDivisionError: division by zero")
    journal("router", "ERROR: closing failed; this is a bug")
    assert journal.complaints == [
        "decode-0 wrote: 1 / 0: ZeroDivisionError: division by zero",
        "router wrote: ERROR: closing failed; this is a bug",
    ]
    assert journal.last().endswith("[router] ERROR: closing failed; this is a bug")


def test_a_lack_of_descriptors_for_a_new_connection_is_no_bug() -> None:
    journal = Journal()
    journal("decode-0", "Traceback (most recent call last):")
    journal("decode-0", '  File "/python/socket.py", line 294, in accept')
    journal("decode-0", "OSError: [Errno 24] Too many open files")
    assert journal.complaints == []


def test_waiting_ends_with_the_line_that_makes_it_true() -> None:
    journal = Journal()
    writer = threading.Timer(0.02, lambda: journal("decode-0", UP))
    writer.start()
    assert journal.wait_for(lambda: "decode-0" in journal._links, 5.0)
    writer.join()
    assert not journal.wait_for(lambda: False, 0.01)
