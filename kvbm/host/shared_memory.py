"""SharedMemory: a memfd whose pages are all allocated at once, page-locked on request.

It has no name and disappears with the last process that maps it. If it does not fit into memory, the request fails
before any page is allocated, with the requested and the available size. All pages are prefaulted in parallel at
start-up, so that later copies cause no page faults. Only `region` uses it.

All memory that processes of one engine share is sealed: its length cannot change. Without a seal, any process that has
the descriptor could shorten it, and every process that then touches its mapping would end by SIGBUS. A process that
maps the memory of another one checks the seals first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import math
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kvbm.errors import EnvironmentProblem
from kvbm.host.libc import LIBC, last_error
from kvbm.host.machine_memory import HostMemory

PREFAULT_BYTES = 64 << 20
MAX_PREFAULT_THREADS = 16
PIN_BYTES = 64 << 30
CAPACITY_HINT = "lower `tiers.host.capacity`"

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14
MPOL_BIND = 2
MPOL_INTERLEAVE = 3
SYSCALL_MBIND = {"x86_64": 237, "aarch64": 235}
SYSCALL_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
MEMBARRIER_GLOBAL_EXPEDITED = 1 << 1
BITS_PER_LONG = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class SharedMemory:
    """One memfd and its mapping. `close` of the owner frees the memory; views of it that still exist read zeros."""

    def __init__(self, fd: int, mapping: mmap.mmap, *, is_owner: bool = True) -> None:
        self.fd = fd
        self._is_owner = is_owner
        self.mapping = mapping
        self.length = len(mapping)
        self.address = int(np.frombuffer(mapping, np.uint8, 1).ctypes.data)
        self._pinned: list[int] = []  # offsets of the page-locked ranges
        self._pin_device = 0
        self._is_closed = False

    @classmethod
    def allocate(
        cls,
        name: str,
        payload_bytes: int,
        *,
        who: str,
        nodes: Sequence[int] = (),
        memory: HostMemory,
        progress: Progress | None,
    ) -> SharedMemory:
        """Allocate whole pages for `payload_bytes`: reserved huge pages if there are enough, on all these NUMA nodes.

        `progress(done_bytes, total_bytes)` is called from this thread. Raises EnvironmentProblem.
        """
        nodes = nodes if memory.node_count() > 1 else ()
        page_bytes, huge_bytes_free = memory.huge_pages()
        huge_bytes = _round_up(payload_bytes, page_bytes) if page_bytes else 0
        if 0 < huge_bytes <= huge_bytes_free:
            try:
                return cls._allocate(name, huge_bytes, who, nodes, None, progress)
            except EnvironmentProblem as problem:  # another rank took them, or they are on another NUMA node
                log.warning("kvbm: %s uses small pages: %s", who, problem.message)
        elif huge_bytes_free > 0:
            free, needed = _shown(huge_bytes_free), _shown(huge_bytes)
            log.warning("kvbm: %s uses small pages: %s of huge pages are free, it requires %s", who, free, needed)
        return cls._allocate(name, _round_up(payload_bytes, mmap.PAGESIZE), who, nodes, memory, progress)

    @classmethod
    def _allocate(
        cls,
        name: str,
        length: int,
        who: str,
        nodes: Sequence[int],
        memory: HostMemory | None,
        progress: Progress | None,
    ) -> SharedMemory:
        """`memory` is None for reserved huge pages: once mapped, no other process can take them."""
        check = None
        if memory is not None:
            check = partial(_require_room, who, length, memory, nodes[0] if len(nodes) == 1 else None)
            check()
        shared = cls(*_map_new(name, length, is_huge=memory is None))
        try:
            if memory is not None and memory.has_transparent_huge_pages():
                KERNEL.advise_huge_pages(shared.address, length)
            if nodes:
                _bind(who, shared.address, length, nodes)
            populate = partial(KERNEL.populate, shared.address, shared.fd)
            _prefault(who, shared, populate, check, progress)
        except BaseException:
            shared.close()  # a traceback may keep the mapping alive
            raise
        return shared

    @classmethod
    def attach(cls, fd: int, length: int, *, who: str, progress: Progress | None) -> SharedMemory:
        """Consumes `fd`. Map the memory of another process, which owns it, and prefault the page tables. Raises
        EnvironmentProblem."""
        try:
            shared = cls(fd, mmap.mmap(fd, length), is_owner=False)
        except OSError as error:
            os.close(fd)
            raise EnvironmentProblem(f"{who}: cannot map {_shown(length)} of host memory: {error}") from error
        try:
            _prefault(who, shared, lambda start, size: KERNEL.map_pages(shared.address + start, size), None, progress)
        except BaseException:
            shared.close()
            raise
        return shared

    def pin(self, who: str, *, unit: int) -> int:
        """Page-lock the memory for DMA, up to PIN_BYTES per call but whole pages and whole units of `unit` bytes. Fast,
        since all pages are prefaulted. Returns the units per call: the device refuses a copy that crosses the border of
        two calls. The calling thread uses the device that copies, see `on_device`: on any other one, this would open a
        context."""
        import torch

        runtime = torch.cuda.cudart()
        self._pin_device = torch.cuda.current_device()
        least = math.lcm(unit, mmap.PAGESIZE)
        units = max(1, PIN_BYTES // least) * least // unit
        for start in range(0, self.length, units * unit):
            error = runtime.cudaHostRegister(self.address + start, min(units * unit, self.length - start), 0)
            if int(error) != 0:
                raise EnvironmentProblem(
                    f"{who}: cannot page-lock {_shown(self.length)} of host memory: "
                    f"{runtime.cudaGetErrorString(error)}",
                    hint=CAPACITY_HINT,
                )
            self._pinned.append(start)
        return units

    def close(self) -> None:
        """May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._unpin()
        if self._is_owner:
            self.mapping.madvise(mmap.MADV_REMOVE)
        os.close(self.fd)

    def _unpin(self) -> None:
        if self._pinned:
            import torch

            with torch.cuda.device(self._pin_device):
                while self._pinned:
                    torch.cuda.cudart().cudaHostUnregister(self.address + self._pinned.pop())


