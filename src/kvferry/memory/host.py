"""Host memory that another process can map, and addresses of memory that exists already.

Shareable memory is an anonymous file (memfd) that is filled before it is handed out and sealed
against shrinking: a mapping of a file that its owner can cut short may kill the reader with
SIGBUS at any access, so :func:`map_shared` looks at size, seals and reserved pages first.
Nothing here is global; every descriptor and mapping has one owner and one ``close``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import stat
import sys
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import ClosedError, RegistrationError, UsageError

log = logging.getLogger(__name__)

# Linux constants that Python 3.11 does not have.
_MFD_NOEXEC_SEAL = 0x8
_SEAL_FUTURE_WRITE = 0x10
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_PROT_NONE = 0

HUGE_BYTES = 2 << 20
"""Size of a huge page on x86-64, and on arm64 with 4 KiB pages; elsewhere nothing is gained."""

_RESERVE_STEP_BYTES = 64 << 20
_FIXES = {
    errno.EMFILE: "raise the limit of open files, for example with ulimit -n 65536",
    errno.ENFILE: "the whole machine is out of file descriptors; raise fs.file-max",
    errno.ENOMEM: "free memory, raise the container's memory limit, or make the pool smaller",
    errno.ENOSPC: "make the file system larger, for a container's /dev/shm with --shm-size",
    errno.EACCES: "the mount or a security policy forbids it; name another directory",
}


class _Mapping:
    """Mapped bytes, unmapped when the last reference is gone; numpy views hold one."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool, populate: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        # Python's own mmap objects keep a second descriptor open; this call does not.
        address = _map(fd, nbytes, protection, flags)
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, not writable),
        }
        self.address: int = address
        # Not at exit: a thread may still be copying, and the system unmaps everything anyway.
        weakref.finalize(self, _libc().munmap, address, nbytes).atexit = False


class MappedBuffer:
    """Bytes of a peer's (or any) shared file in this address space. Made by :func:`map_shared`.

    nbytes: size in bytes.
    is_writable: whether the bytes may be written; writing to others ends the process.
    """

    def __init__(self, mapping: _Mapping, nbytes: int, *, is_writable: bool) -> None:
        self._mapping: _Mapping | None = mapping
        self.nbytes = nbytes
        self.is_writable = is_writable

    @property
    def address(self) -> int:
        """First byte, in this process. Raises ClosedError after :meth:`close`."""
        return self._open().address

    @property
    def is_closed(self) -> bool:
        return self._mapping is None

    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes as uint8[nbytes], without a copy; read-only when the mapping is.

        The array keeps the memory mapped, also after :meth:`close`. Raises ClosedError.
        """
        return np.asarray(self._open())

    def close(self) -> None:
        """Unmap, at once or when the last array over it is gone. May be called again.

        Whoever holds a bare address must have stopped using it.
        """
        self._mapping = None

    def _open(self) -> _Mapping:
        if self._mapping is None:
            raise ClosedError(f"this {type(self).__name__} of {self.nbytes} bytes is closed")
        return self._mapping


class SharedBuffer(MappedBuffer):
    """Memory of this process that peers can map through :attr:`fd`.

    Made by :func:`allocate_shared`. Writable here; a garbage-collected buffer that was never
    closed warns with ResourceWarning and closes.

    is_sealed: whether the file can never change its size.
    """

    def __init__(self, fd: int, nbytes: int, *, name: str, is_sealed: bool) -> None:
        self._fd: int | None = None  # Ours only once it is mapped; until then the caller closes it.
        mapping = _Mapping(fd, nbytes, writable=True, populate=False)
        super().__init__(mapping, nbytes, is_writable=True)
        self._fd = fd
        self.name = name
        self.is_sealed = is_sealed

    @property
    def fd(self) -> int:
        """The file's descriptor, owned by this buffer. Raises ClosedError after :meth:`close`."""
        if self._fd is None:
            raise ClosedError(f"the shared buffer {self.name!r} is closed")
        return self._fd

    def close(self) -> None:
        """Close the descriptor at once; the memory goes as for MappedBuffer.close.

        Peers that have mapped it keep their mapping, and the bytes live until they unmap.
        """
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        super().close()

    def __del__(self) -> None:
        if self._fd is not None:
            warnings.warn(f"shared buffer {self.name!r} was never closed", ResourceWarning, 2)
            self.close()


