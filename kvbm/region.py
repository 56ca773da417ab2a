"""Segments, the host memory of G2: one per rank, and the Region in which a leader maps them all.

A segment is a memfd: no name, no port, nothing in /dev/shm; it is gone with the last process that maps it, however that
ends. Slot s of all segments together is block s.

    | slot 0 | slot 1 | ... | slot n-1 | word of slot 0..n-1 | word of lane 0..LANES-1 | padding to a page |

A control word is `generation << 8 | state`, 64 bits, aligned, written by one store. It is how a rank proves bytes: it
belongs to the rank's process alone, the leader only reads it. The order is payload first, word last, and a reader looks
at the word first. On x86 that is enough: stores appear to everyone in program order, and libc ends copies that bypass
the cache with a fence. Elsewhere (ARM) a memory barrier is made before words are written and after they are read.

`Segment` is the rank's side: its owner thread writes words, and copying threads read and write slots. `Region` is the
leader's side.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host_memory import THIS_MACHINE, HostMemory, Kernel
from kvbm.layout import PAGE_BYTES, BlockLayout
from kvbm.types import SegmentInfo, SlotState

LANES = 1024
WORD_BYTES = 8
STATE_BITS = 8
TOUCH_BYTES = 64 << 20
MAX_TOUCH_THREADS = 16
PIN_BYTES = 64 << 30
CAPACITY_HINT = "lower `tiers.host.capacity`"
MEMFD_NAME = "kvbm-segment"
STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")

_STATES = tuple(SlotState)
_KERNEL = Kernel()


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Where things lie in a segment."""

    slot_count: int
    slot_stride: int

    @property
    def payload_bytes(self) -> int:
        return self.slot_count * self.slot_stride

    def length(self, page_bytes: int) -> int:
        end = self.payload_bytes + (self.slot_count + LANES) * WORD_BYTES
        return -(-end // page_bytes) * page_bytes

    def words(self, mapping: mmap.mmap) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """(words of the slots, words of the lanes)."""
        words = np.frombuffer(mapping, np.uint64, self.slot_count + LANES, self.payload_bytes)
        return words[: self.slot_count], words[self.slot_count :]


class Segment:
    """One rank's share of G2. `payload[s]` is slot s; `close` gives the memory back."""

    def __init__(self, fd: int, mapping: mmap.mmap, info: SegmentInfo, *, is_pinned: bool) -> None:
        self.info = info
        self._fd = fd
        self._mapping = mapping
        self._is_pinned = is_pinned
        self._is_closed = False
        geometry = _Geometry(info.slot_count, info.slot_stride)
        payload = np.frombuffer(mapping, np.uint8, geometry.payload_bytes)
        self.payload: NDArray[np.uint8] = payload.reshape(info.slot_count, info.slot_stride)
        self._slot_words, self._lane_words = geometry.words(mapping)
        if not STORES_ARE_ORDERED:
            _enable_barrier()

    @classmethod
    def create(
        cls,
        *,
        rank: int,
        layout: BlockLayout,
        slot_count: int,
        node: int | None = None,
        pin: bool = False,
        progress: Callable[[int, int], None] | None = None,
        memory: HostMemory = THIS_MACHINE,
    ) -> Segment:
        """Allocate, touch and, with `pin`, page-lock the segment; on NUMA node `node` where there are several.

        `progress(done_bytes, total_bytes)` is called from this thread. Raises EnvironmentProblem when the memory is
        not there, before any is taken; and also later, should somebody else take it meanwhile.
        """
        if slot_count < 1:
            raise InvariantError(f"rank {rank}: segment of {slot_count} slots")
        geometry = _Geometry(slot_count, layout.slot_stride)
        binding = node if memory.node_count() > 1 else None
        page_bytes, huge_bytes_free = memory.huge_pages()
        is_huge = page_bytes > 0 and geometry.length(page_bytes) <= huge_bytes_free
        length = geometry.length(page_bytes if is_huge else PAGE_BYTES)
        check = _RoomCheck(rank, length, None if is_huge else memory, binding)
        check(0)
        fd, mapping = _map_new(length, is_huge=is_huge)
        try:
            address = _address(mapping)
            if not is_huge and memory.advises_huge_pages():
                _KERNEL.advise_huge_pages(address, length)
            if binding is not None:
                _bind(rank, address, length, binding)
            _touch(rank, address, length, check, progress or _no_progress)
            if pin:
                _pin(rank, address, length)
        except BaseException:
            mapping.madvise(mmap.MADV_REMOVE)  # a traceback may keep the mapping itself for long
            os.close(fd)
            raise
        info = SegmentInfo(
            rank=rank,
            pid=os.getpid(),
            fd=fd,
            length=length,
            slot_count=slot_count,
            slot_stride=layout.slot_stride,
            block_bytes=layout.block_bytes,
            layout_digest=layout.digest(),
        )
        return cls(fd, mapping, info, is_pinned=pin)

    def write_slots(self, slots: Sequence[int], generation: int, state: SlotState) -> None:
        """Prove (or deny) that these slots hold what transfer `generation` was to bring. The bytes came before."""
        word = _word(generation, state)
        _order_memory()
        self._slot_words[_indexes(slots, self.info.slot_count)] = word

    def write_lane(self, lane: int, generation: int, state: SlotState) -> None:
        """Report the end of a transfer that has no slot of its own to mark."""
        word = _word(generation, state)
        _order_memory()
        self._lane_words[_indexes([lane], LANES)] = word

    def slots_carry(self, slots: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether every slot is READY with exactly its generation."""
        wanted = np.array(generations, np.uint64) << np.uint64(STATE_BITS) | np.uint64(SlotState.READY)
        found = self._slot_words[_indexes(slots, self.info.slot_count)]
        _order_memory()
        return bool(np.array_equal(found, wanted))

    def lane_carries(self, lane: int, generation: int) -> bool:
        """Whether this rank has reported transfer `generation` as READY in this lane."""
        return bool(self._lane_words[_indexes([lane], LANES)][0] == _word(generation, SlotState.READY))

    def close(self) -> None:
        """Give the memory back at once; views of it that live on then read zeros. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_pinned:
            _unpin(_address(self._mapping), self.info.length)
        self._mapping.madvise(mmap.MADV_REMOVE)
        os.close(self._fd)


class Region:
    """Every rank's segment, as the leader maps it to read control words. The leader's thread owns it."""

    def __init__(self, segments: Sequence[_MappedSegment]) -> None:
        self.slot_count = segments[0].info.slot_count
        self._slot_words = [segment.slot_words for segment in segments]
        self._lane_words = [segment.lane_words for segment in segments]
        fds = {segment.process_fd: position for position, segment in enumerate(segments)}
        self._process_fds = {fd: position for fd, position in fds.items() if fd is not None}
        self._is_lost = [False] * len(segments)
        self._poll = select.poll()
        for fd in self._process_fds:
            self._poll.register(fd, select.POLLIN)

    @classmethod
    def map(cls, infos: Sequence[SegmentInfo]) -> Region:
        """Map the segments of all ranks, which must agree on the number of slots. Raises EnvironmentProblem."""
        counts = {info.rank: info.slot_count for info in infos}
        if not infos or len(counts) != len(infos) or len(set(counts.values())) != 1:
            raise InvariantError(f"segments of ranks {[info.rank for info in infos]} with slots {counts}")
        return cls([_MappedSegment.open(info) for info in infos])

    def slot_results(self, slots: Sequence[int], generation: int) -> list[SlotState]:
        """What transfer `generation` did to each slot.

        EMPTY until every rank has reported, because a rank that has not may still be copying; then READY if all ranks
        are, and FAILED if any is not. A lost rank, which copies nothing any more, has FAILED what it had not proven.
        """
        found = [words[_indexes(slots, self.slot_count)] for words in self._slot_words]
        states = _combine(found, generation, self._is_lost)
        return [_STATES[state] for state in states.tolist()]

    def lane_result(self, lane: int, generation: int) -> SlotState:
        """The same for a transfer that reports in a lane."""
        states = _combine([words[_indexes([lane], LANES)] for words in self._lane_words], generation, self._is_lost)
        return _STATES[int(states[0])]

    def has_lost_rank(self) -> bool:
        """Whether the process of a rank has ended; from then on its results are known. Costs one system call."""
        for fd, _ in self._poll.poll(0) if self._process_fds else ():
            self._is_lost[self._process_fds[fd]] = True
        return any(self._is_lost)

    def close(self) -> None:
        """Unmap. May be called twice."""
        self._slot_words.clear()
        self._lane_words.clear()
        while self._process_fds:
            fd, _ = self._process_fds.popitem()
            self._poll.unregister(fd)
            os.close(fd)


@dataclass(frozen=True, slots=True)
class _MappedSegment:
    """One rank's control words, and a descriptor that turns readable when its process ends (None: our own)."""

    info: SegmentInfo
    slot_words: NDArray[np.uint64]
    lane_words: NDArray[np.uint64]
    process_fd: int | None

    @classmethod
    def open(cls, info: SegmentInfo) -> _MappedSegment:
        path = f"/proc/{info.pid}/fd/{info.fd}"
        try:
            process_fd = None if info.pid == os.getpid() else os.pidfd_open(info.pid)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                length = os.fstat(fd).st_size
                if length != info.length or MEMFD_NAME not in os.readlink(path):
                    raise EnvironmentProblem(f"rank {info.rank}: {path} is not its segment of {info.length} bytes")
                mapping = mmap.mmap(fd, info.length)
            finally:
                os.close(fd)
        except OSError as error:
            raise EnvironmentProblem(
                f"the segment of rank {info.rank} cannot be mapped: {error}; its process may have ended"
            ) from error
        slot_words, lane_words = _Geometry(info.slot_count, info.slot_stride).words(mapping)
        return cls(info, slot_words, lane_words, process_fd)


@dataclass(frozen=True, slots=True)
class _RoomCheck:
    """Asks before memory is taken, and again while it is: several ranks may allocate side by side.

    `memory` is None for reserved huge pages, which nobody else can take once they are mapped.
    """

    rank: int
    length: int
    memory: HostMemory | None
    node: int | None

    def __call__(self, done_bytes: int) -> None:
        if self.memory is None:
            return
        room = self.memory.room(self.node)
        if self.length - done_bytes > room.available_bytes:
            available = room.available_bytes + done_bytes
            raise EnvironmentProblem(
                f"rank {self.rank} asks for {self.length} bytes ({self.length / 2**30:.2f} GiB) of host memory, and "
                f"{available} bytes ({available / 2**30:.2f} GiB) are available: {room.limit}",
                hint=CAPACITY_HINT,
            )


def _map_new(length: int, *, is_huge: bool) -> tuple[int, mmap.mmap]:
    try:
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | (os.MFD_HUGETLB if is_huge else 0))
    except OSError as error:
        raise EnvironmentProblem(f"no shared memory: {error}") from error
    try:
        os.ftruncate(fd, length)
        return fd, mmap.mmap(fd, length)
    except OSError as error:
        os.close(fd)
        raise EnvironmentProblem(
            f"{length} bytes of host memory cannot be mapped: {error}", hint=CAPACITY_HINT
        ) from error


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8, 1).ctypes.data)


