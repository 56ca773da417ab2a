"""Error of the sampled hit rates of `kvbm plan` against the exact ones.

    python bench/eviction/sampling_error.py TRACE.jsonl.gz --output bench/results/NAME-eviction-sampling-error.json

A sample is drawn with each of 20 seeds. The error of a policy at a capacity is the mean of the absolute differences of
its hit rates to the exact one. Exits with 1 if the error of `lru` exceeds 0.01.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "vllm"), str(ROOT / "bench" / "eviction")]

from facts import facts  # noqa: E402
from hit_rates import read  # noqa: E402

from kvbm.core.shadow_caches import EVICTIONS, LRU  # noqa: E402
from kvbm_cli.bench.trace.hit_rates import Sample, hit_rate  # noqa: E402

SHARES = (0.01, 0.05, 0.1, 0.3)  # of the different blocks of the trace
LIMIT = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tracked", type=int, default=20_000, help="sampled blocks")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tree, uses = read(options.trace)
    blocks = len(tree) - 1
    exact_sample = Sample(tree, blocks)
    points: list[dict[str, Any]] = [
        {
            "policy": policy,
            "capacity_blocks": (capacity := round(share * blocks)),
            "hit_rate": hit_rate(tree, uses, exact_sample, capacity, policy),
            "errors": [],
        }
        for policy in EVICTIONS
        for share in SHARES
    ]
    for seed in range(options.seeds):
        sample = Sample(tree, options.tracked, seed=seed)
        for point in points:
            rate = hit_rate(tree, uses, sample, point["capacity_blocks"], point["policy"])
            point["errors"].append(abs(rate - point["hit_rate"]))
    for point in points:
        errors = point.pop("errors")
        point |= {"mean_absolute_error": round(fmean(errors), 4), "largest_error": round(max(errors), 4)}
        print("{policy:<10}{capacity_blocks:>8}  {hit_rate:.4f}  {mean_absolute_error:.4f}".format(**point))
    if options.output:
        found = {"sampled_blocks": options.tracked, "seeds": options.seeds, "points": points}
        options.output.write_text(json.dumps({**facts(()), **found}, indent=2) + "\n")
    errors = [point["mean_absolute_error"] for point in points if point["policy"] == LRU]
    return 1 if max(errors) > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
