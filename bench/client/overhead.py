"""What the load client costs, next to other clients of the same server: CPU time per request, and TTFT error.

    python -m venv /tmp/openai && /tmp/openai/bin/pip install openai httpx
    python -m venv /tmp/openai1 && /tmp/openai1/bin/pip install openai==1.109.1
    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf==0.13.0
    python -m kvbm_cli.make_model vllm-25m /tmp/tokenizer
    python bench/client/overhead.py --openai /tmp/openai/bin/python --openai1 /tmp/openai1/bin/python \\
        --aiperf /tmp/aiperf/bin/aiperf --tokenizer /tmp/tokenizer \\
        --output bench/results/2cpu-x86-64-no-gpu-bench-client.json

Without the options of other interpreters, only kvbm and the bare loops on aiohttp are measured. It exits with 1 if kvbm
exceeds a limit. Clients alternate within a round; results are medians over rounds. CPU time is that of the client's
process, so that a busy machine changes it less than wall clock time. Each answer has 20 tokens.

    coalesced     64 requests in flight, the server writes a whole answer at once
    spaced        64 requests in flight, the first token after 50 ms, then one each 20 ms
    ttft error    8 requests in flight, spaced; (client's TTFT) - (server: first write - request complete)
    workers       requests/s of kvbm with 1 and 2 processes, coalesced, 64 in flight

The CPU time of aiperf is that of all its processes: the difference of two runs of different length, without the start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SPACED = ("--first-ms", "50", "--token-ms", "20")
LIMITS = {"coalesced_cpu_ms": 0.35, "ratio_to_aiohttp": 1.3, "ttft_error_p50_ms": 2.0}
REQUESTS = {"coalesced": 3000, "spaced": 600}
SLOW_REQUESTS = {"coalesced": 400, "spaced": 128}  # of clients that take ten times as long
SLOW = ("openai", "openai1", "httpx")
AIPERF_REQUESTS = {"coalesced": (500, 2500), "spaced": (200, 800)}


@contextlib.contextmanager
def server(*options: str) -> Iterator[str]:
    command = [sys.executable, str(HERE / "server.py"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield f"http://127.0.0.1:{child.stdout.readline().strip()}"
        finally:
            child.kill()


def stamps(url: str) -> dict[str, float]:
    """The server's TTFT by request; of a name that was used twice, the last. Forgets them."""
    with urllib.request.urlopen(url + "/stamps") as response:
        return {name: first - complete for name, complete, first in json.load(response) if first is not None}


def run_client(python: str, name: str, url: str, requests: int, in_flight: int) -> dict[str, Any]:
    command = [python, str(HERE / "clients.py"), name, "--url", url]
    command += ["--requests", str(requests), "--in-flight", str(in_flight)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, timeout=300)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def cpu_ms(python: str, name: str, mode: str, url: str) -> float:
    requests = (SLOW_REQUESTS if name in SLOW else REQUESTS)[mode]
    result = run_client(python, name.rstrip("1"), url, requests, 64)
    stamps(url)
    return 1e3 * float(result["cpu_s"]) / requests


def ttft_errors_ms(python: str, name: str, url: str) -> list[float]:
    stamps(url)
    result = run_client(python, name.rstrip("1"), url, 80, 8)
    of_server = stamps(url)
    return [1e3 * (ttft - of_server[request]) for request, ttft in result["ttft_s"].items()]


