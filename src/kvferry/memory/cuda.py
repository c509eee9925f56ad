"""Device memory: gather, scatter and copy of scattered spans by one kernel, and its bookkeeping.

A :class:`CudaDevice` belongs to one engine. Work goes through a :class:`CudaQueue`: one stream of
the lowest priority, with the pinned and device arenas that its span lists travel through. A queue
is used by one thread at a time; :meth:`CudaDevice.queue` lends one. Every piece of work returns a
:class:`Flight`, which is polled: nothing here waits for the device without looking at the time.

Spans that are long, or few, go to the copy engines instead, which leave the multiprocessors to a
running model and are as fast there.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from kvferry.errors import DeviceError, UsageError
from kvferry.memory.cuda_driver import CudaDriver, DeviceFacts
from kvferry.regions import I64, U64

log = logging.getLogger(__name__)

PART_BYTES = 16 << 10
"""What one warp copies at a time; longer spans are cut so that all warps have work."""
THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 4
ENGINE_SPANS_MAX = 32
"""Up to so many spans of at least ENGINE_BYTES each go to the copy engine, one call per span."""
ENGINE_BYTES = 1 << 20
LAUNCH_BYTES = 128 << 20
LAUNCH_SPANS_MIN = 2048
"""A long list goes in several launches of about so many bytes: the first copies while the lists of
the next are still being written.
"""
SPIN_S = 3e-4
"""A flight is asked so long without a pause, which covers 500 MB within a device; the shortest
sleep of a thread takes about 0.1 ms.
"""
PAUSE_S, PAUSE_MAX_S = 5e-5, 1e-3
PATIENT_AFTER_S = 2e-2
"""A flight that takes longer waits for a busy device: it is then asked every PAUSE_MAX_S only."""
UPLOAD_S = 10.0
"""How long an upload of lists may take before the device counts as broken."""
QUEUES_MAX = 16
"""So many idle queues are kept per device."""

KERNEL_NAME = "copy_spans"
KERNEL_SOURCE = r"""
typedef unsigned long long u64;

template <typename T>
__device__ void move(char *t, const char *s, u64 size, int lane)
{
    T *to = (T *)t;
    const T *from = (const T *)s;
    u64 n = size / sizeof(T), i = lane;
    for (; i + 96 < n; i += 128) {
        T a = __ldcs(from + i), b = __ldcs(from + i + 32);
        T c = __ldcs(from + i + 64), d = __ldcs(from + i + 96);
        __stcs(to + i, a);
        __stcs(to + i + 32, b);
        __stcs(to + i + 64, c);
        __stcs(to + i + 96, d);
    }
    for (; i < n; i += 32)
        __stcs(to + i, __ldcs(from + i));
    for (i = n * sizeof(T) + lane; i < size; i += 32)
        t[i] = s[i];
}

/* A warp takes one part of one span at a time. The widest access that both addresses allow moves
 * it, after the few bytes that bring both to a boundary where they share one. Without a list of
 * lengths all spans have the same. */
