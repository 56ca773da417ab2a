"""What the tests of the shared tier share: host slots, runs whose bytes follow from their hashes, a storage and its
tickets. Bytes of a block are drawn from a generator that is seeded with the hash, so that a wrong byte shows."""

import time
from contextlib import contextmanager

import numpy as np

from kvbm.tiers.shared.extent_format import ExtentFormat
from kvbm.tiers.shared.geometry import ExtentGeometry
from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.orders import NOT_WANTED, Get, Outcome, Probe, Put
from kvbm.tiers.shared.protection import NoProtection
from kvbm.tiers.shared.settings import SharedSettings
from kvbm.tiers.shared.storage import SharedStorage
from kvbm.tiers.shared.stores.directory import DirectoryStore
from kvbm.tiers.shared.stores.obstore import connection
from kvbm.tiers.shared.stores.open import open_store

HASH_BYTES = 16
LIMIT_S = 60.0
NAMESPACE = bytes(range(16))
SHARDS = (3072, 5120)  # payload bytes of two ranks
PADDING = 1024  # of a slot behind its payload
SLOTS = 64
EXTENT_BLOCKS = 4


def make_hash(number):
    return int(number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") + int(number).to_bytes(8, "little")


def make_run(number, block_count=EXTENT_BLOCKS):
    """The hashes of run `number` of a chain."""
    return tuple(make_hash(number * block_count + position) for position in range(block_count))


def pattern(sequence_hash, length):
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(sequence_hash, "little")))
    return np.frombuffer(generator.bytes(length), np.uint8)


class Rig:
    """A storage, its host slots, and calls that wait for their ticket."""

    def __init__(self, store, *, namespace=NAMESPACE, protection=None, extent_blocks=EXTENT_BLOCKS, **options):
        self.store = store
        self.shards = [np.zeros((SLOTS, size + PADDING), np.uint8) for size in SHARDS]
        self.form = ExtentFormat(namespace, extent_blocks, sum(SHARDS), HASH_BYTES)
        self.keys = KeySpace(namespace)
        self.carries = True
        geometry = ExtentGeometry(self.shards, SHARDS, self.form, protection or NoProtection())
        self.storage = SharedStorage(store, self.keys, geometry, lambda *_: self.carries, SharedSettings("", **options))
        self.last_ticket = 0
        self.ended = {}

    def key(self, hashes):
        return self.keys.key(hashes[-1])

    def fill(self, slot, sequence_hash):
        content, at = pattern(sequence_hash, sum(SHARDS)), 0
        for shard, size in zip(self.shards, SHARDS, strict=True):
            shard[slot, :size] = content[at : at + size]
            shard[slot, size:] = 0
            at += size

    def holds(self, slot, sequence_hash):
        found = np.concatenate([shard[slot, :size] for shard, size in zip(self.shards, SHARDS, strict=True)])
        return bool(np.array_equal(found, pattern(sequence_hash, sum(SHARDS))))

    def put(self, hashes, first_slot=0, **options):
        """Fill the slots from `first_slot` on, write them as a run, wipe them, and return the result."""
        slots = range(first_slot, first_slot + len(hashes))
        for slot, sequence_hash in zip(slots, hashes, strict=True):
            self.fill(slot, sequence_hash)
        result = self.run(Put, hashes, tuple(slots), (1,) * len(hashes), **options)
        for shard in self.shards:
            shard[list(slots)] = 0
        return result

    def get(self, hashes, first_slot=32, wanted=None):
        """Read the run into the slots from `first_slot` on; `wanted` are positions, by default all."""
        slots = [
            first_slot + position if wanted is None or position in wanted else NOT_WANTED
            for position in range(len(hashes))
        ]
        return self.run(Get, hashes, slots)

    def probe(self, names):
        return self.run(Probe, names)

    def submit(self, kind, *arguments, **options):
        self.last_ticket += 1
        self.storage.submit(kind(self.last_ticket, *arguments, **options))
        return self.last_ticket

    def run(self, kind, *arguments, **options):
        return self.wait(self.submit(kind, *arguments, **options))

    def wait(self, ticket):
        deadline_s = time.monotonic() + LIMIT_S
        while ticket not in self.ended:
            assert time.monotonic() < deadline_s, f"ticket {ticket} has not ended in {LIMIT_S} s"
            for result in self.storage.poll():
                assert result.ticket not in self.ended, f"ticket {result.ticket} ended twice"
                self.ended[result.ticket] = result
            time.sleep(0.001)
        return self.ended[ticket]

    def assert_a_miss(self, hashes, first_slot=32):
        """No block of the run may count as good."""
        result = self.get(hashes, first_slot)
        assert result.outcome in (Outcome.ABSENT, Outcome.BAD, Outcome.FAILED), result
        return result


@contextmanager
def opened(url, *, threads=4, writes=True, **options):
    """A rig on the store of a URL."""
    namespace = options.get("namespace", NAMESPACE)
    store = open_store(url, threads, KeySpace(namespace), {"model": "a model"}, writes=writes)
    rig = Rig(store, **options)
    is_directory = isinstance(store, DirectoryStore)
    rig.raw = connection(url)(LIMIT_S) if is_directory else getattr(store, "_store", None)  # for what others do to it
    try:
        yield rig
    finally:
        rig.storage.close(0)