def _require_room(who: str, length: int, memory: HostMemory, node: int | None, done_bytes: int = 0) -> None:
    """Raise EnvironmentProblem if the rest does not fit. Several ranks may allocate in parallel."""
    room = memory.room(node)
    if length - done_bytes > room.available_bytes:
        available = room.available_bytes + done_bytes
        raise EnvironmentProblem(
            f"{who} requests {_shown(length)} of host memory, but only {_shown(available)} are available "
            f"({room.limit})",
            hint=CAPACITY_HINT,
        )


def _shown(byte_count: int) -> str:
    return f"{byte_count / 2**30:.2f} GiB" if byte_count >= 2**30 else f"{byte_count / 2**20:.2f} MiB"


def create_sealed(name: str, length: int, *, is_huge: bool = False) -> int:
    """Return the descriptor of a new memfd of this length, which can never change. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if is_huge else 0))
    try:
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int, length: int) -> bool:
    """Whether this is memory of `create_sealed` with this length. Raises OSError if it is not a memfd."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS and os.fstat(fd).st_size == length


def _map_new(name: str, length: int, *, is_huge: bool) -> tuple[int, mmap.mmap]:
    """Create and map a memfd. Huge pages are reserved here: without enough of them, mmap fails."""
    fd = -1
    try:
        fd = create_sealed(name, length, is_huge=is_huge)
        return fd, mmap.mmap(fd, length)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        kind = "huge pages" if is_huge else "host memory"
        raise EnvironmentProblem(f"cannot map {_shown(length)} of {kind}: {error}", hint=CAPACITY_HINT) from error


def _bind(who: str, address: int, length: int, nodes: Sequence[int]) -> None:
    try:
        KERNEL.bind(address, length, nodes)
    except OSError as error:
        shown = ", ".join(map(str, nodes))
        raise EnvironmentProblem(f"{who}: cannot bind memory to NUMA node {shown}: {error}") from error


