"""What device memory must do on any driver: a fake one here, a real one in tests/gpu."""

from __future__ import annotations

import ctypes

import numpy as np

from kvferry.memory.cuda import CudaDevice

POOL_BYTES = 4 << 20


def forever() -> None:
    """A check that never gives up; the test's own limit does."""


class Pool:
    """Device memory that a check fills and reads through pinned memory."""

    def __init__(self, device: CudaDevice, nbytes: int = POOL_BYTES) -> None:
        self.device, self.nbytes = device, nbytes
        device.use()
        self.address = device.driver.alloc(nbytes)
        self.host = device.driver.host_alloc(nbytes)
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.host))

    def fill(self, values: np.ndarray) -> None:
        self.array[:] = values
        self._copy(self.address, self.host)

    def read(self) -> np.ndarray:
        self._copy(self.host, self.address)
        return self.array.copy()

    def _copy(self, target: int, source: int) -> None:
        with self.device.queue() as queue:
            size = np.array([self.nbytes], np.int64)
            words = [np.array([at], np.uint64) for at in (target, source)]
            queue.copy_spans(*words, size).wait(forever)

    def close(self) -> None:
        self.device.use()
        self.device.driver.free(self.address)
        self.device.driver.host_free(self.host)


def addresses(base: int, offsets: np.ndarray) -> np.ndarray:
    return offsets.astype(np.uint64) + np.uint64(base)


def spans_that_do_not_touch(rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
    """Offsets for spans of these lengths in random order with random gaps, at any alignment."""
    order = rng.permutation(lengths.size)
    gaps = rng.integers(1, 40, lengths.size)
    places = np.cumsum(gaps) + np.concatenate(([0], np.cumsum(lengths[order])[:-1]))
    offsets = np.empty(lengths.size, np.int64)
    offsets[order] = places
    return offsets


def lengths_of(kind: str, rng: np.random.Generator) -> np.ndarray:
    return {
        "blocks": np.full(64, 16 << 10),
        "one": np.array([100_001]),
        "few large": np.full(3, 1 << 20),
        "tiny": rng.integers(1, 9, 500),
        "mixture": np.concatenate((rng.integers(1, 4000, 200), [700_000, 50_000])),
        "two parts": rng.integers((16 << 10) + 1, 32 << 10, 50),
        "with empty ones": np.array([0, 5000, 0, 1, 0]),
    }[kind].astype(np.int64)


KINDS = ("blocks", "one", "few large", "tiny", "mixture", "two parts", "with empty ones")


def check_copies(device: CudaDevice, kind: str, alignment: int) -> None:
    """Bytes arrive where they belong and nowhere else."""
    rng = np.random.default_rng(7)
    lengths = lengths_of(kind, rng)
    source, target = Pool(device), Pool(device)
    room = lengths if alignment == 1 else (lengths // alignment + 6) * alignment
    begin, to = (spans_that_do_not_touch(rng, room) // alignment * alignment for _ in range(2))
    values = rng.integers(0, 256, POOL_BYTES, dtype=np.uint8)
    source.fill(values)
    target.fill(np.zeros(POOL_BYTES, np.uint8))
    with device.queue() as queue:
        flight = queue.copy_spans(
            addresses(target.address, to), addresses(source.address, begin), lengths
        )
        flight.wait(forever)
        assert flight.is_done()
        assert queue.is_idle()
    expected = np.zeros(POOL_BYTES, np.uint8)
    for a, b, n in zip(to, begin, lengths, strict=True):
        expected[a : a + n] = values[b : b + n]
    np.testing.assert_array_equal(target.read(), expected)
    source.close()
    target.close()


def check_gather_and_scatter(device: CudaDevice, kind: str) -> None:
    rng = np.random.default_rng(8)
    lengths = lengths_of(kind, rng)
    total = int(lengths.sum())
    pool = Pool(device)
    host = device.driver.host_alloc(total)
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * total).from_address(host))
    offsets = spans_that_do_not_touch(rng, lengths)
    values = rng.integers(0, 256, POOL_BYTES, dtype=np.uint8)
    pool.fill(values)
    with device.queue() as queue:
        queue.gather(host, addresses(pool.address, offsets), lengths).wait(forever)
        expected = [values[a : a + n] for a, n in zip(offsets, lengths, strict=True)]
        np.testing.assert_array_equal(flat, np.concatenate(expected))
        flat[:] = ~flat
        queue.scatter(host, addresses(pool.address, offsets), lengths).wait(forever)
    for a, n in zip(offsets, lengths, strict=True):
        values[a : a + n] = ~values[a : a + n]
    np.testing.assert_array_equal(pool.read(), values)
    device.driver.host_free(host)
    pool.close()
