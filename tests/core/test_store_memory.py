"""A store of four million blocks: under 200 bytes a block, no more after many went through, flat for the collector.

Measured as resident memory in a process of its own, with random hashes registered in batches as transfers deliver them.
"""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import gc, json, os, sys
from kvbm.core.store import BlockStore
from kvbm.types import Tier

CAPACITY, BATCH = 4_000_000, 4_000

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def turn_over(store, blocks):
    for _ in range(blocks // BATCH):
        data = os.urandom(16 * BATCH)
        hashes = [data[start : start + 16] for start in range(0, len(data), 16)]
        store.allocate(BATCH).register(hashes).release()
        store.take_events()

gc.collect()
before, tracked_before = resident_bytes(), len(gc.get_objects())
store = BlockStore(CAPACITY, tier=Tier.DISK)
turn_over(store, CAPACITY)
filled = resident_bytes()
turn_over(store, CAPACITY // 2)
churned = resident_bytes()
for start in range(0, CAPACITY, 100_000):
    store.check(start, 10_000)
gc.collect()
print(json.dumps({
    "inactive": store.counts().inactive,
    "filled_bytes_per_block": (filled - before) / CAPACITY,
    "churned_bytes_per_block": (churned - before) / CAPACITY,
    "tracked_objects": len(gc.get_objects()) - tracked_before,
}))
"""


@pytest.mark.soak
def test_four_million_blocks_stay_under_200_bytes_each():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    measured = json.loads(result.stdout)
    print(measured)
    assert measured["inactive"] == 4_000_000
    assert measured["filled_bytes_per_block"] < 200
    assert measured["churned_bytes_per_block"] < 200
    assert measured["tracked_objects"] < 1000
