"""How well a plan made from the first half of a trace predicts the hit rates of its second half.

    python bench/eviction/half_traces.py --trace conversation=mooncake-conversation.jsonl.gz \\
        --output bench/results/NAME-eviction-half-traces.json

Halves have equal numbers of requests. The prediction is what `kvbm plan --trace` says for the first half. It is
compared with two rates of the second half, at three capacities (shares of the blocks of the whole trace), by eviction:

- `continued`: that of a cache that has served the first half, as in an engine that goes on
- `alone`: that of an empty cache

Samples have as many blocks of the whole trace as those of `kvbm plan`. Without files, the generated workloads of
`hit_rates.py` are used. Exits with 1 if a prediction for `lru` differs from `continued` by more than LIMIT.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "vllm"), str(ROOT / "bench" / "eviction")]

from facts import facts  # noqa: E402
from hit_rates import Workload, workloads  # noqa: E402

from kvbm.core.shadow_caches import EVICTIONS, LRU, TRACKED_BLOCKS  # noqa: E402
from kvbm_cli.bench.trace.hit_rates import Sample, hit_rate  # noqa: E402

SHARES = (0.02, 0.1, 0.3)  # of the different blocks of the trace
LIMIT = 0.03


def compare(name: str, workload: Workload) -> list[dict[str, Any]]:
    tree, uses = workload
    sample = Sample(tree, TRACKED_BLOCKS)
    middle = len(uses) // 2
    first, second = uses[:middle], uses[middle:]
    blocks = [sum(tree.depth[one.use.prompt] for one in half) for half in (first, second)]
    found = []
    for policy in EVICTIONS:
        for share in SHARES:
            capacity = round(share * (len(tree) - 1))
            before, alone, whole = (hit_rate(tree, part, sample, capacity, policy) for part in (first, second, uses))
            continued = (whole * sum(blocks) - before * blocks[0]) / blocks[1]
            found.append(
                {
                    "trace": name,
                    "policy": policy,
                    "capacity_blocks": capacity,
                    "predicted": round(before, 4),
                    "continued": round(continued, 4),
                    "alone": round(alone, 4),
                    "error": round(before - continued, 4),
                }
            )
            print(
                "{trace:<22}{policy:<10}{capacity_blocks:>8}  predicted {predicted:.3f}  continued {continued:.3f}  "
                "alone {alone:.3f}".format(**found[-1])
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    points = [
        point
        for name, workload in workloads(options.trace, with_generated=not options.trace)
        for point in compare(name, workload)
    ]
    if options.output:
        options.output.write_text(json.dumps({**facts(()), "limit": LIMIT, "points": points}, indent=2) + "\n")
    return 1 if any(abs(point["error"]) > LIMIT for point in points if point["policy"] == LRU) else 0


if __name__ == "__main__":
    sys.exit(main())
