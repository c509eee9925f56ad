"""Shared memory is reserved, sealed, checked before it is mapped, and given back."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import gc
import logging
import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.errors import ClosedError, RegistrationError, UsageError
from kvferry.memory import host

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def no_leaked_descriptors() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    leaked = {fd for fd in set(os.listdir("/proc/self/fd")) - before if _is_open(int(fd))}
    assert not leaked, [os.readlink(f"/proc/self/fd/{fd}") for fd in leaked]


@pytest.fixture
def shared() -> Iterator[host.SharedBuffer]:
    buffer = host.allocate_shared(3 * PAGE + 5, name="of-the-test")
    yield buffer
    buffer.close()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def memfd(nbytes: int, seals: int, *, reserve: bool = True) -> int:
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if reserve:
        os.posix_fallocate(fd, 0, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def mapped_as(address: int) -> str:
    """Protection of the mapping that holds an address, such as ``"r--s"``; "" without one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, protection = line.split()[:2]
        first, end = (int(part, 16) for part in span.split("-"))
        if first <= address < end:
            return protection
    return ""


def run(script: str, *arguments: str, before: tuple[str, ...] = (), **options: Any) -> str:
    command = [*before, sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_allocated_memory_is_zero_reserved_and_writable(shared: host.SharedBuffer) -> None:
    assert shared.nbytes == 3 * PAGE + 5
    assert os.fstat(shared.fd).st_size == shared.nbytes
    assert os.fstat(shared.fd).st_blocks * 512 >= shared.nbytes
    assert not os.get_inheritable(shared.fd)
    view = shared.array()
    assert (view.dtype, view.shape, view.any()) == (np.uint8, (shared.nbytes,), False)
    view[-1] = 9
    assert os.pread(shared.fd, 1, shared.nbytes - 1) == b"\x09"
    assert host.address_of(view) == (shared.address, shared.nbytes)


def huge_kib(address: int) -> int:
    """KiB of the mapping at an address that huge pages serve, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, end = (int(part, 16) for part in words[0].split("-"))
            inside = first <= address < end
        elif inside and words[0] == "ShmemPmdMapped:":
            return int(words[1])
    return 0


def collapses() -> bool:
    """Whether this kernel makes huge pages of shared memory on demand (Linux 6.1)."""
    nbytes = host.HUGE_BYTES
    fd = memfd(nbytes, 0)
    address = host._map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    done = host._libc().madvise(address, nbytes, host._MADV_COLLAPSE) == 0
    host._libc().munmap(address, nbytes)
    os.close(fd)
    return bool(done)


@pytest.mark.skipif(not collapses(), reason="this kernel makes no huge pages on demand")
def test_large_memory_has_huge_pages_here_and_at_the_peer() -> None:
    shared = host.allocate_shared(2 * host.HUGE_BYTES + 5, name="large")
    mapped = host.map_shared(shared.fd, shared.nbytes, writable=False)
    assert huge_kib(shared.address) == 2 * host.HUGE_BYTES // 1024
    assert not mapped.array()[::PAGE].any()
    assert huge_kib(mapped.address) == 2 * host.HUGE_BYTES // 1024
    mapped.close()
    shared.close()


@pytest.mark.parametrize("extra", [0, 1, PAGE, PAGE + 1])
def test_large_mappings_are_aligned_and_leave_nothing_around_them(extra: int) -> None:
    with open("/proc/self/maps") as file:
        before = sum(1 for _ in file)
    nbytes = host.HUGE_BYTES + extra
    shared = host.allocate_shared(nbytes, name="aligned")
    assert shared.address % host.HUGE_BYTES == 0
    assert mapped_as(shared.address + nbytes - 1) == "rw-s"
    assert mapped_as(shared.address - 1) != "---p"
    assert mapped_as(shared.address + -(-nbytes // PAGE) * PAGE) != "---p"
    shared.close()
    with open("/proc/self/maps") as file:
        assert sum(1 for _ in file) <= before + 1


@pytest.mark.parametrize("size", [0, PAGE, 100 * PAGE])
def test_sealed_memory_keeps_its_size_and_its_seals(shared: host.SharedBuffer, size: int) -> None:
    assert shared.is_sealed
    with pytest.raises(PermissionError):
        os.ftruncate(shared.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(shared.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(shared.fd).st_size == shared.nbytes


def test_peers_see_each_others_writes(shared: host.SharedBuffer) -> None:
    mapped = host.map_shared(shared.fd, PAGE + 1, writable=True)
    shared.array()[PAGE] = 7
    assert mapped.array()[PAGE] == 7
    mapped.array()[0] = 3
    assert shared.array()[0] == 3
    mapped.close()


@pytest.mark.slow
def test_another_process_maps_and_writes(shared: host.SharedBuffer) -> None:
    script = """
        import sys
        from kvferry.memory import host
        mapped = host.map_shared(int(sys.argv[1]), int(sys.argv[2]), writable=True)
        mapped.array()[-1] = mapped.array()[0] + 1
    """
    shared.array()[0] = 41
    run(script, str(shared.fd), str(shared.nbytes), pass_fds=[shared.fd])
    assert shared.array()[-1] == 42


def test_memory_closed_to_peers_can_be_read_but_not_written() -> None:
    buffer = host.allocate_shared(PAGE, peers_write=False)
    buffer.array()[0] = 5
    with pytest.raises(RegistrationError, match="not permitted"):
        host.map_shared(buffer.fd, PAGE, writable=True)
    mapped = host.map_shared(buffer.fd, PAGE, writable=False)
    buffer.array()[1] = 6
    assert mapped.array()[:2].tolist() == [5, 6]
    mapped.close()
    buffer.close()


def test_close_can_be_repeated_and_forgets_everything() -> None:
    buffer = host.allocate_shared(PAGE)
    fd, address = buffer.fd, buffer.address
    buffer.close()
    buffer.close()
    assert buffer.is_closed
    assert not _is_open(fd)
    assert mapped_as(address) == ""
    for use in (lambda: buffer.fd, lambda: buffer.address, buffer.array):
        with pytest.raises(ClosedError):
            use()


def test_arrays_outlive_close_and_unmap_when_the_last_is_gone() -> None:
    buffer = host.allocate_shared(PAGE)
    address = buffer.address
    piece = buffer.array()[10:20].view(np.uint16)
    buffer.close()
    piece[0] = 0x0102
    assert mapped_as(address) == "rw-s"
    del piece
    gc.collect()
    assert mapped_as(address) == ""


def test_a_forgotten_buffer_warns_and_closes() -> None:
    buffer: Any = host.allocate_shared(PAGE, name="forgotten")
    fd = buffer.fd
    with pytest.warns(ResourceWarning, match="forgotten"):
        del buffer  # The last reference: Python finalises it here.
    assert not _is_open(fd)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_allocated_or_mapped(nbytes: int) -> None:
    with pytest.raises(UsageError):
        host.allocate_shared(nbytes)
    with pytest.raises(UsageError):
        host.map_shared(0, nbytes, writable=False)


@pytest.mark.parametrize("directory", [None, "/dev/shm"])
def test_more_memory_than_there_is_names_both_numbers(directory: str | None) -> None:
    with pytest.raises(RegistrationError, match=rf"\d+ bytes .*{1 << 50} are needed") as raised:
        host.allocate_shared(1 << 50, directory=directory)
    assert raised.value.fix


def test_an_unlinked_file_serves_where_a_directory_is_named(tmp_path: Path) -> None:
    buffer = host.allocate_shared(PAGE, directory=str(tmp_path), name="../odd/name")
    assert list(tmp_path.iterdir()) == []
    assert not buffer.is_sealed
    with pytest.raises(RegistrationError, match="not sealed"):
        host.map_shared(buffer.fd, PAGE, writable=False)
    mapped = host.map_shared(buffer.fd, PAGE, writable=False, trust_unsealed=True)
    buffer.array()[4] = 4
    assert mapped.array()[4] == 4
    mapped.close()
    buffer.close()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RegistrationError, match="nowhere"):
        host.allocate_shared(PAGE, directory=str(tmp_path / "nowhere"))


def test_without_memfd_the_temporary_folder_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(host.tempfile, "tempdir", str(tmp_path))
    buffer = host.allocate_shared(PAGE, name="plain")
    assert str(tmp_path) in os.readlink(f"/proc/self/fd/{buffer.fd}")
    buffer.close()


def test_kernels_that_do_not_know_the_newest_flag_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create

    def old_kernel(name: str, flags: int) -> int:
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    buffer = host.allocate_shared(PAGE)
    assert buffer.is_sealed
    buffer.close()


@pytest.mark.parametrize("step", ["ftruncate", "posix_fallocate"])
@pytest.mark.parametrize("directory", [None, "/dev/shm"])
def test_a_refused_step_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, step: str, directory: str | None
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = os.listdir("/dev/shm")
    maps = Path("/proc/self/maps").read_text().count("left-behind")
    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(RegistrationError, match=rf"{PAGE} bytes.*No space.*--shm-size"):
        host.allocate_shared(PAGE, directory=directory, name="left-behind")
    assert os.listdir("/dev/shm") == files
    assert Path("/proc/self/maps").read_text().count("left-behind") == maps


@pytest.mark.slow
def test_no_free_descriptors_is_an_error_that_says_what_to_raise() -> None:
    script = """
        import os, resource
        from kvferry.errors import RegistrationError
        from kvferry.memory import host
        buffer = host.allocate_shared(4096)
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
        calls = [
            lambda: host.allocate_shared(4096),
            lambda: host.allocate_shared(4096, directory="/dev/shm"),
            lambda: host.readonly_fd(buffer.fd),
        ]
        for call in calls:
            try:
                call()
            except RegistrationError as error:
                print("ulimit -n" in str(error))
        host.map_shared(buffer.fd, 4096, writable=False)  # Needs no descriptor of its own.
        os.close(taken.pop())
        host.allocate_shared(4096).close()
        buffer.close()
        print("again")
    """
    assert run(script) == "True\nTrue\nTrue\nagain\n"


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small tmpfs")
def test_a_full_tmpfs_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    script = """
        import os, subprocess, sys
        from kvferry.errors import RegistrationError
        from kvferry.memory import host
        where = sys.argv[1]
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", where], check=True)
        def attempt():
            try:
                host.allocate_shared(2 << 20, directory=where)
            except RegistrationError as error:
                info = os.statvfs(where)
                print(error, os.listdir(where), info.f_bavail * info.f_frsize)
        attempt()
        host._check_space = lambda *_: None  # As if another process took the space in between.
        attempt()
    """
    before = ("unshare", "-m", "--propagation", "private")
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this sandbox forbids mount namespaces")
    first, second = run(script, str(tmp_path), before=before).splitlines()
    assert "has 1048576 bytes free, but 2097152 are needed" in first
    assert "could not reserve 2097152 bytes" in second
    assert "No space" in second
    for line in (first, second):
        assert "--shm-size" in line
        assert line.endswith("[] 1048576")


def test_a_readonly_descriptor_cannot_write(shared: host.SharedBuffer) -> None:
    fd = host.readonly_fd(shared.fd)
    try:
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        with pytest.raises(RegistrationError, match="Permission denied"):
            host.map_shared(fd, PAGE, writable=True)
        mapped = host.map_shared(fd, shared.nbytes, writable=False)
    finally:
        os.close(fd)
    shared.array()[1] = 8
    assert mapped.array()[1] == 8
    assert mapped_as(mapped.address) == "r--s"
    with pytest.raises(ValueError, match="read-only"):
        mapped.array()[1] = 0
    assert not mapped.is_writable
    mapped.close()
    mapped.close()
    with pytest.raises(ClosedError):
        mapped.array()


@pytest.mark.slow
def test_writing_to_a_read_only_mapping_kills_the_writer_alone(shared: host.SharedBuffer) -> None:
    script = """
        import ctypes, sys
        from kvferry.memory import host
        mapped = host.map_shared(int(sys.argv[1]), 100, writable=False)
        ctypes.memset(mapped.address, 1, 1)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(shared.fd)]
    done = subprocess.run(
        command, pass_fds=[shared.fd], timeout=60, check=False, stderr=subprocess.DEVNULL
    )
    assert done.returncode == -11
    assert shared.array()[0] == 0