extern "C" __global__ void copy_spans(const u64 *target, const u64 *source, const u64 *length,
                                      u64 count, u64 parts, u64 part, u64 target_base,
                                      u64 source_base, u64 same_length)
{
    u64 warps = ((u64)gridDim.x * blockDim.x) >> 5;
    u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    int lane = threadIdx.x & 31;
    for (u64 w = warp; w < count * parts; w += warps) {
        u64 i = parts == 1 ? w : w / parts, skip = parts == 1 ? 0 : (w % parts) * part;
        u64 whole = length ? length[i] : same_length;
        if (skip >= whole)
            continue;
        u64 size = whole - skip < part ? whole - skip : part;
        char *t = (char *)(target_base + target[i] + skip);
        const char *s = (const char *)(source_base + source[i] + skip);
        u64 apart = ((u64)t ^ (u64)s) & 15;
        u64 head = apart == 0 ? (16 - ((u64)t & 15)) & 15 : 0;
        if (head > size)
            head = size;
        if ((u64)lane < head)
            t[lane] = s[lane];
        t += head, s += head, size -= head;
        if (apart == 0)
            move<int4>(t, s, size, lane);
        else if (apart == 8 && ((u64)t & 7) == 0)
            move<int2>(t, s, size, lane);
        else if ((apart & 3) == 0 && ((u64)t & 3) == 0)
            move<int>(t, s, size, lane);
        else
            move<char>(t, s, size, lane);
    }
}
"""


class Flight:
    """Work that the device has been given. Poll :meth:`is_done`, or :meth:`wait`."""

    def __init__(self, queue: CudaQueue, number: int) -> None:
        self._queue = queue
        self._number = number
        self._done = False

    def is_done(self) -> bool:
        """Whether it has landed; its arenas are free again then. Raises DeviceError if it failed.

        After an error nothing is known about its target, and most devices need a new process.
        """
        self._done = self._done or self._queue.has_landed(self._number)
        return self._done

    def wait(self, check: Callable[[], None]) -> None:
        """Block until it has landed; ``check`` is called in between and gives up by raising.

        Then the work goes on: its memory must stay as it is until :meth:`is_done` says so.
        """
        began = time.perf_counter()
        while not self.is_done():
            waited = time.perf_counter() - began
            if waited >= SPIN_S:
                check()
                time.sleep(PAUSE_S if waited < PATIENT_AFTER_S else PAUSE_MAX_S)

    def settle(self, limit_s: float) -> None:
        """Block until it has landed, whatever else. Raises DeviceError after ``limit_s``."""
        give_up_at = time.monotonic() + limit_s

        def check() -> None:
            if time.monotonic() >= give_up_at:
                raise DeviceError(
                    f"a copy on {self._queue.device.facts.name} has not ended after {limit_s:g} s",
                    fix="look at the kernel's log for Xid messages; the process must be restarted",
                )

        self.wait(check)


class CudaDevice:
    """A device as one engine uses it. Thread-safe.

    blocks: thread blocks of a copy at most; fewer leave more of the device to the model and copy
    more slowly. 0 takes four per multiprocessor, which is the fastest.
    """

    def __init__(self, driver: CudaDriver, facts: DeviceFacts, *, blocks: int = 0) -> None:
        self.driver = driver
        self.facts = facts
        self.blocks = blocks or BLOCKS_PER_MULTIPROCESSOR * facts.multiprocessors
        self._lock = threading.Lock()
        self._idle: list[CudaQueue] = []
        self._stuck: list[CudaQueue] = []
        self._pinned: dict[int, int] = {}
        self._pinned_free: list[int] = []
        self._closed = False
        driver.use(facts.ordinal)
        self.kernel = driver.kernel(KERNEL_SOURCE, KERNEL_NAME)

    def use(self) -> None:
        """Make the device current in the calling thread."""
        self.driver.use(self.facts.ordinal)

    @contextmanager
    def queue(self) -> Iterator[CudaQueue]:
        """A queue for the calling thread. One whose work has not landed at the end is lent again
        when it has."""
        queue = self.take()
        try:
            yield queue
        finally:
            self.give(queue)

    def take(self) -> CudaQueue:
        """A queue, for a caller that keeps it for longer. Raises DeviceError."""
        self.use()
        with self._lock:
            if self._closed:
                raise DeviceError("the device was closed with its engine")
            stuck, self._stuck = self._stuck, []
            for queue in stuck:
                if queue.is_idle():
                    self._take_buffers(queue)
                    self._idle.append(queue)
                else:
                    self._stuck.append(queue)
            return self._idle.pop() if self._idle else CudaQueue(self)

    def give(self, queue: CudaQueue) -> None:
        """The end of :meth:`take`."""
        self.use()
        landed = queue.is_idle()
        with self._lock:
            if not landed:
                self._stuck.append(queue)
                return
            freed = self._take_buffers(queue)
            keep = not self._closed and len(self._idle) < QUEUES_MAX
            if keep:
                self._idle.append(queue)
        if not keep:
            queue.close()
        self._free_pinned(freed)

    def _take_buffers(self, queue: CudaQueue) -> list[int]:
        """Have the buffers of a queue that has landed, under the lock; returns those to free."""
        buffers, queue.buffers = queue.buffers, []
        if not self._closed:
            self._pinned_free += buffers
            return []
        for address in buffers:
            del self._pinned[address]
        return buffers

    def _free_pinned(self, addresses: list[int]) -> None:
        with suppress(DeviceError):
            self.use()
            for address in addresses:
                self.driver.host_free(address)

    def pinned(self, nbytes: int) -> int:
        """The address of at least ``nbytes`` of pinned host memory, kept for the next user by
        :meth:`give_pinned`. Raises DeviceError."""
        with self._lock:
            for place, address in enumerate(self._pinned_free):
                if self._pinned[address] >= nbytes:
                    return self._pinned_free.pop(place)
        self.use()
        address = self.driver.host_alloc(nbytes)
        with self._lock:
            self._pinned[address] = nbytes
        return address

    def give_pinned(self, address: int) -> None:
        """Nothing uses it any more."""
        with self._lock:
            if not self._closed:
                self._pinned_free.append(address)
                return
            del self._pinned[address]
        self._free_pinned([address])

    def close(self) -> None:
        """Give all queues back. Those with work that never landed are left to the driver."""
        with self._lock:
            self._closed = True
            queues, self._idle, self._stuck = [*self._idle, *self._stuck], [], []
            free, self._pinned_free = self._pinned_free, []
            for address in free:
                del self._pinned[address]
            with suppress(DeviceError):
                self.use()
                for queue in queues:
                    if queue.is_idle():
                        free += self._take_buffers(queue)
                        queue.close()
        self._free_pinned(free)


class CudaQueue:
    """A stream and its arenas. One thread at a time; the device must be current in it."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._driver = device.driver
        self._stream = self._driver.stream()
        self._events: list[Any] = []
        self._flying: dict[int, tuple[Any, tuple[_Arena, ...]]] = {}
        self._flights = 0
        self._lists: list[_Arena] = []
        self._bounces: list[_Arena] = []
        self.buffers: list[int] = []
        """Pinned memory that copies of this queue may touch; it goes back with the queue."""

    def mark(self) -> Flight:
        """A flight that lands when everything before it has."""
        return self._flight()

    def copy_spans(
        self,
        target: U64,
        source: U64,
        lengths: I64,
        *,
        target_base: int = 0,
        source_base: int = 0,
        length: int = 0,
    ) -> Flight:
        """Copy ``lengths[i]`` bytes from ``source_base + source[i]`` to ``target_base + target[i]``
        for every i; addresses that this device can reach. uint64[n], uint64[n], int64[n]; returns
        at once.

        length: that of every span, if the caller knows that all have the same; else 0.
        No address is checked: a bad one loses the device's context. Source and target must not
        overlap. Raises UsageError for arrays that do not fit, DeviceError.
        """
        if not target.size == source.size == lengths.size:
            raise UsageError("the three arrays must hold the same number of elements")
        held: tuple[_Arena, ...] = ()
        if _is_for_engine(lengths):
            for t, s, n in zip(target.tolist(), source.tolist(), lengths.tolist(), strict=True):
                self._driver.copy(target_base + t, source_base + s, n, self._stream)
        elif lengths.size:
            held = self._launch(target, source, lengths, target_base, source_base, length)
        return self._flight(*held)

    def copy_resident(
        self, lists: ResidentLists, first_base: int, second_base: int, *, to_first: bool
    ) -> Flight:
        """:meth:`copy_spans` for lists that are on the device already: one launch, or one call per
        span for the copy engine. Bases as the lists were made."""
        if lists.few is not None:
            for first, second, n in lists.few:
                pair = first_base + first, second_base + second
                target, source = pair if to_first else pair[::-1]
                self._driver.copy(target, source, n, self._stream)
        elif lists.count:
            rows, bases = (lists.where, lists.where + 8 * lists.count), (first_base, second_base)
            if not to_first:
                rows, bases = rows[::-1], bases[::-1]
            self._run(*rows, lists.lengths, lists.count, lists.parts, (*bases, lists.length))
        return self._flight()

    def gather(self, target: int, sources: U64, lengths: I64) -> Flight:
        """Copy scattered device memory to one place in pinned host memory, in order."""
        return self._through_bounce(target, sources, lengths, to_host=True)

    def scatter(self, source: int, targets: U64, lengths: I64) -> Flight:
        """Copy one place in pinned host memory to scattered device memory, in order."""
        return self._through_bounce(source, targets, lengths, to_host=False)

    def _through_bounce(self, host: int, spans: U64, lengths: I64, *, to_host: bool) -> Flight:
        """Kernels that touch host memory themselves are slower than a bounce through device memory
        and the copy engine, and share a device badly with those of other processes."""
        ends = np.cumsum(lengths)
        nbytes = int(ends[-1]) if ends.size else 0
        flat = (ends - lengths).view("u8")
        if _is_for_engine(lengths):
            places = zip(flat.tolist(), spans.tolist(), lengths.tolist(), strict=True)
            for offset, at, n in places:
                target, source = (host + offset, at) if to_host else (at, host + offset)
                self._driver.copy(target, source, n, self._stream)
            return self._flight()
        bounce = self._arena(self._bounces, nbytes, pinned=False)
        held: tuple[_Arena, ...] = ()
        try:
            if to_host:
                held = self._launch(flat, spans, lengths, bounce.device, 0, 0)
                self._driver.copy(host, bounce.device, nbytes, self._stream)
            else:
                self._driver.copy(bounce.device, host, nbytes, self._stream)
                held = self._launch(spans, flat, lengths, 0, bounce.device, 0)
        except DeviceError:
            self._flight(bounce, *held)  # What was begun may still use them.
            raise
        return self._flight(bounce, *held)

    def _launch(
        self,
        target: U64,
        source: U64,
        lengths: I64,
        target_base: int,
        source_base: int,
        length: int,
    ) -> tuple[_Arena, ...]:
        """Upload the lists and start the kernel, in steps so that both overlap."""
        target, source, lengths, parts, length = cut_parts(target, source, lengths, length)
        count, rows = lengths.size, 2 if length else 3
        arena = self._arena(self._lists, 8 * rows * count, pinned=True)
        mean = length or max(1, int(lengths.sum()) // count)
        step = max(LAUNCH_SPANS_MIN, LAUNCH_BYTES // mean)
        columns = (target, source, lengths.view("u8"))[:rows]
        bases = (target_base, source_base, length)
        begin, end = 0, min(max(LAUNCH_SPANS_MIN, step // 4), count)
        try:
            while begin < count:
                self._launch_some(
                    [c[begin:end] for c in columns], arena, rows * begin, parts, bases
                )
                begin, end = end, min(end + step, count)
        except DeviceError:
            self._flight(arena)  # What was begun may still use it.
            raise
        return (arena,)

    def _launch_some(
        self, columns: list[U64], arena: _Arena, at: int, parts: int, bases: tuple[int, int, int]
    ) -> None:
        """One launch, whose lists lie at word ``at`` of the arena."""
        n = columns[0].size
        for row, column in enumerate(columns):
            arena.words[at + row * n : at + (row + 1) * n] = column
        where = arena.device + 8 * at
        self._driver.copy(where, arena.host + 8 * at, 8 * n * len(columns), self._stream)
        lengths = where + 16 * n if len(columns) == 3 else 0
        self._run(where, where + 8 * n, lengths, n, parts, bases)

    def _run(
        self,
        target: int,
        source: int,
        lengths: int,
        count: int,
        parts: int,
        bases: tuple[int, int, int],
    ) -> None:
        blocks = min(self.device.blocks, -(-count * parts // (THREADS // 32)))
        arguments = (target, source, lengths, count, parts, PART_BYTES, *bases)
        self._driver.launch(self.device.kernel, blocks, THREADS, arguments, self._stream)

    def _flight(self, *held: _Arena) -> Flight:
        event = self._events.pop() if self._events else self._driver.event()
        self._driver.record(event, self._stream)
        self._flights += 1
        self._flying[self._flights] = (event, held)
        return Flight(self, self._flights)

    def has_landed(self, number: int) -> bool:
        """Whether this flight is over; then its arenas may be used again."""
        if number not in self._flying:
            return True
        event, held = self._flying[number]
        if not self._driver.is_done(event):
            return False
        del self._flying[number]
        for arena in held:
            (self._lists if arena.host else self._bounces).append(arena)
        self._events.append(event)
        return True

    def is_idle(self) -> bool:
        """Whether everything that it was given has landed."""
        try:
            return all(self.has_landed(number) for number in list(self._flying))
        except DeviceError:
            return False

    def _arena(self, free: list[_Arena], nbytes: int, *, pinned: bool) -> _Arena:
        for place, arena in enumerate(free):
            if arena.nbytes >= nbytes:
                return free.pop(place)
        if free:
            free.pop().close(self._driver)
        return _Arena(self._driver, max(1 << (nbytes - 1).bit_length(), 1 << 16), pinned=pinned)

    def close(self) -> None:
        """Give stream, events and arenas back. Only when idle."""
        for arena in (*self._lists, *self._bounces):
            arena.close(self._driver)
        for event in self._events:
            self._driver.free_event(event)
        self._driver.free_stream(self._stream)
        self._lists, self._bounces, self._events = [], [], []


class _Arena:
    """Device memory, and pinned host memory of the same size if asked for."""

    def __init__(self, driver: CudaDriver, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        self.host = driver.host_alloc(nbytes) if pinned else 0
        try:
            self.device = driver.alloc(nbytes)
        except DeviceError:
            if self.host:
                driver.host_free(self.host)
            raise
        if pinned:
            memory = (ctypes.c_uint64 * (nbytes // 8)).from_address(self.host)
            self.words: U64 = np.ctypeslib.as_array(memory)

    def close(self, driver: CudaDriver) -> None:
        driver.free(self.device)
        if self.host:
            driver.host_free(self.host)


class ResidentLists:
    """Two lists of offsets and their lengths in device memory, for copies that are made again.

    count, parts, length: as the kernel takes them. few: instead, spans for the copy engine.
    """

    def __init__(
        self, device: CudaDevice, first: U64, second: U64, lengths: I64, length: int
    ) -> None:
        self._device = device
        self.few: list[tuple[int, int, int]] | None = None
        self.where = self.count = self.parts = self.length = self.lengths = 0
        if _is_for_engine(lengths):
            self.few = list(zip(first.tolist(), second.tolist(), lengths.tolist(), strict=True))
        if self.few is not None or not lengths.size:
            return
        first, second, lengths, self.parts, self.length = cut_parts(first, second, lengths, length)
        columns = (first, second, lengths.view("u8"))[: 2 if self.length else 3]
        self.count = lengths.size
        nbytes = 8 * self.count * len(columns)
        device.use()
        self.where = device.driver.alloc(nbytes)
        self.lengths = 0 if self.length else self.where + 16 * self.count
        try:
            with device.queue() as queue:
                host = device.pinned(nbytes)
                queue.buffers.append(host)
                words = np.ctypeslib.as_array((ctypes.c_uint64 * (nbytes // 8)).from_address(host))
                np.concatenate(columns, out=words)
                target, source = (np.array([at], np.uint64) for at in (self.where, host))
                queue.copy_spans(target, source, np.array([nbytes])).settle(UPLOAD_S)
        except DeviceError:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back; the driver waits for copies that use it."""
        if self.where:
            with suppress(DeviceError):
                self._device.use()
                self._device.driver.free(self.where)
        self.where = self.count = 0


class ResidentSpans:
    """Paired spans, brought to each device that is to move them, at first use. Thread-safe."""

    def __init__(self, first: U64, second: U64, lengths: I64, length: int) -> None:
        self._arrays = first, second, lengths, length
        self._lock = threading.Lock()
        self._lists: dict[str, ResidentLists] = {}
        # Not at exit: the driver may be gone before us, and takes everything with it.
        weakref.finalize(self, _close_all, self._lists).atexit = False

    def is_on(self, uuid: str) -> bool:
        """Whether a device has the lists already."""
        return uuid in self._lists

    def on(self, device: CudaDevice) -> ResidentLists:
        """The lists on a device. Raises DeviceError."""
        with self._lock:
            lists = self._lists.get(device.facts.uuid)
            if lists is None:
                lists = ResidentLists(device, *self._arrays)
                self._lists[device.facts.uuid] = lists
            return lists

    def close(self) -> None:
        """Give the memory on devices back."""
        with self._lock:
            _close_all(self._lists)


def _close_all(lists: dict[str, ResidentLists]) -> None:
    while lists:
        lists.popitem()[1].close()


class DeviceBlock:
    """Device memory of its own allocation, zeroed by nobody. Raises DeviceError."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        device.use()
        self.address = device.driver.alloc(nbytes)

    def close(self) -> None:
        """Free it. No copy may use it any more."""
        with suppress(DeviceError):
            self.device.use()
            self.device.driver.free(self.address)


def _is_for_engine(lengths: I64) -> bool:
    few = lengths.size <= ENGINE_SPANS_MAX
    return few and bool(lengths.size) and int(lengths.min()) >= ENGINE_BYTES


def cut_parts(
    target: U64, source: U64, lengths: I64, length: int = 0
) -> tuple[U64, U64, I64, int, int]:
    """Lists such that every span has at most ``parts`` parts of PART_BYTES, and few are empty.

    Returns (target, source, lengths, parts, length); ``length`` is that of all spans, or 0 if they
    differ. Spans of about one size are cut by the kernel, which needs no longer lists for it; a
    mixture with long ones is cut here.
    """
    if length:
        return target, source, lengths, -(-length // PART_BYTES), length
    longest, shortest = int(lengths.max()), int(lengths.min())
    parts = max(1, -(-longest // PART_BYTES))
    if parts == 1 or shortest > longest - PART_BYTES:
        return target, source, lengths, parts, longest if longest == shortest else 0
    count = -(-lengths // PART_BYTES)
    which = np.repeat(np.arange(lengths.size), count)
    skip = (np.arange(which.size) - np.repeat(np.cumsum(count) - count, count)) * PART_BYTES
    sizes = np.minimum(lengths[which] - skip, PART_BYTES)
    return target[which] + skip.view("u8"), source[which] + skip.view("u8"), sizes, 1, 0


def device_address(buffer: Any) -> tuple[int, int] | None:
    """(address, nbytes) of the device memory behind an object; None if it is not such memory.

    Understands tensors of torch, ``__cuda_array_interface__`` (cupy, numba and others) and DLPack.
    Raises UsageError for memory that is not contiguous, or has no bytes.
    """
    device = getattr(getattr(buffer, "device", None), "type", "")
    if device == "cuda" and hasattr(buffer, "data_ptr"):
        found = int(buffer.data_ptr()), int(buffer.numel()) * int(buffer.element_size())
        dense = bool(buffer.is_contiguous())
    elif hasattr(buffer, "__cuda_array_interface__"):
        facts = buffer.__cuda_array_interface__
        shape, size = tuple(facts["shape"]), int(np.dtype(facts["typestr"]).itemsize)
        found = int(facts["data"][0]), size * int(np.prod(shape, dtype=np.int64))
        strides = facts.get("strides")
        dense = strides is None or _is_dense(shape, [step // size for step in strides])
    elif hasattr(buffer, "__dlpack_device__") and int(buffer.__dlpack_device__()[0]) == _DL_CUDA:
        address, sizes, steps, size = _dlpack(buffer)
        found = address, size * int(np.prod(sizes, dtype=np.int64))
        dense = steps is None or _is_dense(sizes, steps)
    else:
        return None
    if found[1] == 0:
        raise UsageError("cannot register 0 bytes")
    if not dense:
        raise UsageError("this device array is not contiguous", fix="pass a contiguous copy")
    return found


def _is_dense(shape: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether steps, counted in elements, are those of an array in C order without gaps."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(steps), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


_DL_CUDA = 2


class _DLTensor(ctypes.Structure):
    """dlpack.h of DLPack, which is the same from version 0.2 to 1.1."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _dlpack(buffer: Any) -> tuple[int, list[int], list[int] | None, int]:
    """(address, shape, steps in elements or None, bytes per element)."""
    capsule = buffer.__dlpack__(stream=-1)  # -1: no waiting; whoever registers has waited.
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    shape = tensor.shape[: tensor.ndim]
    steps = tensor.strides[: tensor.ndim] if tensor.strides else None
    size = tensor.bits * tensor.lanes // 8
    return (tensor.data or 0) + tensor.byte_offset, shape, steps, size
