"""StepPlan: what the leader orders the workers to move in one engine step.

It is the only message between the two, small, picklable and without references into either side. Results do not come
back as messages: a worker writes control words into its segment, and the leader reads them.

Every transfer has a `generation`, unique for the life of the leader and larger than any before it. It names the
transfer, and it is what the worker stamps into the control word of each slot it has proven, so that a late result of
an older transfer can never be taken for a newer one.
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

    `slot_generations[i]` is the generation that the control word of `slots[i]` must carry, before the copy and still
    after it; anything else means that the slot holds another block, and the transfer fails. `lane` is the index of the
    control word in which the worker reports the whole transfer.
    """

    generation: int
    lane: int
    slots: tuple[int, ...]
    slot_generations: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step's orders, the same for every rank.

    `overdue_offloads` and `overdue_onboards` repeat orders of which the leader has heard nothing for long: a worker
    that is not running one reports it as failed, because it is the only copier there could be.
    """

    step: int
    offloads: tuple[Offload, ...] = ()
    onboards: tuple[Onboard, ...] = ()
    overdue_offloads: tuple[Offload, ...] = ()
    overdue_onboards: tuple[Onboard, ...] = ()

    def is_empty(self) -> bool:
        return not (self.offloads or self.onboards or self.overdue_offloads or self.overdue_onboards)
