"""What `kvbm bench --find-limit` finds on servers of known capacity, and how often its interval of a ratio is right.

    python bench/client/find_limit.py --output bench/results/2cpu-x86-64-no-gpu-find-limit.json

Each seed is one command with two servers over HTTP (bench/client/server.py). The service times of a request have a mean
of SERVICE_MS and are random. One server has SLOTS slots, the other twice as many, so that their capacities are SLOTS /
SERVICE_MS and twice that. Above its capacity, a server has a queue that grows without end; the SLO allows a request to
wait for LIMIT_MS - SERVICE_MS. Exits with 1 unless, in 9 of 10 seeds, both limits are within 5% of the capacity, and
the interval of the ratio holds 2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / name) for name in ("vllm", "client")]

from facts import facts  # noqa: E402
from overhead import server  # noqa: E402

KVBM = (sys.executable, "-c", "import sys; from kvbm_cli.app import run; sys.exit(run(sys.argv[1:]))")
SLOTS, SERVICE_MS, SPREAD = 4, 400, 0.1
LIMIT_MS = 560
CAPACITIES = {"small": 1e3 * SLOTS / SERVICE_MS, "large": 2e3 * SLOTS / SERVICE_MS}  # requests per second
PRECISION = 0.05
NEEDED_SHARE = 0.9
WORKLOAD = """
name: known
kind: unique
seed: {seed}
requests: 160
prompt_tokens: 20
answer_tokens: 20
schedule: {{interval_s: 0.16}}
"""


def found_with(seed: int) -> dict[str, Any]:
    options = ("--service-ms", str(SERVICE_MS), "--spread", str(SPREAD))
    with (
        tempfile.TemporaryDirectory(prefix="kvbm-find-limit-") as work,
        server("--slots", str(SLOTS), "--seed", str(2 * seed), *options) as small,
        server("--slots", str(2 * SLOTS), "--seed", str(2 * seed + 1), *options) as large,
    ):
        workload, output = Path(work) / "known.yaml", Path(work) / "run"
        workload.write_text(WORKLOAD.format(seed=seed))
        command = [*KVBM, "bench", "--compare", f"large={large}", "--compare", f"small={small}", "--json"]
        command += ["--workload", str(workload), "--find-limit", f"ttft_p90<{LIMIT_MS}ms", "--output", str(output)]
        start = time.monotonic()
        with (Path(work) / "log").open("w+") as log:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=900, cwd=ROOT)
            if done.returncode:
                log.seek(0)
                raise SystemExit(f"seed {seed}: `kvbm bench` ended with {done.returncode}\n{log.read()}")
        one = judged(seed, json.loads(done.stdout), time.monotonic() - start)
    print(json.dumps(one), flush=True)
    return one


def judged(seed: int, found: dict[str, Any], duration_s: float) -> dict[str, Any]:
    limits = {}
    for arm in found["arms"]:
        low, high = arm["requests_per_s"]["low"], arm["requests_per_s"]["high"]
        middle = sqrt(low * high) if arm["is_known"] else None
        error = None if middle is None else middle / CAPACITIES[arm["arm"]] - 1
        limits[arm["arm"]] = {"low": low, "high": high, "error": error, "probes": arm["probes"], "doubt": arm["doubt"]}
    (ratio,) = found["ratios"]
    interval = ratio["ratio"]
    return {
        "seed": seed,
        "limits": rounded(limits),
        "are_limits_right": all(one["error"] is not None and abs(one["error"]) <= PRECISION for one in limits.values()),
        "ratio": rounded(interval),
        "is_ratio_right": interval is not None and interval["low"] <= 2 <= interval["high"],
        "sentence": ratio["sentence"],
        "duration_s": round(duration_s, 1),
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    right = {key: sum(one[key] for one in seeds) for key in ("are_limits_right", "is_ratio_right")}
    errors = [abs(of["error"]) for one in seeds for of in one["limits"].values() if of["error"] is not None]
    return {
        "seeds": len(seeds),
        "seeds_with_right_limits": right["are_limits_right"],
        "seeds_with_right_ratio": right["is_ratio_right"],
        "largest_error": max(errors, default=None),
        "is_enough": min(right.values()) >= NEEDED_SHARE * len(seeds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--in-parallel", type=int, default=20)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    start = time.monotonic()
    with ThreadPoolExecutor(given.in_parallel) as pool:
        seeds = list(pool.map(found_with, range(given.seeds)))
    result = {
        **facts(("aiohttp",)),
        "capacities_per_s": CAPACITIES,
        "limit": f"ttft_p90<{LIMIT_MS}ms",
        "in_parallel": given.in_parallel,
        "duration_s": round(time.monotonic() - start),
        **summary(seeds),
        "by_seed": seeds,
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if given.output is not None:
        given.output.write_text(text)
    return 0 if result["is_enough"] else 1


if __name__ == "__main__":
    sys.exit(main())