def _bind(rank: int, address: int, length: int, node: int) -> None:
    try:
        _KERNEL.bind(address, length, node)
    except OSError as error:
        raise EnvironmentProblem(f"rank {rank}: memory cannot be bound to NUMA node {node}: {error}") from error


def _touch(
    rank: int, address: int, length: int, check: Callable[[int], None], progress: Callable[[int, int], None]
) -> None:
    """Take every page now, in parallel, so that a shortage shows at start-up and no copy waits for a page."""
    chunks = [(start, min(TOUCH_BYTES, length - start)) for start in range(0, length, TOUCH_BYTES)]
    thread_count = min(MAX_TOUCH_THREADS, len(os.sched_getaffinity(0)), len(chunks))
    done_bytes = 0
    with ThreadPoolExecutor(thread_count, thread_name_prefix=f"kvbm-touch-{rank}") as executor:
        touched = executor.map(lambda chunk: _KERNEL.populate(address + chunk[0], chunk[1]), chunks)
        try:
            for (_, size), _ in zip(chunks, touched, strict=True):
                done_bytes += size
                progress(done_bytes, length)
                check(min(length, done_bytes + thread_count * TOUCH_BYTES))  # others may be that far ahead
        except BaseException as error:
            executor.shutdown(cancel_futures=True)
            if isinstance(error, OSError):
                raise EnvironmentProblem(
                    f"rank {rank}: host memory ran out after {done_bytes} of {length} bytes: {error}",
                    hint=CAPACITY_HINT,
                ) from error
            raise


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    pass


