"""Region: the segments of all ranks, mapped by the leader. Its thread reads the control words of the ranks, and writes
those of blocks that do not come from G1.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.control_words import (
    LANES,
    REPORTS,
    ControlWords,
    SegmentGeometry,
    checked_indexes,
    combined,
    control_word,
    have_reported,
    is_final,
    order_memory,
    ready_words,
    require_barrier,
    word_number,
)
from kvbm.host.segment import open_segment
from kvbm.types import SegmentInfo, SlotState

FEW_WORDS = 64


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
        require_barrier()
        return cls(_mapped(infos))

    def write_slots(self, slots: Sequence[int], generation: int, state: SlotState) -> None:
        """Write the words of these slots for every rank. For blocks that do not come from G1."""
        word, indexes = control_word(generation, state), checked_indexes(slots, self.slot_count)
        order_memory()
        for words in self._slot_words:
            words[indexes] = word

    def slots_carry(self, slots: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether every slot is READY with exactly its generation on every rank. Any thread may call it. In a closed
        segment all bytes read as zeros, including the words."""
        wanted, indexes = ready_words(generations), checked_indexes(slots, self.slot_count)
        found = [words[indexes] for words in self._slot_words]
        order_memory()
        return bool(found) and all(bool(np.array_equal(words, wanted)) for words in found)

    def slot_results(self, slots: Sequence[int], generation: int, *, may_differ: bool = False) -> list[SlotState]:
        """Return the result of transfer `generation` for each slot.

        EMPTY until every rank has reported, because a rank that has not reported may still be copying. Then READY if
        all ranks are READY, else FAILED. For a lost rank, which copies no more, everything unproven has FAILED.

        `may_differ`: the source may have changed between the copies of two replicas, so different bytes prove nothing.
        """
        of_replicas = [replicas.result(generation, self._is_lost) for replicas in self._replicated]
        if SlotState.EMPTY in of_replicas:
            return [SlotState.EMPTY] * len(slots)
        if not of_replicas and len(slots) * len(self._slots) <= FEW_WORDS and self._are_ready(slots, generation):
            return [SlotState.READY] * len(slots)
        indexes = checked_indexes(slots, self.slot_count)
        found = np.array([words[indexes] for words in self._slot_words])
        order_memory()
        states = combined(found, generation, self._are_lost_shards)
        if SlotState.FAILED in of_replicas:
            are_different = any(replicas.are_different for replicas in self._replicated)
            self.has_different_copies |= are_different and not may_differ
            return [SlotState.EMPTY if state is SlotState.EMPTY else SlotState.FAILED for state in states]
        return states

    def _are_ready(self, slots: Sequence[int], generation: int) -> bool:
        if slots and not 0 <= min(slots) <= max(slots) < self.slot_count:
            return False  # the caller refuses it
        word = word_number(generation, SlotState.READY)
        are_ready = all(words[slot] == word for words in self._slots for slot in slots)
        order_memory()
        return are_ready

    def lane_results(self, lanes: Sequence[int], generations: Sequence[int]) -> list[SlotState]:
        """Return `lane_result` of many transfers. If there are very many, one word per rank rules most of them out."""
        may_be_over: Sequence[bool] = [True] * len(lanes)
        if len(lanes) * len(self._lanes) > FEW_WORDS:
            words = zip(self._lane_words, self._is_lost, strict=True)
            may_be_over = have_reported(words, checked_indexes(lanes, LANES), generations)
        return [
            self.lane_result(lane, generation) if is_over else SlotState.EMPTY
            for lane, generation, is_over in zip(lanes, generations, may_be_over, strict=True)
        ]

    def are_reported(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """For many transfers at once, each named by one of its slots: whether `slot_results` may have a result."""
        indexes = checked_indexes(slots, self.slot_count)
        words = ((slot_words, self._is_lost[position]) for slot_words, position in self._own_slots)
        reported = have_reported(words, indexes, generations)
        for replicas in self._replicated:
            have_ended = replicas.have_ended(generations, self._is_lost)
            reported = [one and other for one, other in zip(reported, have_ended, strict=True)]
        order_memory()
        return reported

    def lane_result(self, lane: int, generation: int) -> SlotState:
        if not 0 <= lane < LANES:
            raise InvariantError(f"lane {lane} of {LANES}")
        ready, failed = word_number(generation, SlotState.READY), word_number(generation, SlotState.FAILED)
        found = [words[lane] for words in self._lanes]
        order_memory()
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
        has_ended = is_final(found, wanted) | self._lost(is_lost)
        ended: list[bool] = np.logical_and.reduce(has_ended).tolist()
        return ended

    def result(self, generation: int, is_lost: Sequence[bool]) -> SlotState:
        """EMPTY until every replica has reported or is lost. Then READY if all have copied the same bytes."""
        index = generation % REPORTS
        found = self._reports[:, index].copy()
        if not (is_final(found, np.uint64(generation)) | self._lost(is_lost)[:, 0]).all():
            return SlotState.EMPTY
        order_memory()
        checksums = self._checksums[:, index].copy()
        order_memory()
        if not (found == control_word(generation, SlotState.READY)).all() or not np.array_equal(
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
    words: ControlWords
    positions: tuple[int, ...]
    process_fds: tuple[tuple[int, int], ...]


def _mapped(infos: Sequence[SegmentInfo]) -> list[_MappedSegment]:
    """Map each segment once, in the order of the ranks. Raises EnvironmentProblem."""
    fds: dict[int, int] = {}
    try:
        members: dict[tuple[int, int], list[int]] = {}  # positions of the ranks with the same memory
        for position, info in enumerate(infos):
            fds[position] = open_segment(info)
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
    geometry = SegmentGeometry.of(info)
    payload = geometry.payload(mapping)[: info.slot_count]
    return _MappedSegment(info, payload, geometry.words(mapping), tuple(position for _, position in ranks), process_fds)