def test_without_proc_a_writable_descriptor_needs_consent(
    shared: host.SharedBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_proc(path: str, _: int) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    monkeypatch.setattr(os, "open", no_proc)
    with pytest.raises(RegistrationError, match="mount /proc"):
        host.readonly_fd(shared.fd)
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        fd = host.readonly_fd(shared.fd, or_writable=True)
    os.close(fd)
    assert "write" in caplog.text


@pytest.mark.parametrize(
    ("size", "seals", "reserve", "words"),
    [
        (PAGE - 1, fcntl.F_SEAL_SHRINK, True, f"holds {PAGE - 1} bytes, but {PAGE} were announced"),
        (2 * PAGE, 0, True, "not sealed"),
        (2 * PAGE, fcntl.F_SEAL_GROW, True, "not sealed"),
        (2 * PAGE, fcntl.F_SEAL_SHRINK, False, "only 0 of"),
    ],
)
def test_files_that_could_end_the_process_are_refused(
    size: int, seals: int, reserve: bool, words: str
) -> None:
    fd = memfd(size, seals, reserve=reserve)
    with pytest.raises(RegistrationError, match=words):
        host.map_shared(fd, PAGE, writable=False)
    os.close(fd)


@pytest.mark.parametrize("trust", [False, True])
def test_what_is_no_file_is_refused(trust: bool) -> None:
    ends = os.pipe()
    with pytest.raises(RegistrationError, match="not a file"):
        host.map_shared(ends[0], 1, writable=False, trust_unsealed=trust)
    for fd in ends:
        os.close(fd)
    with pytest.raises(RegistrationError, match="Bad file descriptor"):
        host.map_shared(ends[0], 1, writable=False, trust_unsealed=trust)


class Tensor:
    """What address_of asks of a torch tensor."""

    def __init__(self, device: str = "cpu", count: int = 6, contiguous: bool = True) -> None:
        self.device = SimpleNamespace(type=device)
        self.memory = (ctypes.c_uint16 * max(1, count))()
        self.count, self.contiguous = count, contiguous

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self.contiguous


def test_addresses_of_memory_that_exists_already() -> None:
    numbers = np.arange(12, dtype=np.int32).reshape(3, 4)
    where = numbers.ctypes.data
    assert host.address_of(numbers, writable=True) == (where, 48)
    assert host.address_of(numbers[1:]) == (where + 16, 32)
    assert host.address_of(memoryview(numbers)) == (where, 48)
    wrapped = SimpleNamespace(__array_interface__=numbers.__array_interface__)
    assert host.address_of(wrapped) == (where, 48)
    assert host.address_of((where, 48), writable=True) == (where, 48)

    raw = bytearray(b"abc")
    address, nbytes = host.address_of(raw, writable=True)
    ctypes.memset(address + 1, ord("x"), 1)
    assert (bytes(raw), nbytes) == (b"axc", 3)
    raw.append(1)  # No export was kept: the caller may still resize it.
    assert host.address_of(b"abc")[1] == 3
    assert host.address_of(array.array("d", [1.0]))[1] == 8
    with mmap.mmap(-1, PAGE) as pages:
        assert host.address_of(pages)[1] == PAGE

    tensor = Tensor()
    assert host.address_of(tensor) == (tensor.data_ptr(), 12)


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (np.zeros((4, 4))[:, :2], "not contiguous"),
        (np.zeros((4, 4)).T[1:], "not contiguous"),
        (memoryview(bytes(8))[::2], "not contiguous"),
        (np.zeros((0, 3)), "0 bytes"),
        (b"", "0 bytes"),
        (np.array([object()]), "Python objects"),
        ("text", "no memory"),
        ([1, 2], "no memory"),
        (None, "no memory"),
        (17, "no memory"),
        ((1, 2, 3), "two integers"),
        ((1.5, 2), "two integers"),
        ((0, 10), "cannot exist"),
        ((4096, 0), "cannot exist"),
        (((1 << 64) - 4096, 8192), "cannot exist"),
        (Tensor(device="cuda"), r"host memory only"),
        (SimpleNamespace(__cuda_array_interface__={}), r"host memory only"),
        (Tensor(contiguous=False), r"tensor\.contiguous"),
        (Tensor(count=0), "0 bytes"),
    ],
)
def test_what_cannot_be_registered_is_refused_in_words(buffer: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        host.address_of(buffer)


@pytest.mark.parametrize("buffer", [b"abc", np.broadcast_to(np.uint8(1), 1), memoryview(b"abc")])
def test_read_only_memory_is_refused_where_peers_write(buffer: Any) -> None:
    assert host.address_of(buffer)[1] >= 1
    with pytest.raises(UsageError, match="read-only"):
        host.address_of(buffer, writable=True)


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal: 90 kB\nMemAvailable:  50 kB\nSwapFree:  10 kB\n"}
SECOND = {
    "sys/fs/cgroup/memory.max": "30000\n",
    "sys/fs/cgroup/memory.current": "20000\n",
    "sys/fs/cgroup/memory.stat": "anon 1\nactive_file 300\ninactive_file 40\n",
}
FIRST = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "900\n",
    "sys/fs/cgroup/memory/memory.stat": "total_active_file 1\ntotal_inactive_file 2\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (MEMINFO, 60 << 10),
        ({**MEMINFO, **SECOND}, 10_340),
        ({**MEMINFO, **SECOND, "sys/fs/cgroup/memory.max": "max\n"}, 60 << 10),
        ({**MEMINFO, **FIRST}, 103),
        ({"proc/meminfo": "nonsense"}, None),
    ],
)
def test_available_memory_is_the_least_of_machine_and_container(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
    write_files(tmp_path, files)
    assert host._available_bytes(str(tmp_path)) == free
