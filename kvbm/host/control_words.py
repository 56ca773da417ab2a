"""Control words: how ranks and the leader prove to each other which bytes of host memory are valid.

Each rank has a segment of memory. Slot s of all segments together is block s.

    | slot 0 | slot 1 | ... | slot n-1 | word of slot 0..n-1 | word of lane 0..LANES-1 | heartbeat | padding to a page |

A control word is `generation << 8 | state`: 64 bits, aligned, written by one store instruction. It proves the bytes of
its slot. The rank writes it after a copy from device memory, the leader after a read from disk. The leader decides who
may write a slot, one writer at a time. A writer writes the payload first and the word last; a reader reads the word
first. On x86 this order is enough: stores become visible in program order, and libc ends copies that bypass the cache
with a fence. On other machines (Arm) the writer executes a memory barrier before each write of words, and the reader
one after each read. Its thread wrote the payload, or took the result of that thread from a queue.

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
"""

from __future__ import annotations

import mmap
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.layout import Numbers
from kvbm.host.shared_memory import KERNEL
from kvbm.types import SegmentInfo, SlotState

LANES = 1024
REPORTS = 4096  # the last ones are kept, by generation
WORD_BYTES = 8
STATE_BITS = 8
STATE_MASK = (1 << STATE_BITS) - 1
STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")

_STATES = tuple(SlotState)


@dataclass(frozen=True, slots=True)
class ControlWords:
    """Views of the control words of a segment. `slots` has one word per slot, the others one row per replica."""

    slots: NDArray[np.uint64]
    lanes: NDArray[np.uint64]
    reports: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    heartbeats: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """Offsets and sizes in a segment."""

    slot_count: int
    slot_stride: int
    replica_count: int = 1

    @classmethod
    def of(cls, info: SegmentInfo) -> SegmentGeometry:
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

    def words(self, mapping: mmap.mmap) -> ControlWords:
        words = np.frombuffer(mapping, np.uint64, self.word_count, self.row_count * self.slot_stride)
        reports, rows = self.report_count, words[self.slot_count :].reshape(self.replica_count, -1)
        return ControlWords(
            slots=words[: self.slot_count],
            lanes=rows[:, :LANES],
            reports=rows[:, LANES : LANES + reports],
            checksums=rows[:, LANES + reports : -1],
            heartbeats=rows[:, -1:],
        )


def control_word(generation: int, state: SlotState) -> np.uint64:
    return np.uint64(word_number(generation, state))


def word_number(generation: int, state: SlotState) -> int:
    if not 0 <= generation < 1 << (64 - STATE_BITS):
        raise InvariantError(f"generation {generation} does not fit a control word")
    return generation << STATE_BITS | state


def ready_words(generations: Numbers) -> NDArray[np.uint64]:
    return np.asarray(generations, np.uint64) << np.uint64(STATE_BITS) | np.uint64(SlotState.READY)


def checked_indexes(numbers: Numbers, count: int) -> NDArray[np.int64]:
    """Return the numbers as an array. A number out of range is refused: it would silently name another slot."""
    indexes = np.asarray(numbers, np.int64)
    # as unsigned numbers, negative ones are large
    if len(indexes) and np.maximum.reduce(indexes.view(np.uint64)) >= count:
        raise InvariantError(f"control words {indexes.min()}..{indexes.max()} of {count}")
    return indexes


def have_reported(
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


def is_final(reports: NDArray[np.uint64], generations: NDArray[np.uint64] | np.uint64) -> NDArray[np.bool_]:
    """Whether each report is the last word on its transfer: it has ended, or a later one has taken its place."""
    found, is_empty = reports >> np.uint64(STATE_BITS), reports & np.uint64(STATE_MASK) == np.uint64(SlotState.EMPTY)
    final: NDArray[np.bool_] = (found > generations) | ((found == generations) & ~is_empty)
    return final


def combined(found: NDArray[np.uint64], generation: int, is_lost: Sequence[bool]) -> list[SlotState]:
    """Return the state of each slot over all ranks; `found` has one row of words per rank."""
    is_ready = found == control_word(generation, SlotState.READY)
    if is_ready.all():
        return [SlotState.READY] * found.shape[1]
    is_reported = is_ready | (found == control_word(generation, SlotState.FAILED)) | np.array(is_lost)[:, None]
    states = np.where(is_ready.all(axis=0), int(SlotState.READY), int(SlotState.FAILED))
    states[~is_reported.all(axis=0)] = int(SlotState.EMPTY)
    codes: list[int] = states.tolist()
    return [_STATES[code] for code in codes]


def require_barrier() -> None:
    """Raise EnvironmentProblem if this process cannot order payload and words."""
    try:
        order_memory()
    except OSError as error:
        raise EnvironmentProblem(f"no memory barrier on {platform.machine()}: {error}") from error


def order_memory() -> None:
    """Order payload and words, see the module's text. Call it before writing words, or after reading them."""
    if not STORES_ARE_ORDERED:
        KERNEL.barrier()
