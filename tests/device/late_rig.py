"""Rigs of `copies` over the devices of a LateMachine."""

from __future__ import annotations

from copies import SLOTS, Rig

from kvbm.device.copier import DeviceCopier
from kvbm.host.segment import Segment

WAYS = {"staged": (True, 1 << 40), "staged, no batch": (False, 1), "direct": (True, 1)}  # (batch copy, shortest direct)
MODES = ("late", "early", "random")


class LateRig(Rig):
    """One rank over a LateMachine."""

    def __init__(self, cache, machine, device=0, slots_per_pin=SLOTS, **facts):
        self.layout, self.storages = cache("cpu")
        self.segment = Segment.create(rank=device, layout=self.layout, slot_count=SLOTS)
        self.segment.slots_per_pin = slots_per_pin
        self.machine = machine
        self.runtime = machine.runtime(device, self.storages, self.segment, **facts)
        self.copier = DeviceCopier(self.layout, self.storages, self.segment, runtime=self.runtime)
        self.engine = machine.engine(device)

    def slot(self, slot):
        return self.segment.payload[slot, : self.layout.block_bytes]
