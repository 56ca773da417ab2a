"""Segment and Region: the host memory of G2. Each rank owns a segment; the leader maps all of them as a region.

A segment is a memfd: it has no name, is not in /dev/shm, and disappears with the last process that maps it. It is
sealed, so that no process can change its length. Slot s of all segments together is block s.

    | slot 0 | slot 1 | ... | slot n-1 | word of slot 0..n-1 | word of lane 0..LANES-1 | heartbeat | padding to a page |

A control word is `generation << 8 | state`: 64 bits, aligned, written by one store instruction. It proves the bytes of
its slot. The rank writes it after a copy from device memory, the leader after a read from disk. The leader decides who
may write a slot, one writer at a time. A writer writes the payload first and the word last; a reader reads the word
first. On x86 this order is enough: stores become visible in program order, and libc ends copies that bypass the cache
with a fence. On other machines (ARM) a memory barrier precedes each write of words and follows each read.

The heartbeat is a number that the rank increases each time it polls its copies, so that the leader can recognise a rank
that is stopped.

A rank uses `Segment`: its owner thread writes words, and copying threads read and write slots. The leader uses
`Region`.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.layout import BlockLayout, Numbers
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm.host.shared_memory import KERNEL, SharedMemory, is_sealed
from kvbm.types import SegmentInfo, SlotState

LANES = 1024
WORD_BYTES = 8
LARGEST_WORD = (1 << 64) - 1
STATE_BITS = 8
MEMFD_NAME = "kvbm-segment"
STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")

_STATES = tuple(SlotState)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Offsets and sizes in a segment."""

    slot_count: int
    slot_stride: int

    @property
    def payload_bytes(self) -> int:
        return self.slot_count * self.slot_stride

    @property
    def length(self) -> int:
        return self.payload_bytes + (self.slot_count + LANES + 1) * WORD_BYTES

    def words(self, mapping: mmap.mmap) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        """(words of the slots, words of the lanes, the heartbeat)."""
        words = np.frombuffer(mapping, np.uint64, self.slot_count + LANES + 1, self.payload_bytes)
        return words[: self.slot_count], words[self.slot_count : -1], words[-1:]


class Segment:
    """One rank's part of G2. `payload[s]` is slot s; `close` frees the memory.

    A copy on a device must not cross a multiple of `slots_per_pin`: the slots on both sides are page-locked separately.
    """

    def __init__(self, memory: SharedMemory, info: SegmentInfo, slots_per_pin: int) -> None:
        self.info = info
        self.slots_per_pin = slots_per_pin
        self._memory = memory
        geometry = _Geometry(info.slot_count, info.slot_stride)
        payload = np.frombuffer(memory.mapping, np.uint8, geometry.payload_bytes)
        self.payload: NDArray[np.uint8] = payload.reshape(info.slot_count, info.slot_stride)
        self._slot_words, self._lane_words, heartbeat = geometry.words(memory.mapping)
        self._beat = heartbeat.data  # assigns in a tenth of the time of the array

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
        """Allocate and prefault the segment on NUMA node `node`, if there are several; page-lock it with `pin`.

        `progress(done_bytes, total_bytes)` is called from this thread. Raises EnvironmentProblem if there is too little
        memory: before any is allocated, or later if another process takes it meanwhile.
        """
        if slot_count < 1:
            raise InvariantError(f"rank {rank}: segment of {slot_count} slots")
        if not STORES_ARE_ORDERED:
            _enable_barrier()
        who, length = f"rank {rank}", _Geometry(slot_count, layout.slot_stride).length
        shared = SharedMemory.allocate(MEMFD_NAME, length, who=who, node=node, memory=memory, progress=progress)
        slots_per_pin = slot_count
        if pin:
            try:
                slots_per_pin = shared.pin(who, unit=layout.slot_stride)
            except BaseException:
                shared.close()
                raise
        info = SegmentInfo(
            rank=rank,
            pid=os.getpid(),
            fd=shared.fd,
            length=shared.length,
            slot_count=slot_count,
            slot_stride=layout.slot_stride,
            block_bytes=layout.block_bytes,
            layout_digest=layout.digest(),
        )
        return cls(shared, info, slots_per_pin)

    def write_slots(self, slots: Numbers, generation: int, state: SlotState) -> None:
        """Report the result of transfer `generation` for these slots. Their bytes must be written before."""
        word = _word(generation, state)
        _order_memory()
        self._slot_words[_indexes(slots, self.info.slot_count)] = word

    def write_lane(self, lane: int, generation: int, state: SlotState) -> None:
        """Report the result of a transfer that fills no slot."""
        word = _word(generation, state)
        _order_memory()
        self._lane_words[_indexes([lane], LANES)] = word

    def slots_carry(self, slots: Numbers, generations: Numbers) -> bool:
        """Whether every slot is READY with exactly its generation."""
        found = self._slot_words[_indexes(slots, self.info.slot_count)]
        _order_memory()
        return bool(np.array_equal(found, _ready_words(generations)))

    def unproven(self, slots: Sequence[int], generation: int) -> list[int]:
        """Return the slots that transfer `generation` has not proven."""
        indexes = _indexes(slots, self.info.slot_count)
        left: list[int] = indexes[self._slot_words[indexes] != _word(generation, SlotState.READY)].tolist()
        return left

    def lane_carries(self, lane: int, generation: int) -> bool:
        """Whether this rank has reported transfer `generation` as READY in this lane."""
        return bool(self._lane_words[_indexes([lane], LANES)][0] == _word(generation, SlotState.READY))

    def beat(self) -> None:
        """Show that this rank is alive."""
        self._beat[0] = (self._beat[0] + 1) & LARGEST_WORD

    def close(self) -> None:
        """Free the memory at once; views of it that still exist read zeros. May be called twice."""
        self._memory.close()


