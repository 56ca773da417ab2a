"""One trace, replayed by kvbm and by aiperf on the same server: arrival times, bodies, and the numbers of both.

    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf==0.13.0
    python -m kvbm_cli.make_model vllm-25m /tmp/tokenizer
    python bench/peers/aiperf_beside.py --aiperf /tmp/aiperf/bin/aiperf --tokenizer /tmp/tokenizer \\
        --output bench/results/2cpu-x86-64-no-gpu-aiperf-beside.json

The server has no model (bench/client/server.py): the first token comes after 50 ms, and one each 20 ms follows. It
stamps when the first bytes of each request arrived.

    exported   `kvbm bench report --replay` writes the requests of a benchmark with random arrivals. Each client replays
               them ROUNDS times, in alternation. Bodies must be equal, and the numbers must differ by no more than the
               rounds of aiperf among themselves, or 1 ms
    public     the beginning of Mooncake's conversation trace. It has lengths and no texts, so that kvbm writes the
               texts. One round, so that the noise of the numbers is not known

Arrivals count from the first one. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench" / name) for name in ("vllm", "client")]

from facts import facts  # noqa: E402
from overhead import server  # noqa: E402

PUBLIC = ROOT / "tests/bench/data/mooncake-conversation-head.jsonl.gz"
KVBM = (sys.executable, "-c", "import sys; from kvbm_cli.app import run; sys.exit(run(sys.argv[1:]))")
SERVER = ("--first-ms", "50", "--token-ms", "20", "--bodies")
ROUNDS = 3
PUBLIC_REQUESTS = 40
LATE_MS = 20.0
LEAST_NOISE_MS = 1.0
METRICS = {  # of aiperf, with the key of our file
    "time_to_first_token": "median_ttft_ms",
    "inter_token_latency": "median_tpot_ms",
    "request_latency": "median_e2el_ms",
}
WORKLOAD = """
name: beside
kind: conversations
users: 12
turns: 5
system_tokens: 100
history_tokens: 200
question_tokens: 30
answer_tokens: 20
history: canned
schedule: {interval_s: 0.2, burstiness: 1, pairs: 1}
"""
PUBLIC_WORKLOAD = "name: public\nkind: trace\nfile: public.jsonl\nschedule: {pairs: 1}\n"
REPLAY = "name: replay\nkind: trace\nfile: {}\nschedule: {{pairs: 1}}\n"


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay. `numbers` has the median of each metric in ms; requests are in the order of their arrival."""

    client: str
    count: int
    numbers: dict[str, float]
    arrivals_s: tuple[float, ...]
    bodies: tuple[dict[str, Any], ...]


def stamps(url: str) -> list[list[Any]]:
    """What the server has received since the last call."""
    with urllib.request.urlopen(url + "/stamps") as response:
        found: list[list[Any]] = json.load(response)
    return found


def run(command: Sequence[str], log: Path) -> None:
    with log.open("w") as out:
        subprocess.run(command, stdout=out, stderr=out, check=True, timeout=300, cwd=ROOT)


def bench(url: str, workload: Path, directory: Path) -> None:
    command = [*KVBM, "bench", "--compare", f"one={url}"]
    run([*command, "--workload", str(workload), "--output", str(directory)], directory.with_suffix(".log"))


def of_kvbm(url: str, trace: Path, directory: Path) -> Replayed:
    workload = directory.with_suffix(".yaml")
    workload.write_text(REPLAY.format(trace))
    stamps(url)
    bench(url, workload, directory)
    measured = [one for one in stamps(url) if one[0].startswith("replay.1.one-")]  # without warm-up and probes
    found = json.loads((directory / "exports/one/replay/vllm-bench.json").read_text())
    return _replayed("kvbm", measured, found["completed"], {name: found[key] for name, key in METRICS.items()})