def allocate_shared(
    nbytes: int, *, name: str = "kvferry", directory: str | None = None, peers_write: bool = True
) -> SharedBuffer:
    """Allocate ``nbytes`` (1 or more) zero bytes that a peer can map.

    name: shown in /proc/PID/maps; no more than a label.
    directory: put an unlinked file there (such as ``"/dev/shm"``) instead of a memfd. Such a file
        cannot be sealed everywhere. Where there is no memfd, the default is the temporary folder.
    peers_write: False seals the memfd against any further writable mapping, by whomever; this
        process keeps its own. Unlinked files ignore it.

    Every page is reserved before this returns, so that a lack of memory is an error here and not
    SIGBUS later. Blocks meanwhile, about 0.2 to 1 s per GiB. Raises RegistrationError,
    with nothing left behind, when memory, space or descriptors do not suffice.
    """
    if nbytes < 1:
        raise UsageError(f"cannot allocate {nbytes} bytes; at least 1 is needed")
    if directory is None and not hasattr(os, "memfd_create"):
        directory = tempfile.gettempdir()
    if directory is None:
        _check_memory(nbytes)
        fd = _memfd(name)
    else:
        _check_space(directory, nbytes)
        fd = _unlinked_file(directory, name)
    try:
        os.ftruncate(fd, nbytes)
        buffer = SharedBuffer(fd, nbytes, name=name, is_sealed=directory is None)
    except OSError as error:
        os.close(fd)
        raise _os_failure(error.errno, f"could not size {nbytes} bytes of memory") from error
    except BaseException:
        os.close(fd)
        raise
    try:
        _reserve(buffer, directory or "memory")
        if directory is None:
            _seal(fd, 0 if peers_write else _SEAL_FUTURE_WRITE)
    except BaseException:
        buffer.close()
        raise
    return buffer


