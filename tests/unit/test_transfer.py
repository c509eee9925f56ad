"""A transfer ends once, and everybody who waits is told."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from kvferry.errors import AbortedError, CorruptError, DeadlineError, KVFerryError
from kvferry.transfer import Transfer


class Owner:
    """Stands for the engine: remembers who was cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[Transfer] = []

    def transfer(self) -> Transfer:
        return Transfer(7, 100, write=False, peer_name="prefill-0", cancel=self.cancelled.append)


def ended(error: KVFerryError | None = None) -> Transfer:
    transfer = Owner().transfer()
    transfer._finish(0 if error else 100, error, 0.25)
    return transfer


def test_a_running_transfer_is_not_done() -> None:
    transfer = Owner().transfer()
    assert not transfer.is_done()
    assert repr(transfer) == "<Transfer 7 running  100 bytes>"


def test_the_end_is_seen_by_everybody() -> None:
    transfer = ended()
    assert (transfer.is_done(), transfer.wait(0), transfer.result()) == (True, 100, 100)
    assert (transfer.bytes_done, transfer.seconds) == (100, 0.25)
    assert "done" in repr(transfer)


def test_a_failure_is_raised_by_everybody() -> None:
    error = CorruptError("spoilt")
    transfer = ended(error)
    for ask in (transfer.wait, transfer.result):
        with pytest.raises(CorruptError) as caught:
            ask()
        assert caught.value is error
    assert "failed" in repr(transfer)


def test_a_wait_that_is_too_short_leaves_it_running() -> None:
    transfer = Owner().transfer()
    with pytest.raises(DeadlineError, match=r"transfer 7 still runs after 0 s.*prefill-0.*wait"):
        transfer.wait(0)
    assert not transfer.is_done()
    transfer._finish(100, None, 0.0)
    assert transfer.wait(0) == 100


def test_several_threads_wait_for_one_end() -> None:
    transfer = Owner().transfer()
    started, results = threading.Barrier(5), []

    def wait() -> None:
        started.wait(10.0)
        results.append(transfer.wait(10.0))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait(10.0)
    transfer._finish(100, None, 0.0)
    for thread in threads:
        thread.join(10.0)
    assert results == [100] * 4


def test_cancel_asks_the_engine_and_only_while_it_runs() -> None:
    owner = Owner()
    transfer = owner.transfer()
    transfer.cancel()
    assert owner.cancelled == [transfer]
    assert not transfer.is_done()
    transfer._finish(0, AbortedError("cancelled"), 0.0)
    transfer.cancel()
    assert owner.cancelled == [transfer]


def test_callbacks_are_called_once_in_order_and_late_ones_at_once() -> None:
    transfer, calls = Owner().transfer(), []
    for name in "ab":
        transfer.add_done_callback(lambda done, name=name: calls.append((name, done.bytes_done)))
    assert calls == []
    transfer._finish(100, None, 0.0)
    transfer.add_done_callback(lambda done: calls.append(("late", done.bytes_done)))
    assert calls == [("a", 100), ("b", 100), ("late", 100)]


def test_a_bad_callback_does_not_keep_others_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transfer, told = Owner().transfer(), []

    def bad(_: Transfer) -> None:
        raise RuntimeError("the owner's own bug")

    transfer.add_done_callback(bad)
    transfer.add_done_callback(told.append)
    with caplog.at_level(logging.ERROR):
        transfer._finish(100, None, 0.0)
    assert told == [transfer]
    assert "the owner's own bug" in caplog.text


def test_it_can_be_awaited_before_and_after_its_end() -> None:
    async def main() -> list[int]:
        transfer = Owner().transfer()
        waiting = asyncio.ensure_future(wait_for(transfer))
        await asyncio.sleep(0)
        thread = threading.Thread(target=transfer._finish, args=(100, None, 0.0))
        thread.start()
        first = await waiting
        thread.join(10.0)
        return [first, await transfer]

    assert asyncio.run(main()) == [100, 100]


def test_an_awaited_failure_is_raised() -> None:
    with pytest.raises(CorruptError):
        asyncio.run(wait_for(ended(CorruptError("spoilt"))))


def test_whoever_stops_awaiting_cancels_the_transfer() -> None:
    owner = Owner()
    transfer = owner.transfer()

    async def main() -> None:
        waiting = asyncio.ensure_future(wait_for(transfer))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert owner.cancelled == [transfer]


def test_an_end_after_the_loop_has_closed_hurts_nobody() -> None:
    transfer = Owner().transfer()

    async def main() -> None:
        waiting = asyncio.ensure_future(wait_for(transfer))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(main())
    transfer._finish(100, None, 0.0)
    assert transfer.wait(0) == 100


async def wait_for(transfer: Transfer) -> int:
    return await transfer
