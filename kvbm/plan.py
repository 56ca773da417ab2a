"""StepPlan: the copies that the leader orders from the workers in one engine step.

It is the only message from leader to worker: small, picklable and without references into either side. Workers send no
messages back. They write control words into their segments, and the leader reads them.

Every transfer has a `generation`, a number that increases over the life of the leader. The worker writes it into the
control word of each slot that it has proven, so that a late result of an older transfer is never mistaken for a newer
one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy G1 blocks to G2 slots after the forward pass of this step: `slots[i]` receives `block_ids[i]`."""

    generation: int
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Onboard:
    """Copy G2 slots to G1 blocks before anything reads these: `block_ids[i]` receives `slots[i]`.

    The control word of `slots[i]` must carry `slot_generations[i]` before and after the copy. Otherwise the slot holds
    another block, and the transfer fails. `lane` is the index of the control word in which the worker reports the whole
    transfer.
    """

    generation: int
    lane: int
    slots: tuple[int, ...]
    slot_generations: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Orders of one engine step, the same for every rank.

    `overdue_offloads` and `overdue_onboards` repeat orders whose results are late. A worker that does not run such an
    order reports it as failed, because no other copier could run it.
    """

    step: int
    offloads: tuple[Offload, ...] = ()
    onboards: tuple[Onboard, ...] = ()
    overdue_offloads: tuple[Offload, ...] = ()
    overdue_onboards: tuple[Onboard, ...] = ()

    def is_empty(self) -> bool:
        return not (self.offloads or self.onboards or self.overdue_offloads or self.overdue_onboards)