def readonly_fd(fd: int, *, or_writable: bool = False) -> int:
    """A new descriptor of the same file that allows reading only; the caller closes it.

    Guards against a peer's mistakes. A peer of the same user that means harm can open the file
    again; only ``allocate_shared(peers_write=False)`` keeps that one out.
    Raises RegistrationError when it cannot be opened; with ``or_writable``, a machine without
    /proc gets a plain duplicate and a warning instead.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        os.fstat(fd)  # A bad descriptor is the caller's mistake, not a missing /proc.
        if not or_writable:
            raise RegistrationError(
                "cannot open shared memory read-only: /proc is not mounted",
                fix="mount /proc, or allow descriptors that a peer could write to",
            ) from error
        log.warning("/proc is not mounted: peers get descriptors that they could write to")
        return os.dup(fd)
    except OSError as error:
        raise _os_failure(error.errno, "could not open shared memory read-only") from error


def map_shared(
    fd: int, nbytes: int, *, writable: bool, trust_unsealed: bool = False
) -> MappedBuffer:
    """Map the first ``nbytes`` of a file that a peer handed over.

    fd: stays the caller's, who may close it once this has returned.
    trust_unsealed: also accept a file that its owner could cut short. Then a faulty owner can end
        this process with SIGBUS; for files from this program itself.

    Blocks while pages are mapped, about 0.1 ms per MiB at most. Raises RegistrationError, with
    nothing mapped, when the file is too small, unsealed, has unreserved pages, or does not map.
    """
    if nbytes < 1:
        raise UsageError(f"cannot map {nbytes} bytes; at least 1 is needed")
    try:
        info = os.fstat(fd)
    except OSError as error:
        raise _os_failure(error.errno, f"descriptor {fd} cannot be mapped") from error
    if not stat.S_ISREG(info.st_mode):
        raise RegistrationError(f"descriptor {fd} is not a file in memory and cannot be mapped")
    if info.st_size < nbytes:
        raise RegistrationError(
            f"the shared file holds {info.st_size} bytes, but {nbytes} were announced",
            fix="the peer described another region than it sent; register it again there",
        )
    if _is_shrink_sealed(fd):
        if info.st_blocks * 512 < nbytes:
            raise RegistrationError(
                f"only {info.st_blocks * 512} of {nbytes} bytes of the shared file are reserved",
                fix="reserve its pages (posix_fallocate) before handing it over",
            )
    elif not trust_unsealed:
        raise RegistrationError(
            "the shared file is not sealed against shrinking, so its owner could end this process",
            fix="seal it with F_SEAL_SHRINK, or allocate it with kvferry",
        )
    mapping = _Mapping(fd, nbytes, writable=writable, populate=True)
    return MappedBuffer(mapping, nbytes, is_writable=writable)


def address_of(buffer: Any, *, writable: bool = False) -> tuple[int, int]:
    """Address and size in bytes of memory that exists already. The caller keeps it alive.

    buffer: a C-contiguous numpy array, anything with ``__array_interface__``, a torch tensor on
        the CPU, a bytes-like object (bytearray, memoryview, mmap), or a pair (address, nbytes).
    writable: also refuse what is known to be read-only.

    Raises UsageError for empty, scattered, read-only or device memory and for other objects.
    """
    if isinstance(buffer, tuple):
        return _checked_pair(buffer)
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "element_size"):
        return _tensor_address(buffer)
    if hasattr(buffer, "__cuda_array_interface__"):
        raise UsageError(_DEVICE_MEMORY.format(kind=type(buffer).__name__, where="a GPU"))
    try:
        array = np.asarray(buffer if hasattr(buffer, "__array_interface__") else memoryview(buffer))
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(
            f"{type(buffer).__name__} is no memory that can be registered: {error}",
            fix="pass a numpy array, a torch tensor, a bytearray, or (address, nbytes)",
        ) from error
    if array.dtype.hasobject:
        raise UsageError("an array of Python objects holds pointers, not data")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"an array of shape {array.shape} with strides {array.strides} is not contiguous",
            fix="pass a contiguous array, or register the memory that it is a view of",
        )
    if array.nbytes == 0:
        raise UsageError("cannot register 0 bytes")
    if writable and not array.flags.writeable:
        raise UsageError(f"this {type(buffer).__name__} is read-only, but peers are to write to it")
    return int(array.__array_interface__["data"][0]), array.nbytes


_DEVICE_MEMORY = (
    "{kind} lies on {where}, not in host memory; this release moves host memory only: copy it first"
)


def _checked_pair(pair: tuple[Any, ...]) -> tuple[int, int]:
    if len(pair) != 2 or not all(isinstance(value, int) for value in pair):
        raise UsageError("a tuple must be (address, nbytes), two integers")
    address, nbytes = pair
    if address < 1 or nbytes < 1 or address + nbytes > 1 << 64:
        raise UsageError(f"{nbytes} bytes at address {address:#x} cannot exist")
    return address, nbytes


def _tensor_address(tensor: Any) -> tuple[int, int]:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise UsageError(_DEVICE_MEMORY.format(kind="this tensor", where=f"a {device} device"))
    if not tensor.is_contiguous():
        raise UsageError("this tensor is not contiguous", fix="pass tensor.contiguous()")
    nbytes = int(tensor.numel()) * int(tensor.element_size())
    if nbytes == 0:
        raise UsageError("cannot register 0 bytes")
    return int(tensor.data_ptr()), nbytes


def _is_shrink_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except (AttributeError, OSError):  # No such thing here, or not on this kind of file.
        return False


def _seal(fd: int, more_seals: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | more_seals
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        raise _os_failure(error.errno, "could not seal shared memory") from error


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    label = name.replace("\0", "").encode(errors="replace")[:200].decode(errors="replace")
    try:
        with contextlib.suppress(OSError):
            # Hardened kernels insist on it; those before 6.3 do not know it.
            return os.memfd_create(label, flags | _MFD_NOEXEC_SEAL)
        return os.memfd_create(label, flags)
    except OSError as error:
        raise _os_failure(error.errno, f"could not create shared memory {name!r}") from error


def _unlinked_file(directory: str, name: str) -> int:
    try:
        fd, path = tempfile.mkstemp(prefix=f"{Path(name).name}-", dir=directory)
        os.unlink(path)
    except OSError as error:
        what = f"could not create shared memory {name!r} in {directory}"
        raise _os_failure(error.errno, what) from error
    return fd


def _map(fd: int, nbytes: int, protection: int, flags: int) -> int:
    """The address of a new mapping; it begins where a huge page can, if it could hold one."""
    libc = _libc()
    hole = None
    if nbytes >= HUGE_BYTES and sys.platform == "linux":
        # Room for any alignment, of which the mapping then takes a part and the rest is given back.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        hole = _mapped(libc.mmap(None, nbytes + HUGE_BYTES, _PROT_NONE, private, -1, 0))
    if hole is None:
        address = _mapped(libc.mmap(None, nbytes, protection, flags, fd, 0))
    else:
        start = -(-hole // HUGE_BYTES) * HUGE_BYTES
        address = _mapped(libc.mmap(start, nbytes, protection, flags | _MAP_FIXED, fd, 0))
        number = ctypes.get_errno()
        end = start + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE if address else start
        libc.munmap(end, hole + nbytes + HUGE_BYTES - end)
        if start > hole:
            libc.munmap(hole, start - hole)
        ctypes.set_errno(number)
    if address is None:
        raise _os_failure(ctypes.get_errno(), f"could not map {nbytes} bytes of shared memory")
    return address


def _mapped(address: int | None) -> int | None:
    return None if address == ctypes.c_void_p(-1).value else address


def _reserve(buffer: SharedBuffer, where: str) -> None:
    """Give every byte its page now, and huge ones where the system can."""
    if sys.platform == "linux":
        _make_huge(buffer)
        # Filling through the mapping also fills the page tables. It may be refused, as may the
        # huge pages: the reservation below decides.
        _libc().madvise(buffer.address, buffer.nbytes, _MADV_POPULATE_WRITE)
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        # In steps: a signal makes the system undo and repeat the step that it interrupts.
        for begin in range(0, buffer.nbytes, _RESERVE_STEP_BYTES):
            size = min(_RESERVE_STEP_BYTES, buffer.nbytes - begin)
            os.posix_fallocate(buffer.fd, begin, size)
    except OSError as error:
        what = f"could not reserve {buffer.nbytes} bytes of shared memory in {where}"
        raise _os_failure(error.errno, what) from error


def _make_huge(buffer: SharedBuffer) -> None:
    """Ask for huge pages, which spare scattered copies most of their page walks.

    Pages keep the size that they are made with, so this comes before any other access. Advice
    alone is void unless the administrator allowed huge pages for shared memory. MADV_COLLAPSE
    (Linux 6.1; madvise(2)) needs no permission: it makes a huge page out of what is there and of
    holes, but not of holes alone, so each gets one byte first. That is quicker than to fill it
    with small pages. By a call, not through the mapping: a full file system answers an error.
    """
    libc = _libc()
    libc.madvise(buffer.address, buffer.nbytes, mmap.MADV_HUGEPAGE)
    whole = buffer.nbytes // HUGE_BYTES * HUGE_BYTES
    with contextlib.suppress(OSError):
        for begin in range(0, whole, HUGE_BYTES):
            os.pwrite(buffer.fd, b"\0", begin)
        libc.madvise(buffer.address, whole, _MADV_COLLAPSE)


def _check_space(directory: str, nbytes: int) -> None:
    try:
        info = os.statvfs(directory)
    except OSError as error:
        raise _os_failure(error.errno, f"cannot use {directory} for shared memory") from error
    free = info.f_bavail * info.f_frsize
    if free < nbytes:
        raise RegistrationError(
            f"{directory} has {free} bytes free, but {nbytes} are needed",
            fix=_FIXES[errno.ENOSPC],
        )


def _check_memory(nbytes: int) -> None:
    """Refuse what the kernel would answer by killing a process instead of by an error."""
    free = _available_bytes()
    if free is not None and free < nbytes:
        raise RegistrationError(
            f"{free} bytes of memory are available, but {nbytes} are needed",
            fix=_FIXES[errno.ENOMEM],
        )


def _available_bytes(root: str = "/") -> int | None:
    """Memory that can still be used: the machine's, or the container's limit if that is less."""
    found = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = Path(root, "proc/meminfo").read_text().splitlines()
        table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        found.append(table["MemAvailable"] + table["SwapFree"])
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    ):
        group = Path(root, "sys/fs/cgroup")
        with contextlib.suppress(OSError, ValueError, LookupError):
            words = (group / limit).with_name("memory.stat").read_text().split()
            table = dict(zip(words[::2], map(int, words[1::2]), strict=True))
            # Cached pages of files are given up when memory is short; shared memory is not
            # among them, because the kernel lists it with the anonymous pages.
            cached = table[f"{prefix}active_file"] + table[f"{prefix}inactive_file"]
            total = int((group / limit).read_text())
            found.append(max(0, total - int((group / used).read_text()) + cached))
    return min(found, default=None)


def _os_failure(number: int | None, what: str) -> RegistrationError:
    reason = os.strerror(number or 0)
    return RegistrationError(f"{what}: {reason}", fix=_FIXES.get(number or 0, ""))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc
