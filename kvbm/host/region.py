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

Ranks with equal KV (replicas) use one segment. Replica 0 creates it, the others attach to it. Each replica copies a
part of the blocks to G2. A slot has one word, written by the replica that has copied it, so that a reader checks the
word of the writer. All other words exist once per replica:

    | slot 0..n-1 | sample slot of replica 0..R-1 | word of slot 0..n-1 |
    | replica 0: words of lanes, reports and their checksums, heartbeat | replica 1: ... |

The sample of an offload is its first block. One replica copies it into its slot, the others into their sample slots.
Each writes a report when it has ended: a word and the checksum of its sample. The blocks are proven only if all
checksums are equal. Otherwise the KV of the replicas is not equal, and one copy must not serve them all.

A rank uses `Segment`: its owner thread writes words, and copying threads read and write slots. The leader uses
`Region`.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.layout import BlockLayout, Numbers
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm.host.shared_memory import KERNEL, SharedMemory, is_sealed
from kvbm.types import SegmentInfo, SlotState

LANES = 1024
REPORTS = 4096  # the last ones are kept, by generation
WORD_BYTES = 8
FEW_WORDS = 64
LARGEST_WORD = (1 << 64) - 1
STATE_BITS = 8
STATE_MASK = (1 << STATE_BITS) - 1
MEMFD_NAME = "kvbm-segment"
STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")

_STATES = tuple(SlotState)


@dataclass(frozen=True, slots=True)
class _Words:
    """Views of the control words of a segment. `slots` has one word per slot, the others one row per replica."""

    slots: NDArray[np.uint64]
    lanes: NDArray[np.uint64]
    reports: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    heartbeats: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Offsets and sizes in a segment."""

    slot_count: int
    slot_stride: int
    replica_count: int = 1

    @classmethod
    def of(cls, info: SegmentInfo) -> _Geometry:
        return cls(info.slot_count, info.slot_stride, info.replica_count)

    @property
    def report_count(self) -> int:
        return REPORTS if self.replica_count > 1 else 0

    @property
    def row_count(self) -> int:
        """Slots and sample slots."""
        return self.slot_count + (self.replica_count if self.replica_count > 1 else 0)

    @property
    def word_count(self) -> int:
        return self.slot_count + self.replica_count * (LANES + 2 * self.report_count + 1)

    @property
    def length(self) -> int:
        return self.row_count * self.slot_stride + self.word_count * WORD_BYTES

    def payload(self, mapping: mmap.mmap) -> NDArray[np.uint8]:
        rows = np.frombuffer(mapping, np.uint8, self.row_count * self.slot_stride)
        return rows.reshape(self.row_count, self.slot_stride)

    def words(self, mapping: mmap.mmap) -> _Words:
        words = np.frombuffer(mapping, np.uint64, self.word_count, self.row_count * self.slot_stride)
        reports, rows = self.report_count, words[self.slot_count :].reshape(self.replica_count, -1)
        return _Words(
            slots=words[: self.slot_count],
            lanes=rows[:, :LANES],
            reports=rows[:, LANES : LANES + reports],
            checksums=rows[:, LANES + reports : -1],
            heartbeats=rows[:, -1:],
        )


class Segment:
    """One rank's part of G2. `payload[s]` is slot s; sample slots follow. `close` of replica 0 frees the memory.

    A copy on a device must not cross a multiple of `slots_per_pin`: the slots on both sides are page-locked separately.
    """

    def __init__(self, memory: SharedMemory, info: SegmentInfo, slots_per_pin: int) -> None:
        self.info = info
        self.slots_per_pin = slots_per_pin
        self._memory = memory
        geometry = _Geometry.of(info)
        self.payload: NDArray[np.uint8] = geometry.payload(memory.mapping)
        words = geometry.words(memory.mapping)
        self._slot_words, self._lane_words = words.slots, words.lanes[info.replica]
        self._reports, self._checksums = words.reports[info.replica], words.checksums[info.replica]
        self._reporting = threading.Lock()
        self._beat = words.heartbeats[info.replica].data  # assigns in a tenth of the time of the array

    @classmethod
    def create(
        cls,
        *,
        rank: int,
        layout: BlockLayout,
        slot_count: int,
        replica_count: int = 1,
        nodes: Sequence[int] = (),
        pin: bool = False,
        progress: Callable[[int, int], None] | None = None,
        memory: HostMemory = THIS_MACHINE,
    ) -> Segment:
        """Allocate and prefault the segment on these NUMA nodes, if there are several; page-lock it with `pin`.

        `progress(done_bytes, total_bytes)` is called from this thread. Raises EnvironmentProblem if there is too little
        memory: before any is allocated, or later if another process takes it meanwhile.
        """
        if slot_count < 1:
            raise InvariantError(f"rank {rank}: segment of {slot_count} slots")
        who, length = f"rank {rank}", _Geometry(slot_count, layout.slot_stride, replica_count).length
        shared = SharedMemory.allocate(MEMFD_NAME, length, who=who, nodes=nodes, memory=memory, progress=progress)
        info = SegmentInfo(
            rank=rank,
            pid=os.getpid(),
            fd=shared.fd,
            length=shared.length,
            slot_count=slot_count,
            slot_stride=layout.slot_stride,
            block_bytes=layout.block_bytes,
            layout_digest=layout.digest(),
            replica_count=replica_count,
        )
        return cls._ready(shared, info, pin=pin)

    @classmethod
    def attach(
        cls,
        owner: SegmentInfo,
        *,
        rank: int,
        replica: int,
        layout: BlockLayout,
        pin: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Segment:
        """Return the segment of replica 0 as that of another replica; page-lock it here too with `pin`. Raises
        EnvironmentProblem."""
        if (layout.digest(), layout.slot_stride) != (owner.layout_digest, owner.slot_stride):
            raise EnvironmentProblem(
                f"rank {rank} has blocks of {layout.block_bytes} bytes in another layout than rank {owner.rank}, with "
                f"{owner.block_bytes} bytes, although both should have equal KV",
                hint="set `transfer.share_equal_kv: false`",
            )
        fd = _open(owner)
        shared = SharedMemory.attach(fd, owner.length, who=f"rank {rank}", progress=progress)
        info = replace(owner, rank=rank, pid=os.getpid(), fd=fd, replica=replica)
        return cls._ready(shared, info, pin=pin)

    @classmethod
    def _ready(cls, shared: SharedMemory, info: SegmentInfo, *, pin: bool) -> Segment:
        try:
            if not STORES_ARE_ORDERED:
                _enable_barrier()
            slots_per_pin = shared.pin(f"rank {info.rank}", unit=info.slot_stride) if pin else info.slot_count
            return cls(shared, info, slots_per_pin)
        except BaseException:
            shared.close()
            raise

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

    @property
    def sample_slot(self) -> int:
        """The row of `payload` that receives the samples of this replica."""
        return self.info.slot_count + self.info.replica

    def checksum(self, row: int) -> int:
        """Return the checksum of the bytes of a block in a row of `payload`."""
        import xxhash

        return xxhash.xxh3_64_intdigest(self.payload[row, : self.info.block_bytes].data)

    def write_report(self, generation: int, state: SlotState, checksum: int = 0) -> None:
        """Report that this replica has ended its part of transfer `generation`, after the words of its slots. Any
        thread may call it. The report of a later transfer in the same place stays."""
        index = generation % REPORTS
        with self._reporting:
            if int(self._reports[index]) >> STATE_BITS > generation:
                return
            self._reports[index] = _word(generation, SlotState.EMPTY)
            _order_memory()
            self._checksums[index] = checksum
            _order_memory()
            self._reports[index] = _word(generation, state)

    def has_reported(self, generation: int) -> bool:
        """Whether this replica has reported transfer `generation` as READY."""
        return bool(self._reports[generation % REPORTS] == _word(generation, SlotState.READY))

    def beat(self) -> None:
        """Show that this rank is alive."""
        self._beat[0] = (self._beat[0] + 1) & LARGEST_WORD

    def close(self) -> None:
        """Free the memory at once, if this is replica 0: views of it that still exist read zeros, those of the other
        replicas too. May be called twice."""
        self._memory.close()


class Region:
    """The segments of all ranks, mapped into the leader's process and owned by its thread. `shards[i][s]` is slot s of
    segment i; replicas have one segment together.

    `has_different_copies`: replicas have reported different bytes for one block, so that their KV is not equal.
    """

    def __init__(self, segments: Sequence[_MappedSegment]) -> None:
        self.slot_count = min(segment.info.slot_count for segment in segments)
        self.has_different_copies = False
        self.shards: list[NDArray[np.uint8]] = [segment.payload for segment in segments]
        self._slot_words = [segment.words.slots for segment in segments]
        self._replicated = [_Replicas(segment) for segment in segments if segment.info.replica_count > 1]
        alone = [segment for segment in segments if segment.info.replica_count == 1]
        self._own_slots = [(segment.words.slots, segment.positions[0]) for segment in alone]
        by_rank = sorted(
            (position, segment, row) for segment in segments for row, position in enumerate(segment.positions)
        )
        self._lane_words = [segment.words.lanes[row] for _, segment, row in by_rank]
        self._heartbeats = [segment.words.heartbeats[row].data for _, segment, row in by_rank]
        # The same words as Python's numbers: a few of them are read in a tenth of the time of an array.
        self._slots = [words.data for words in self._slot_words]
        self._lanes = [words.data for words in self._lane_words]
        self._process_fds = {fd: position for segment in segments for position, fd in segment.process_fds}
        self._is_lost = [False] * len(by_rank)
        self._are_lost_shards = [False] * len(segments)
        self._ranks_of_shards = [segment.positions for segment in segments]
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
        return cls(_mapped(infos))

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
        of_replicas = [replicas.result(generation, self._is_lost) for replicas in self._replicated]
        if SlotState.EMPTY in of_replicas:
            return [SlotState.EMPTY] * len(slots)
        if not of_replicas and len(slots) * len(self._slots) <= FEW_WORDS and self._are_ready(slots, generation):
            return [SlotState.READY] * len(slots)
        indexes = _indexes(slots, self.slot_count)
        found = np.array([words[indexes] for words in self._slot_words])
        _order_memory()
        states = _combine(found, generation, self._are_lost_shards)
        if SlotState.FAILED in of_replicas:
            self.has_different_copies |= any(replicas.are_different for replicas in self._replicated)
            return [SlotState.EMPTY if state is SlotState.EMPTY else SlotState.FAILED for state in states]
        return states

    def _are_ready(self, slots: Sequence[int], generation: int) -> bool:
        if slots and not 0 <= min(slots) <= max(slots) < self.slot_count:
            return False  # the caller refuses it
        word = _number(generation, SlotState.READY)
        are_ready = all(words[slot] == word for words in self._slots for slot in slots)
        _order_memory()
        return are_ready

    def lane_results(self, lanes: Sequence[int], generations: Sequence[int]) -> list[SlotState]:
        """Return `lane_result` of many transfers. If there are very many, one word per rank rules most of them out."""
        may_be_over: Sequence[bool] = [True] * len(lanes)
        if len(lanes) * len(self._lanes) > FEW_WORDS:
            words = zip(self._lane_words, self._is_lost, strict=True)
            may_be_over = _are_reported(words, _indexes(lanes, LANES), generations)
        return [
            self.lane_result(lane, generation) if is_over else SlotState.EMPTY
            for lane, generation, is_over in zip(lanes, generations, may_be_over, strict=True)
        ]

    def are_reported(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """For many transfers at once, each named by one of its slots: whether `slot_results` may have a result."""
        indexes = _indexes(slots, self.slot_count)
        words = ((slot_words, self._is_lost[position]) for slot_words, position in self._own_slots)
        reported = _are_reported(words, indexes, generations)
        for replicas in self._replicated:
            have_ended = replicas.have_ended(generations, self._is_lost)
            reported = [one and other for one, other in zip(reported, have_ended, strict=True)]
        return reported

    def lane_result(self, lane: int, generation: int) -> SlotState:
        """Return the result of a transfer that reports in a lane."""
        if not 0 <= lane < LANES:
            raise InvariantError(f"lane {lane} of {LANES}")
        ready, failed = _number(generation, SlotState.READY), _number(generation, SlotState.FAILED)
        found = [words[lane] for words in self._lanes]
        _order_memory()
        if found.count(ready) == len(found):
            return SlotState.READY
        are_reported = (word in (ready, failed) or lost for word, lost in zip(found, self._is_lost, strict=True))
        return SlotState.FAILED if all(are_reported) else SlotState.EMPTY

    def heartbeats(self) -> list[int | None]:
        """Return a number per rank that changes while the rank is alive; None for a rank whose process has ended."""
        return [None if lost else beats[0] for beats, lost in zip(self._heartbeats, self._is_lost, strict=True)]

    def has_lost_rank(self) -> bool:
        """Whether the process of a rank has ended; its missing results count as FAILED then. Takes one system call."""
        for fd, _ in self._poll.poll(0) if self._process_fds else ():
            self._is_lost[self._process_fds[fd]] = True
            self._are_lost_shards = [any(map(self._is_lost.__getitem__, ranks)) for ranks in self._ranks_of_shards]
        return any(self._is_lost)

    def close(self) -> None:
        """Unmap. May be called twice."""
        self._slot_words.clear()
        self._lane_words.clear()
        self._slots.clear()
        self._lanes.clear()
        self._heartbeats.clear()
        self._own_slots.clear()
        self._replicated.clear()
        self.shards.clear()
        while self._process_fds:
            fd, _ = self._process_fds.popitem()
            self._poll.unregister(fd)
            os.close(fd)


class _Replicas:
    """The reports of the replicas of one segment. `positions` are their positions among all ranks."""

    def __init__(self, segment: _MappedSegment) -> None:
        self._reports, self._checksums = segment.words.reports, segment.words.checksums
        self._positions = segment.positions
        self.are_different = False

    def have_ended(self, generations: Sequence[int], is_lost: Sequence[bool]) -> list[bool]:
        """For many transfers at once: whether each replica has reported, or is lost."""
        wanted = np.array(generations, np.uint64)
        found = self._reports[:, wanted % np.uint64(REPORTS)]
        has_ended = _is_final(found, wanted) | self._lost(is_lost)
        ended: list[bool] = np.logical_and.reduce(has_ended).tolist()
        return ended

    def result(self, generation: int, is_lost: Sequence[bool]) -> SlotState:
        """EMPTY until every replica has reported or is lost. Then READY if all have copied the same bytes."""
        index = generation % REPORTS
        found = self._reports[:, index].copy()
        if not (_is_final(found, np.uint64(generation)) | self._lost(is_lost)[:, 0]).all():
            return SlotState.EMPTY
        _order_memory()
        checksums = self._checksums[:, index].copy()
        _order_memory()
        if not (found == _word(generation, SlotState.READY)).all() or not np.array_equal(
            self._reports[:, index], found
        ):
            return SlotState.FAILED  # a copy failed, or a later transfer has overwritten a report
        self.are_different = bool((checksums != checksums[0]).any())
        return SlotState.FAILED if self.are_different else SlotState.READY

    def _lost(self, is_lost: Sequence[bool]) -> NDArray[np.bool_]:
        return np.array([[is_lost[position]] for position in self._positions])


@dataclass(frozen=True, slots=True)
class _MappedSegment:
    """A segment, the positions of its replicas among all ranks, and for each replica in another process its position
    and a descriptor that becomes readable when that process ends."""

    info: SegmentInfo
    payload: NDArray[np.uint8]
    words: _Words
    positions: tuple[int, ...]
    process_fds: tuple[tuple[int, int], ...]


def _mapped(infos: Sequence[SegmentInfo]) -> list[_MappedSegment]:
    """Map each segment once, in the order of the ranks. Raises EnvironmentProblem."""
    fds: dict[int, int] = {}
    try:
        members: dict[tuple[int, int], list[int]] = {}  # positions of the ranks with the same memory
        for position, info in enumerate(infos):
            fds[position] = _open(info)
            file = os.fstat(fds[position])
            members.setdefault((file.st_dev, file.st_ino), []).append(position)
        return [_map(infos, positions, fds[positions[0]]) for positions in members.values()]
    finally:
        for fd in fds.values():
            os.close(fd)


def _map(infos: Sequence[SegmentInfo], positions: Sequence[int], fd: int) -> _MappedSegment:
    """Map the segment of the ranks at these positions. Raises EnvironmentProblem."""
    ranks = sorted((infos[position].replica, position) for position in positions)
    info = infos[ranks[0][1]]
    if [replica for replica, _ in ranks] != list(range(info.replica_count)):
        raise EnvironmentProblem(
            f"rank {info.rank} shares its memory with {len(ranks) - 1} ranks instead of {info.replica_count - 1}"
        )
    try:
        mapping = mmap.mmap(fd, info.length)
        others = [(position, infos[position].pid) for _, position in ranks if infos[position].pid != os.getpid()]
        process_fds = tuple((position, os.pidfd_open(pid)) for position, pid in others)
    except OSError as error:
        raise EnvironmentProblem(f"cannot map the segment of rank {info.rank}: {error}") from error
    geometry = _Geometry.of(info)
    payload = geometry.payload(mapping)[: info.slot_count]
    return _MappedSegment(info, payload, geometry.words(mapping), tuple(position for _, position in ranks), process_fds)


def _open(info: SegmentInfo) -> int:
    """Return a descriptor of a rank's memory. Raises EnvironmentProblem."""
    path = f"/proc/{info.pid}/fd/{info.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            is_segment = MEMFD_NAME in os.readlink(path) and is_sealed(fd, info.length)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise EnvironmentProblem(f"cannot map the segment of rank {info.rank}: {error}") from error
    if not is_segment:
        os.close(fd)
        raise EnvironmentProblem(f"rank {info.rank}: {path} is not its sealed segment of {info.length} bytes")
    return fd


def _word(generation: int, state: SlotState) -> np.uint64:
    return np.uint64(_number(generation, state))


def _number(generation: int, state: SlotState) -> int:
    if not 0 <= generation < 1 << (64 - STATE_BITS):
        raise InvariantError(f"generation {generation} does not fit a control word")
    return generation << STATE_BITS | state


def _ready_words(generations: Numbers) -> NDArray[np.uint64]:
    return np.asarray(generations, np.uint64) << np.uint64(STATE_BITS) | np.uint64(SlotState.READY)


def _indexes(numbers: Numbers, count: int) -> NDArray[np.int64]:
    """Return the numbers as an array. A number out of range is refused: it would silently name another slot."""
    indexes = np.asarray(numbers, np.int64)
    # as unsigned numbers, negative ones are large
    if len(indexes) and np.maximum.reduce(indexes.view(np.uint64)) >= count:
        raise InvariantError(f"control words {indexes.min()}..{indexes.max()} of {count}")
    return indexes


def _are_reported(
    words: Iterable[tuple[NDArray[np.uint64], bool]], indexes: NDArray[np.int64], generations: Sequence[int]
) -> list[bool]:
    """For many transfers: whether all of these ranks, given as (words, is lost), have reported."""
    wanted = np.array(generations, np.uint64)
    found = [
        np.ones(len(indexes), bool) if lost else rank_words[indexes] >> np.uint64(STATE_BITS) == wanted
        for rank_words, lost in words
    ]
    reported: list[bool] = np.logical_and.reduce(found).tolist() if found else [True] * len(indexes)
    return reported


def _is_final(reports: NDArray[np.uint64], generations: NDArray[np.uint64] | np.uint64) -> NDArray[np.bool_]:
    """Whether each report is the last word on its transfer: it has ended, or a later one has taken its place."""
    found, is_empty = reports >> np.uint64(STATE_BITS), reports & np.uint64(STATE_MASK) == np.uint64(SlotState.EMPTY)
    final: NDArray[np.bool_] = (found > generations) | ((found == generations) & ~is_empty)
    return final


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