class Region:
    """The segments of all ranks, mapped into the leader's process and owned by its thread. `shards[r][s]` is slot s of
    rank r."""

    def __init__(self, segments: Sequence[_MappedSegment]) -> None:
        self.slot_count = min(segment.info.slot_count for segment in segments)
        self.shards: list[NDArray[np.uint8]] = [segment.payload for segment in segments]
        self._slot_words = [segment.slot_words for segment in segments]
        self._lane_words = [segment.lane_words for segment in segments]
        self._heartbeats = [segment.heartbeat for segment in segments]
        fds = {segment.process_fd: position for position, segment in enumerate(segments)}
        self._process_fds = {fd: position for fd, position in fds.items() if fd is not None}
        self._is_lost = [False] * len(segments)
        self._poll = select.poll()
        for fd in self._process_fds:
            self._poll.register(fd, select.POLLIN)

    @classmethod
    def map(cls, infos: Sequence[SegmentInfo]) -> Region:
        """Map the segments of all ranks. The smallest one decides the number of slots: with pipeline parallelism, ranks
        have different layers. Raises EnvironmentProblem."""
        ranks = [info.rank for info in infos]
        if not infos or len(set(ranks)) != len(ranks):
            raise InvariantError(f"segments of ranks {ranks}")
        return cls([_MappedSegment.open(info) for info in infos])

    def write_slots(self, slots: Sequence[int], generation: int, state: SlotState) -> None:
        """Write the words of these slots for every rank. For blocks that do not come from G1."""
        word, indexes = _word(generation, state), _indexes(slots, self.slot_count)
        _order_memory()
        for words in self._slot_words:
            words[indexes] = word

    def slots_carry(self, slots: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether every slot is READY with exactly its generation on every rank. Any thread may call it. In a closed
        segment all bytes read as zeros, including the words."""
        wanted, indexes = _ready_words(generations), _indexes(slots, self.slot_count)
        found = [words[indexes] for words in self._slot_words]
        _order_memory()
        return bool(found) and all(bool(np.array_equal(words, wanted)) for words in found)

    def slot_results(self, slots: Sequence[int], generation: int) -> list[SlotState]:
        """Return the result of transfer `generation` for each slot.

        EMPTY until every rank has reported, because a rank that has not reported may still be copying. Then READY if
        all ranks are READY, else FAILED. For a lost rank, which copies no more, everything unproven has FAILED.
        """
        indexes = _indexes(slots, self.slot_count)
        found = np.array([words[indexes] for words in self._slot_words])
        _order_memory()
        return _combine(found, generation, self._is_lost)

    def are_lanes_reported(self, lanes: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """For many transfers at once: whether `lane_result` may have a result."""
        return self._are_reported(self._lane_words, _indexes(lanes, LANES), generations)

    def are_reported(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """For many transfers at once, each named by one of its slots: whether `slot_results` may have a result."""
        return self._are_reported(self._slot_words, _indexes(slots, self.slot_count), generations)

    def _are_reported(
        self, words_of_ranks: Sequence[NDArray[np.uint64]], indexes: NDArray[np.int64], generations: Sequence[int]
    ) -> list[bool]:
        wanted = np.array(generations, np.uint64)
        found = [
            np.ones(len(indexes), bool) if lost else words[indexes] >> np.uint64(STATE_BITS) == wanted
            for words, lost in zip(words_of_ranks, self._is_lost, strict=True)
        ]
        reported: list[bool] = np.logical_and.reduce(found).tolist()
        return reported

    def lane_result(self, lane: int, generation: int) -> SlotState:
        """Return the result of a transfer that reports in a lane."""
        indexes = _indexes([lane], LANES)
        found = np.array([words[indexes] for words in self._lane_words])
        _order_memory()
        return _combine(found, generation, self._is_lost)[0]

    def heartbeats(self) -> list[int | None]:
        """Return a number per rank that changes while the rank is alive; None for a rank whose process has ended."""
        return [None if lost else int(beats[0]) for beats, lost in zip(self._heartbeats, self._is_lost, strict=True)]

    def has_lost_rank(self) -> bool:
        """Whether the process of a rank has ended; its missing results count as FAILED then. Takes one system call."""
        for fd, _ in self._poll.poll(0) if self._process_fds else ():
            self._is_lost[self._process_fds[fd]] = True
        return any(self._is_lost)

    def close(self) -> None:
        """Unmap. May be called twice."""
        self._slot_words.clear()
        self._lane_words.clear()
        self._heartbeats.clear()
        self.shards.clear()
        while self._process_fds:
            fd, _ = self._process_fds.popitem()
            self._poll.unregister(fd)
            os.close(fd)


@dataclass(frozen=True, slots=True)
class _MappedSegment:
    """One rank's memory, and a descriptor that becomes readable when its process ends; None for this process."""

    info: SegmentInfo
    payload: NDArray[np.uint8]
    slot_words: NDArray[np.uint64]
    lane_words: NDArray[np.uint64]
    heartbeat: NDArray[np.uint64]
    process_fd: int | None

    @classmethod
    def open(cls, info: SegmentInfo) -> _MappedSegment:
        path = f"/proc/{info.pid}/fd/{info.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if MEMFD_NAME not in os.readlink(path) or not is_sealed(fd, info.length):
                    raise EnvironmentProblem(
                        f"rank {info.rank}: {path} is not its sealed segment of {info.length} bytes"
                    )
                mapping = mmap.mmap(fd, info.length)
            finally:
                os.close(fd)
            process_fd = None if info.pid == os.getpid() else os.pidfd_open(info.pid)
        except OSError as error:
            raise EnvironmentProblem(f"cannot map the segment of rank {info.rank}: {error}") from error
        geometry = _Geometry(info.slot_count, info.slot_stride)
        words = geometry.words(mapping)
        payload = np.frombuffer(mapping, np.uint8, geometry.payload_bytes)
        return cls(info, payload.reshape(info.slot_count, info.slot_stride), *words, process_fd)


def _word(generation: int, state: SlotState) -> np.uint64:
    if not 0 <= generation < 1 << (64 - STATE_BITS):
        raise InvariantError(f"generation {generation} does not fit a control word")
    return np.uint64(generation << STATE_BITS | state)


def _ready_words(generations: Numbers) -> NDArray[np.uint64]:
    return np.asarray(generations, np.uint64) << np.uint64(STATE_BITS) | np.uint64(SlotState.READY)


def _indexes(numbers: Numbers, count: int) -> NDArray[np.int64]:
    """Return the numbers as an array. A number out of range is refused: it would silently name another slot."""
    indexes = np.asarray(numbers, np.int64)
    if len(indexes) and indexes.view(np.uint64).max() >= count:  # a negative number is a large one
        raise InvariantError(f"control words {indexes.min()}..{indexes.max()} of {count}")
    return indexes


def _combine(found: NDArray[np.uint64], generation: int, is_lost: Sequence[bool]) -> list[SlotState]:
    """Return the state of each slot over all ranks; `found` has one row of words per rank."""
    is_ready = found == _word(generation, SlotState.READY)
    if is_ready.all():
        return [SlotState.READY] * found.shape[1]
    is_reported = is_ready | (found == _word(generation, SlotState.FAILED)) | np.array(is_lost)[:, None]
    states = np.where(is_ready.all(axis=0), int(SlotState.READY), int(SlotState.FAILED))
    states[~is_reported.all(axis=0)] = int(SlotState.EMPTY)
    codes: list[int] = states.tolist()
    return [_STATES[code] for code in codes]


def _enable_barrier() -> None:
    try:
        KERNEL.enable_barrier()
    except OSError as error:
        raise EnvironmentProblem(f"no memory barrier on {platform.machine()}: {error}") from error


def _order_memory() -> None:
    """Order payload and words, see the module's text. Call it before writing words, or after reading them."""
    if not STORES_ARE_ORDERED:
        KERNEL.barrier()