def _prefault(
    who: str,
    shared: SharedMemory,
    populate: Callable[[int, int], None],
    check: Callable[[int], None] | None,
    progress: Progress | None,
) -> None:
    """Prefault every page now, in parallel, so that a shortage shows at start-up and no copy waits for a page."""
    length = shared.length
    chunks = [(start, min(PREFAULT_BYTES, length - start)) for start in range(0, length, PREFAULT_BYTES)]
    thread_count = min(MAX_PREFAULT_THREADS, len(os.sched_getaffinity(0)), len(chunks))
    done_bytes = 0
    with ThreadPoolExecutor(thread_count, thread_name_prefix="kvbm-prefault") as executor:
        prefaulted = executor.map(lambda chunk: populate(*chunk), chunks)
        try:
            for (_, size), _ in zip(chunks, prefaulted, strict=True):
                done_bytes += size
                if progress is not None:
                    progress(done_bytes, length)
                if check is not None:  # other threads may be ahead by one chunk each
                    check(min(length, done_bytes + thread_count * PREFAULT_BYTES))
        except BaseException as error:
            executor.shutdown(cancel_futures=True)
            if isinstance(error, OSError):
                raise EnvironmentProblem(
                    f"{who}: host memory ran out after {_shown(done_bytes)} of {_shown(length)}: {error}",
                    hint=CAPACITY_HINT,
                ) from error
            raise


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


class Kernel:
    """System calls on address ranges. Each releases the GIL while it runs."""

    def __init__(self) -> None:
        self._libc = LIBC
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._libc.memset.restype = ctypes.c_void_p

    def advise_huge_pages(self, address: int, length: int) -> None:
        """Request huge pages. If the kernel refuses, small pages are used."""
        self._libc.madvise(address, length, MADV_HUGEPAGE)

    def populate(self, address: int, fd: int, start: int, length: int) -> None:
        """Allocate every page of a fresh range of a memfd, which is mapped at `address`. Raises OSError without memory.

        Kernels before 5.14 lack MADV_POPULATE_WRITE. There, a first touch without memory would send SIGBUS, so that
        the file allocates the pages before they are touched.
        """
        if self._libc.madvise(address + start, length, MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() != errno.EINVAL:
            raise last_error()
        os.posix_fallocate(fd, start, length)
        self._libc.memset(address + start, 0, length)

    def map_pages(self, address: int, length: int) -> None:
        """Fill the page tables of a range whose pages another process has allocated. Raises OSError without memory.

        Kernels before 5.14 cannot. There, the first copy of a slot takes a page fault per page.
        """
        if self._libc.madvise(address, length, MADV_POPULATE_WRITE) != 0 and ctypes.get_errno() != errno.EINVAL:
            raise last_error()

    def bind(self, address: int, length: int, nodes: Sequence[int]) -> None:
        """Allocate the pages of a shared range on these NUMA nodes, page by page in turn. Raises OSError."""
        mask = (ctypes.c_ulong * (max(nodes) // BITS_PER_LONG + 1))()
        for node in nodes:
            mask[node // BITS_PER_LONG] |= 1 << (node % BITS_PER_LONG)
        bits = len(mask) * BITS_PER_LONG + 1
        policy = MPOL_BIND if len(nodes) == 1 else MPOL_INTERLEAVE
        self._system_call(SYSCALL_MBIND, address, length, policy, ctypes.addressof(mask), bits, 0)

    def barrier(self) -> None:
        """Execute a full memory barrier in the calling thread. Raises OSError.

        The private command would be refused in a process that has not registered, and does nothing in a process with
        one thread: it orders threads of one process only.
        """
        self._system_call(SYSCALL_MEMBARRIER, MEMBARRIER_GLOBAL_EXPEDITED, 0, 0)

    def _system_call(self, numbers: dict[str, int], *arguments: int) -> None:
        number = numbers.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, f"system call number unknown on {platform.machine()}")
        if self._libc.syscall(*(ctypes.c_ulong(argument) for argument in (number, *arguments))) != 0:
            raise last_error()


KERNEL = Kernel()