def of_aiperf(program: str, tokenizer: str, url: str, trace: Path, directory: Path) -> Replayed:
    command = [program, "profile", "-m", "mock", "--url", url, "--endpoint-type", "completions", "--streaming"]
    command += ["--tokenizer", tokenizer, "--use-server-token-count", "--ui", "none", "--workers-max", "1"]
    command += ["--no-server-metrics", "--no-gpu-telemetry", "--artifact-dir", str(directory)]
    command += ["--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    stamps(url)
    run(command, directory.with_suffix(".log"))
    found = json.loads((directory / "profile_export_aiperf.json").read_text())
    numbers = {name: found[name]["p50"] for name in METRICS}
    return _replayed("aiperf", stamps(url), round(found["request_count"]["avg"]), numbers)


def _replayed(client: str, stamped: list[list[Any]], count: int, numbers: dict[str, float]) -> Replayed:
    stamped = sorted(stamped, key=lambda one: one[3])
    return Replayed(
        client,
        count,
        numbers,
        tuple(one[3] - stamped[0][3] for one in stamped),
        tuple(json.loads(one[4]) for one in stamped),
    )


def late_ms(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Differences of the times of equal requests, in the order of their arrival."""
    gaps = [1e3 * abs(first - second) for first, second in zip(one, other, strict=True)]
    return {"p50": median(gaps), "p90": quantiles(gaps, n=10)[-1], "max": max(gaps)}


def compared(replays: Sequence[Replayed], intended_s: Sequence[float]) -> dict[str, Any]:
    """Compare all replays of one trace; `intended_s` are its times."""
    kvbm, aiperf = ([one for one in replays if one.client == name] for name in ("kvbm", "aiperf"))
    numbers = {}
    for name in METRICS:
        ours, theirs = ([one.numbers[name] for one in of_one] for of_one in (kvbm, aiperf))
        noise = max(max(theirs) - min(theirs), LEAST_NOISE_MS) if len(theirs) > 1 else None
        difference = median(ours) - median(theirs)
        numbers[name] = {"kvbm": ours, "aiperf": theirs, "difference": difference, "noise": noise}
    start_s = min(intended_s)
    times = sorted(time_s - start_s for time_s in intended_s)
    between = [late_ms(ours.arrivals_s, theirs.arrivals_s) for ours, theirs in zip(kvbm, aiperf, strict=True)]
    bodies = [sorted(json.dumps(body, sort_keys=True) for body in one.bodies) for one in replays]
    return {
        "requests": len(times),
        "counts": {client.client: client.count for client in replays},
        "p50_ms": numbers,
        "arrivals_ms": {
            "kvbm_and_aiperf": between,
            **{
                f"{name}_and_trace": [late_ms(one.arrivals_s, times) for one in of_one]
                for name, of_one in (("kvbm", kvbm), ("aiperf", aiperf))
            },
        },
        "bodies_equal": all(one == bodies[0] for one in bodies),
    }


def problems(name: str, found: dict[str, Any]) -> Iterator[str]:
    if set(found["counts"].values()) != {found["requests"]}:
        yield f"{name}: counts {found['counts']} of {found['requests']} requests"
    if not found["bodies_equal"]:
        yield f"{name}: the bodies differ"
    for metric, one in found["p50_ms"].items():
        if one["noise"] is not None and abs(one["difference"]) > one["noise"]:
            yield f"{name}: {metric} differs by {one['difference']:.2f} ms, more than {one['noise']:.2f} ms"
    for late in found["arrivals_ms"]["kvbm_and_aiperf"]:
        if late["p90"] > LATE_MS:
            yield f"{name}: one arrival in ten differs by more than {late['p90']:.1f} ms"


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def lines_of(trace: Path) -> list[str]:
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        return list(lines)


def measure(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    (work / "public.jsonl").write_text("".join(lines_of(PUBLIC)[:PUBLIC_REQUESTS]))
    workloads = {"exported": (WORKLOAD, ROUNDS), "public": (PUBLIC_WORKLOAD, 1)}
    found = {}
    for name, (workload, rounds) in workloads.items():
        (work / f"{name}.yaml").write_text(workload)
        with server(*SERVER) as url:
            bench(url, work / f"{name}.yaml", work / name)
        trace = work / f"{name}-replay.jsonl"
        run([*KVBM, "bench", "report", str(work / name), "--replay", str(trace)], work / "report.log")
        replays = []
        for number in range(rounds):
            with server(*SERVER) as url:
                directory = work / f"{name}-{number}"
                directory.mkdir()
                replays.append(of_kvbm(url, trace, directory / "kvbm"))
                replays.append(of_aiperf(given.aiperf, given.tokenizer, url, trace, directory / "aiperf"))
        intended_s = [json.loads(line)["timestamp"] / 1e3 for line in lines_of(trace)]
        found[name] = compared(replays, intended_s)
    public_s = [json.loads(line)["timestamp"] / 1e3 for line in lines_of(work / "public.jsonl")]
    assert sorted(intended_s) == sorted(public_s), "the exported times are those of the trace"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--aiperf", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvbm-beside-") as directory:
        found = measure(given, Path(directory))
    exceeded = [problem for name, one in found.items() for problem in problems(name, one)]
    result = {**facts(("aiohttp",)), "aiperf": "0.13.0", **rounded(found), "exceeded": exceeded}
    text = json.dumps(result, indent=2) + "\n"
    print(text)
    if given.output is not None:
        given.output.write_text(text)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