def run_aiperf(program: str, tokenizer: str, url: str, requests: int, in_flight: int) -> tuple[float, dict[str, float]]:
    """CPU seconds of all processes of a run, and the times to first token in ms by X-Request-Id."""
    with tempfile.TemporaryDirectory() as directory:
        command = [program, "profile", "-m", "mock", "--url", url, "--endpoint-type", "completions", "--streaming"]
        command += ["--tokenizer", tokenizer, "--isl", "200", "--use-server-token-count", "--ui", "none"]
        command += ["--no-server-metrics", "--no-gpu-telemetry", "--artifact-dir", directory]
        command += ["--concurrency", str(in_flight), "--request-count", str(requests)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = (Path(directory) / "profile_export.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    ttfts = {one["metadata"]["x_request_id"]: one["metrics"]["time_to_first_token"]["value"] for one in records}
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ttfts


def aiperf_cpu_ms(program: str, tokenizer: str, mode: str, url: str) -> float:
    (few, few_s), (many, many_s) = (
        (count, run_aiperf(program, tokenizer, url, count, 64)[0]) for count in AIPERF_REQUESTS[mode]
    )
    return 1e3 * (many_s - few_s) / (many - few)


def aiperf_ttft_error_ms(program: str, tokenizer: str, url: str) -> float:
    stamps(url)
    ttfts = run_aiperf(program, tokenizer, url, 80, 8)[1]
    of_server = stamps(url)
    return statistics.median(ttft - 1e3 * of_server[name] for name, ttft in ttfts.items())


def requests_per_s(name: str, url: str) -> float:
    result = run_client(sys.executable, name, url, 6000, 64)
    stamps(url)
    return 6000 / float(result["wall_s"])


def repeated(rounds: int, clients: list[str], measure: Callable[[str], float]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(rounds):
        for name in clients if number % 2 == 0 else reversed(clients):
            samples[name].append(round(measure(name), 4))
            print(f"  {name:18} {samples[name][-1]:9.3f}", flush=True)
    return samples


def versions(pythons: dict[str, str]) -> dict[str, dict[str, str]]:
    """Of the clients' packages, by client."""
    code = "import importlib.metadata as m; print(*(f'{d.name.lower()}={d.version}' for d in m.distributions()))"
    found = {}
    for name, python in pythons.items():
        words = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        of_all = dict(word.split("=") for word in words)
        found[name] = {one: of_all[one] for one in ("aiohttp", "httpx", "httpx2", "openai", "aiperf") if one in of_all}
    return found


def measure_cpu(mode: str, options: tuple[str, ...], pythons: dict[str, str], given: argparse.Namespace) -> Any:
    print(f"CPU ms per request, {mode}", flush=True)
    with server(*options) as url:
        samples = repeated(given.rounds, [*pythons], lambda name: cpu_ms(pythons[name], name, mode, url))
        if given.aiperf:
            samples |= repeated(1, ["aiperf"], lambda name: aiperf_cpu_ms(given.aiperf, given.tokenizer, mode, url))
    return summary(samples)


def measure_ttft_errors(pythons: dict[str, str], given: argparse.Namespace) -> Any:
    print("median TTFT error in ms", flush=True)
    with server(*SPACED) as url:

        def error_ms(name: str) -> float:
            return statistics.median(ttft_errors_ms(pythons[name], name, url))

        samples = repeated(given.rounds, [*pythons], error_ms)
        if given.aiperf:
            samples |= repeated(2, ["aiperf"], lambda name: aiperf_ttft_error_ms(given.aiperf, given.tokenizer, url))
    return summary(samples)


def measure_all(given: argparse.Namespace) -> dict[str, Any]:
    pythons = dict.fromkeys(("kvbm", "aiohttp", "aiohttp-unparsed"), sys.executable)
    if given.openai:
        pythons |= {"openai": given.openai, "httpx": given.openai}
    if given.openai1:
        pythons["openai1"] = given.openai1
    modes: dict[str, tuple[str, ...]] = {"coalesced": (), "spaced": SPACED}
    cpu = {mode: measure_cpu(mode, options, pythons, given) for mode, options in modes.items()}
    errors = measure_ttft_errors(pythons, given)
    print("requests/s with one process and with two", flush=True)
    with server() as url:
        rates = repeated(given.rounds, ["kvbm", "kvbm-2"], lambda name: requests_per_s(name, url))
    if given.aiperf:
        pythons["aiperf"] = str(Path(given.aiperf).with_name("python"))
    return {
        "cpu_ms_per_request": cpu,
        "ttft_error_p50_ms": errors,
        "requests_per_s": summary(rates),
        "versions": versions(pythons),
    }


def summary(samples: dict[str, list[float]]) -> dict[str, Any]:
    return {name: {"median": round(statistics.median(of), 4), "samples": of} for name, of in samples.items()}


def broken_limits(result: dict[str, Any]) -> list[str]:
    cpu = result["cpu_ms_per_request"]
    ratios = {mode: round(of["kvbm"]["median"] / of["aiohttp"]["median"], 3) for mode, of in cpu.items()}
    result["ratio_to_aiohttp"] = ratios
    result["ratio_to_aiohttp_unparsed"] = {
        mode: round(of["kvbm"]["median"] / of["aiohttp-unparsed"]["median"], 3) for mode, of in cpu.items()
    }
    values = {
        "coalesced_cpu_ms": cpu["coalesced"]["kvbm"]["median"],
        "ratio_to_aiohttp": max(ratios.values()),
        "ttft_error_p50_ms": result["ttft_error_p50_ms"]["kvbm"]["median"],
    }
    return [f"{name} is {values[name]}, limit {limit}" for name, limit in LIMITS.items() if values[name] > limit]


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openai", help="an interpreter with openai 3 and httpx")
    parser.add_argument("--openai1", help="an interpreter with openai 1.109.1")
    parser.add_argument("--aiperf", help="the program aiperf")
    parser.add_argument("--tokenizer", help="a directory with a tokenizer, for aiperf")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    start, load_before = time.monotonic(), os.getloadavg()[0]
    result = measure_all(given)
    broken = broken_limits(result)
    facts = {
        "benchmark": "bench_client",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average_before": round(load_before, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
        "note": "the machine was shared with other work: compare CPU times, and clients with each other",
        "duration_s": round(time.monotonic() - start),
        "limits": LIMITS,
        "broken_limits": broken,
    }
    if given.output:
        given.output.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key.startswith("ratio")}), *broken, sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
