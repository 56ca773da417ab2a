"""Segment: the part of G2 of one rank. Its owner thread writes control words; copying threads read and write slots.

A segment is a memfd: it has no name, is not in /dev/shm, and disappears with the last process that maps it. It is
sealed, so that no process can change its length. `control_words.py` shows what is in it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.control_words import (
    LANES,
    REPORTS,
    STATE_BITS,
    SegmentGeometry,
    checked_indexes,
    control_word,
    order_memory,
    ready_words,
    require_barrier,
)
from kvbm.host.layout import BlockLayout, Numbers
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm.host.shared_memory import SharedMemory, is_sealed
from kvbm.types import SegmentInfo, SlotState

MEMFD_NAME = "kvbm-segment"
LARGEST_WORD = (1 << 64) - 1


class Segment:
    """One rank's part of G2. `payload[s]` is slot s; sample slots follow. `close` of replica 0 frees the memory.

    A copy on a device must not cross a multiple of `slots_per_pin`: the slots on both sides are page-locked separately.
    """

    def __init__(self, memory: SharedMemory, info: SegmentInfo, slots_per_pin: int) -> None:
        self.info = info
        self.slots_per_pin = slots_per_pin
        self._memory = memory
        geometry = SegmentGeometry.of(info)
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
        began_s = time.monotonic()
        who, length = f"rank {rank}", SegmentGeometry(slot_count, layout.slot_stride, replica_count).length
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
        return cls._ready(shared, info, began_s, pin=pin)

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
        began_s = time.monotonic()
        fd = open_segment(owner)
        shared = SharedMemory.attach(fd, owner.length, who=f"rank {rank}", progress=progress)
        info = replace(owner, rank=rank, pid=os.getpid(), fd=fd, replica=replica)
        return cls._ready(shared, info, began_s, pin=pin)

    @classmethod
    def _ready(cls, shared: SharedMemory, info: SegmentInfo, began_s: float, *, pin: bool) -> Segment:
        try:
            require_barrier()
            slots_per_pin = shared.pin(f"rank {info.rank}", unit=info.slot_stride) if pin else info.slot_count
            return cls(shared, replace(info, ready_s=time.monotonic() - began_s), slots_per_pin)
        except BaseException:
            shared.close()
            raise

    def write_slots(self, slots: Numbers, generation: int, state: SlotState) -> None:
        """Report the result of transfer `generation` for these slots. Their bytes must be written before."""
        word = control_word(generation, state)
        order_memory()
        self._slot_words[checked_indexes(slots, self.info.slot_count)] = word

    def write_lane(self, lane: int, generation: int, state: SlotState) -> None:
        """Report the result of a transfer that fills no slot."""
        word = control_word(generation, state)
        order_memory()
        self._lane_words[checked_indexes([lane], LANES)] = word

    def slots_carry(self, slots: Numbers, generations: Numbers) -> bool:
        """Whether every slot is READY with exactly its generation."""
        found = self._slot_words[checked_indexes(slots, self.info.slot_count)]
        order_memory()
        return bool(np.array_equal(found, ready_words(generations)))

    def unproven(self, slots: Sequence[int], generation: int) -> list[int]:
        """Return the slots that transfer `generation` has not proven."""
        indexes = checked_indexes(slots, self.info.slot_count)
        found = self._slot_words[indexes]
        order_memory()
        left: list[int] = indexes[found != control_word(generation, SlotState.READY)].tolist()
        return left

    def lane_carries(self, lane: int, generation: int) -> bool:
        """Whether this rank has reported transfer `generation` as READY in this lane."""
        found = self._lane_words[checked_indexes([lane], LANES)][0]
        order_memory()
        return bool(found == control_word(generation, SlotState.READY))

    @property
    def sample_slot(self) -> int:
        """The row of `payload` that receives the samples of this replica."""
        return self.info.slot_count + self.info.replica

    def checksum(self, row: int) -> int:
        import xxhash

        return xxhash.xxh3_64_intdigest(self.payload[row, : self.info.block_bytes].data)

    def write_report(self, generation: int, state: SlotState, checksum: int = 0) -> None:
        """Report that this replica has ended its part of transfer `generation`, after the words of its slots. Any
        thread may call it. The report of a later transfer in the same place stays."""
        index = generation % REPORTS
        with self._reporting:
            if int(self._reports[index]) >> STATE_BITS > generation:
                return
            self._reports[index] = control_word(generation, SlotState.EMPTY)
            order_memory()
            self._checksums[index] = checksum
            order_memory()
            self._reports[index] = control_word(generation, state)

    def has_reported(self, generation: int) -> bool:
        """Whether this replica has reported transfer `generation` as READY."""
        found = self._reports[generation % REPORTS]
        order_memory()
        return bool(found == control_word(generation, SlotState.READY))

    def beat(self) -> None:
        """Show that this rank is alive."""
        self._beat[0] = (self._beat[0] + 1) & LARGEST_WORD

    def close(self) -> None:
        """Free the memory at once, if this is replica 0: views of it that still exist read zeros, those of the other
        replicas too. May be called twice."""
        self._memory.close()


def open_segment(info: SegmentInfo) -> int:
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
