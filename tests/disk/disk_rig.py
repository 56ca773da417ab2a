"""What the tests of the disk tier share: host slots, blocks whose bytes follow from their hash, a tier and its tickets.

Bytes of a block are drawn from a generator that is seeded with the hash, so that a wrong byte shows without a copy of
what was written.
"""

import mmap
import time
from contextlib import contextmanager

import numpy as np

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.health import HealthLimits
from kvbm.tiers.disk.instance import Instance, WantedInstance
from kvbm.tiers.disk.io.threads import ThreadsIO
from kvbm.tiers.disk.orders import Read, Write
from kvbm.tiers.disk.settings import DiskSettings, Namespace
from kvbm.tiers.disk.storage import DiskStorage

HASH_BYTES = 16
LIMIT_S = 60.0
NAMESPACE = Namespace(bytes(range(16)), {"model": "a model"})
QUICK = HealthLimits(errors_until_off=3, stall_s=LIMIT_S, probe_interval_s=0.05)
HASTY = HealthLimits(errors_until_off=3, stall_s=0.5, probe_interval_s=0.05)  # takes a busy disk for hung
CLEAR_LIMIT_S = 30.0


def make_hash(number):
    """Odd numbers and even ones differ in the first bytes, all of them in the last."""
    return int(number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") + int(number).to_bytes(8, "little")


def pattern(sequence_hash, length):
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(sequence_hash, "little")))
    return np.frombuffer(generator.bytes(length), np.uint8)


def make_shards(slot_count, *shard_bytes):
    """Page-aligned host slots, one array per rank."""
    return [
        np.frombuffer(mmap.mmap(-1, slot_count * length), np.uint8).reshape(slot_count, length)
        for length in shard_bytes
    ]


class Rig:
    """A tier, its host slots, and calls that wait for their ticket."""

    def __init__(self, tier, shards):
        self.tier = tier
        self.shards = shards
        self.last_ticket = 0
        self.ended = {}

    @property
    def block_bytes(self):
        return sum(shard.shape[1] for shard in self.shards)

    def fill(self, host_slot, sequence_hash):
        content, start = pattern(sequence_hash, self.block_bytes), 0
        for shard in self.shards:
            shard[host_slot] = content[start : start + shard.shape[1]]
            start += shard.shape[1]

    def holds(self, host_slot, sequence_hash):
        found = np.concatenate([shard[host_slot] for shard in self.shards])
        return bool(np.array_equal(found, pattern(sequence_hash, self.block_bytes)))

    def wipe(self, host_slots):
        for shard in self.shards:
            shard[list(host_slots)] = 0

    def start_write(self, numbers, host_slots, disk_slots, tenants=None):
        self.last_ticket += 1
        hashes = [make_hash(number) for number in numbers]
        for sequence_hash, slot in zip(hashes, host_slots, strict=True):
            self.fill(slot, sequence_hash)
        self.tier.submit(self.order_write(hashes, host_slots, disk_slots, tenants))
        return self.last_ticket

    def order_write(self, hashes, host_slots, disk_slots, tenants=None, generation=0):
        tenants, generations = tenants or [b""] * len(hashes), [generation] * len(hashes)
        return Write(self.last_ticket, hashes, list(disk_slots), list(host_slots), tenants, generations)

    def start_read(self, numbers, disk_slots, host_slots):
        self.last_ticket += 1
        self.wipe(host_slots)
        hashes = [make_hash(number) for number in numbers]
        self.tier.submit(Read(self.last_ticket, hashes, list(disk_slots), list(host_slots)))
        return self.last_ticket

    def wait(self, ticket, limit_s=LIMIT_S):
        deadline_s = time.monotonic() + limit_s
        while ticket not in self.ended:
            assert time.monotonic() < deadline_s, f"ticket {ticket} does not end"
            for result in self.tier.poll():
                assert result.ticket not in self.ended
                self.ended[result.ticket] = result
            time.sleep(0.0005)
        return self.ended[ticket]

    def wait_until(self, condition, limit_s=LIMIT_S):
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, "it does not come to pass"
            for result in self.tier.poll():
                self.ended[result.ticket] = result
            time.sleep(0.001)

    def clear(self, tenant=None, *, ends_persistence=False, limit_s=CLEAR_LIMIT_S):
        """Clear, and wait until that is durable. EnvironmentProblem if it fails: the tier is off then, and retries."""
        clear = self.tier.begin_clear(tenant, ends_persistence=ends_persistence)
        deadline_s = time.monotonic() + limit_s
        while not clear.is_durable:
            if clear.error is not None or time.monotonic() > deadline_s:
                raise EnvironmentProblem(f"not cleared durably: {clear.error or f'not within {limit_s:g} s'}")
            time.sleep(0.0005)

    def write(self, numbers, disk_slots, tenants=None):
        numbers = list(numbers)
        return self.wait(self.start_write(numbers, range(len(numbers)), disk_slots, tenants))

    def read(self, numbers, disk_slots):
        """The result; blocks that are said to be good are compared."""
        numbers = list(numbers)
        result = self.wait(self.start_read(numbers, disk_slots, range(len(numbers))))
        for position, (number, is_good) in enumerate(zip(numbers, result.is_good, strict=True)):
            assert not is_good or self.holds(position, make_hash(number)), f"wrong bytes for block {number}"
        return result

    def recovered(self):
        """{number of the block: disk slot}, and every one of them read and compared."""
        slots, hashes = found_blocks(self.tier)
        numbers = [int.from_bytes(sequence_hash[8:], "little") for sequence_hash in hashes]
        assert [make_hash(number) for number in numbers] == hashes
        return dict(zip(numbers, slots, strict=True))


