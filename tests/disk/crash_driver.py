"""A process that drives the real disk tier under load until it is killed, and tells what it was told.

    python tests/disk/crash_driver.py DIRECTORY SEED [POINT COUNT]

Blocks are numbered upwards, and their bytes follow from the number. On stdout, one line each, before the next order:

    ready            the load begins
    written N S      `poll` has said that block N is on disk in slot S
    evicting N S     it is about to be forgotten or overwritten
    cleared N        `clear` has returned; blocks up to N are gone

With a POINT it kills itself with SIGKILL when that point is passed for the COUNT-th time.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from disk_rig import assembled, make_hash

from kvbm.tiers.disk.health import HealthLimits

SLOT_COUNT = 48
HOST_SLOTS = 48
SHARD_BYTES = (128 << 10, 64 << 10)
MAX_BLOCKS = 6
CLEAR_EVERY_S = 0.1, 3
POINTS = (
    "before-payload",
    "inside-payload",
    "payload-to-flush",
    "flush-to-commit",
    "commit-to-report",
    "evict-to-overwrite",
)
KEYS = {"block_count": SLOT_COUNT, "host_slots": HOST_SLOTS, "shard_bytes": SHARD_BYTES, "threads": 2}
PATIENT = HealthLimits(stall_s=60.0)


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class CrashPoints:
    """Puts itself around the parts of a tier, and counts how often each point is passed."""

    def __init__(self, point, count):
        self._point = point
        self._left = count

    def passed(self, point):
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def put_into(self, parts):
        io, arena, index = parts["io"], parts["instance"].arena, parts["instance"].index
        write, sync, change = io.write, arena.sync, index.change

        def write_with_points(runs):
            self.passed("before-payload")
            if self._point == "inside-payload":
                for run in runs:
                    write([run._replace(buffers=run.buffers[:1])])
                    self.passed("inside-payload")
            write(runs)

        def sync_with_points():
            self.passed("payload-to-flush")
            sync()
            self.passed("flush-to-commit")

        def change_with_points(rows, slots):
            is_written = change(rows, slots)
            if rows:
                self.passed("commit-to-report")
            if any(slot in OCCUPIED for slot in slots):
                self.passed("evict-to-overwrite")
            return is_written

        io.write, arena.sync, index.change = write_with_points, sync_with_points, change_with_points
        return parts


OCCUPIED = set()  # slots that have held a block since the start, or before it


class Load:
    """A leader of sorts: knows which block lies in which slot, and orders at random."""

    def __init__(self, rig, seed):
        self.rig = rig
        self.random = random.Random(seed)
        self.blocks = {slot: number for number, slot in rig.recovered().items()}
        OCCUPIED.update(self.blocks)
        self.next_number = max(self.blocks.values(), default=0) + 1_000  # those in flight at a kill were never told
        self.last_cleared = -1
        self.next_clear_s = time.monotonic() + self.random.uniform(*CLEAR_EVERY_S)
        self.free_host_slots = set(range(HOST_SLOTS))
        self.writes = {}
        self.reads = {}
        self.busy = set()

    def run(self):
        say("ready")
        while True:
            self.settle()
            kind = self.random.random()
            if kind < 0.55:
                self.write()
            elif kind < 0.90:
                self.read()
            elif kind < 0.99:
                self.forget()
            elif time.monotonic() >= self.next_clear_s:
                self.clear()
                self.next_clear_s = time.monotonic() + self.random.uniform(*CLEAR_EVERY_S)

    def some_slots(self, slots):
        slots = sorted(slots)
        start = self.random.randrange(len(slots)) if slots else 0
        return slots[start : start + self.random.randint(1, MAX_BLOCKS)]

    def host_slots(self, count):
        return [self.free_host_slots.pop() for _ in range(count)]

    def write(self):
        slots = self.some_slots(set(range(SLOT_COUNT)) - self.busy)[: len(self.free_host_slots)]
        if not slots:
            return
        numbers = [self.next_number + position for position in range(len(slots))]
        self.next_number += len(slots)
        self.evict(slots)
        host_slots = self.host_slots(len(slots))
        self.busy.update(slots)
        self.writes[self.rig.start_write(numbers, host_slots, slots)] = numbers, host_slots, slots

    def read(self):
        slots = self.some_slots(self.blocks.keys() - self.busy)[: len(self.free_host_slots)]
        if not slots:
            return
        numbers, host_slots = [self.blocks[slot] for slot in slots], self.host_slots(len(slots))
        self.busy.update(slots)
        self.reads[self.rig.start_read(numbers, slots, host_slots)] = numbers, host_slots, slots

    def forget(self):
        slots = self.some_slots(self.blocks.keys() - self.busy)
        self.evict(slots)
        self.rig.tier.forget(slots)

    def evict(self, slots):
        for slot in slots:
            if slot in self.blocks:
                say("evicting", self.blocks.pop(slot), slot)

    def clear(self):
        last = self.next_number - 1
        self.evict(list(self.blocks))
        self.rig.clear()
        self.last_cleared = last
        say("cleared", last)

    def settle(self):
        for result in self.rig.tier.poll():
            is_write = result.ticket in self.writes
            numbers, host_slots, slots = (self.writes if is_write else self.reads).pop(result.ticket)
            for number, host_slot, slot, is_good in zip(numbers, host_slots, slots, result.is_good, strict=True):
                if is_write and number <= self.last_cleared:
                    continue  # it was in flight when all was cleared, so no leader registers it
                if is_write:
                    assert is_good, f"block {number} is not written: {result.error}"
                    self.blocks[slot] = number
                    OCCUPIED.add(slot)
                    say("written", number, slot)
                else:
                    assert is_good, f"block {number} is missed: {result.error}"
                    assert self.rig.holds(host_slot, make_hash(number)), f"block {number} differs"
            self.busy.difference_update(slots)
            self.free_host_slots.update(host_slots)


def main(directory, seed, point=None, count="0"):
    points = CrashPoints(point, int(count))
    with assembled(Path(directory), change=points.put_into, limits=PATIENT, **KEYS) as rig:
        Load(rig, int(seed)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