def _pin(rank: int, address: int, length: int) -> None:
    """Page-lock for DMA. Touched pages make this quick; one call locks at most PIN_BYTES."""
    import torch

    runtime = torch.cuda.cudart()
    for start in range(0, length, PIN_BYTES):
        error = runtime.cudaHostRegister(address + start, min(PIN_BYTES, length - start), 0)
        if int(error) != 0:
            for done in range(0, start, PIN_BYTES):
                runtime.cudaHostUnregister(address + done)
            raise EnvironmentProblem(
                f"rank {rank}: {length} bytes of host memory cannot be page-locked: "
                f"{runtime.cudaGetErrorString(error)}",
                hint=CAPACITY_HINT,
            )


def _unpin(address: int, length: int) -> None:
    import torch

    runtime = torch.cuda.cudart()
    for start in range(0, length, PIN_BYTES):
        runtime.cudaHostUnregister(address + start)


def _word(generation: int, state: SlotState) -> np.uint64:
    if not 0 <= generation < 1 << (64 - STATE_BITS):
        raise InvariantError(f"generation {generation} does not fit a control word")
    return np.uint64(generation << STATE_BITS | state)


def _indexes(numbers: Sequence[int], count: int) -> NDArray[np.int64]:
    """As an array; a negative number would silently mean another slot."""
    indexes = np.array(numbers, np.int64)
    if indexes.size and not 0 <= indexes.min() <= indexes.max() < count:
        raise InvariantError(f"control words {numbers} of {count}")
    return indexes


def _combine(words: Sequence[NDArray[np.uint64]], generation: int, is_lost: Sequence[bool]) -> NDArray[np.uint8]:
    """The state of each word over all ranks; the words of one rank are one element of `words`."""
    ready, failed = _word(generation, SlotState.READY), _word(generation, SlotState.FAILED)
    is_ready = np.ones(len(words[0]), np.bool_)
    is_reported = is_ready.copy()
    for found, is_lost_here in zip(words, is_lost, strict=True):
        is_ready_here = found == ready
        is_ready &= is_ready_here
        is_reported &= is_ready_here | (found == failed) | is_lost_here
    _order_memory()
    states = np.where(is_ready, SlotState.READY, SlotState.FAILED).astype(np.uint8)
    states[~is_reported] = SlotState.EMPTY
    return states


def _enable_barrier() -> None:
    try:
        _KERNEL.enable_barrier()
    except OSError as error:
        raise EnvironmentProblem(f"no memory barrier on {platform.machine()}: {error}") from error


def _order_memory() -> None:
    """Between payload and word; see the module's text. The reader's side calls it after it has read the words."""
    if not STORES_ARE_ORDERED:
        _KERNEL.barrier()