def settings_for(directory, **keys):
    return DiskSettings(directory, **{"block_count": 16, "threads": 2, **keys})


def found_blocks(tier):
    """(slots, hashes) of all that was there at opening, the oldest first."""
    slots, hashes = [], []
    while True:
        found = tier.recovered()
        for some, more in zip((slots, hashes), (found.slots, found.hashes), strict=True):
            some += more
        if found.is_last:
            return slots, hashes


@contextmanager
def opened(directory, *, host_slots=16, shard_bytes=(8192, 4096), namespace=NAMESPACE, **keys):
    """A tier as an engine opens it."""
    shards = make_shards(host_slots, *shard_bytes)
    tier = DiskStorage.open(settings_for(directory, **keys), namespace, shards, hash_bytes=HASH_BYTES)
    try:
        yield Rig(tier, shards)
    finally:
        tier.close(LIMIT_S)


def left_in(directory, **keys):
    """What the next engine finds there."""
    with opened(directory, **keys) as rig:
        return rig.recovered()


@contextmanager
def assembled(
    directory,
    *,
    change=lambda parts: parts,
    host_slots=16,
    shard_bytes=(8192, 4096),
    limits=QUICK,
    slots_carry=None,
    **keys,
):
    """A tier whose parts, {instance, io}, were changed before it was put together."""
    shards = make_shards(host_slots, *shard_bytes)
    settings = settings_for(directory, **keys)
    instance = Instance.open(WantedInstance(settings, NAMESPACE, sum(shard_bytes), HASH_BYTES))
    io = ThreadsIO(instance.arena.fd, is_direct=instance.arena.is_direct)
    parts = change({"instance": instance, "io": io})
    tier = DiskStorage(
        parts["instance"], parts["io"], shards, threads=settings.threads, slots_carry=slots_carry, limits=limits
    )
    try:
        yield Rig(tier, shards)
    finally:
        tier.close(LIMIT_S)


def instance_of(directory):
    """The path of the only instance there."""
    (path,) = [lock.parent for lock in directory.glob("*/*/lock")]
    return path
