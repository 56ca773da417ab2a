"""Makes a run directory in the format of `kvbm bench`, with seeded, plausible numbers.

python tests/bench/report_sample.py DIR [--sessions 12] [--turns 6] [--pairs 3] [--pressures 0.8 1.2 2.0]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.show.figures import Report
from kvbm_cli.bench.show.page import build_report

ARMS = ("baseline", "kvbm", "floor")
BLOCK = 16
PREFILL_MS_PER_TOKEN, LOAD_MS_PER_TOKEN, FIXED_MS, STEP_MS = 0.42, 0.021, 34.0, 21.0
HEADLINE = ("ttft_speedup", "ttft_speedup_paired", "share_of_possible_gain", "outputs_equal")
DEFINITION = ("name", "pressure", "g1_tokens", "workload", "interleaved", "pairs", "order")
PHASES = ("cold", "fill", "steady")
TIERS = ("g1", "g2", "g3", "g4", "computed")


def write_sample(
    directory: Path,
    *,
    workload: str = "conversations",
    pressures: tuple[float | None, ...] = (0.8, 1.2, 2.0),
    arms: tuple[str, ...] = ARMS,
    sessions: int = 12,
    turns: int = 6,
    pairs: int = 3,
    answer_tokens: int = 16,
    server_metrics: bool = True,
    seed: int = 1,
) -> dict[str, Any]:
    """Writes the directory and returns the content of its summary.json."""
    source = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    cells = []
    for pressure in pressures:
        name = workload if pressure is None else f"{workload}-x{pressure}"
        own: list[dict[str, Any]] = []
        for pair in range(1, pairs + 1):
            order = arms if pair % 2 else tuple(reversed(arms))
            for position, arm in enumerate(order, start=1):
                made = _records(source, name, arm, pair, pressure or 1.5, sessions, turns, answer_tokens)
                samples = _samples(made, arm)
                run = f"{name}.{pair}.{arm}"
                if server_metrics:
                    _write_lines(directory / "runs" / run / "server-metrics.jsonl", samples)
                runs.append(_run(name, arm, pair, position, made, samples if server_metrics else None))
                own += made
        records += own
        cells.append(_cell(name, workload, pressure, arms, pairs, sessions, turns, own, runs, server_metrics))
    summary = _summary(cells, arms)
    _write_lines(directory / "requests.jsonl", records)
    _write_lines(directory / "runs.jsonl", runs)
    write_json(directory / "plan.json", _plan(summary, cells, seed))
    write_json(directory / "summary.json", summary)
    return summary


def _plan(summary: dict[str, Any], cells: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    compared = summary.get("compared", {"measured": next(iter(summary["arms"])), "reference": None})
    return {
        "format": 2,
        "arms": summary["arms"],
        "measured": compared["measured"],
        "references": [compared["reference"]] if compared["reference"] else [],
        "floor": "floor" if "floor" in summary["arms"] else None,
        "cells": [{name: cell[name] for name in DEFINITION} for cell in cells],
        "seed": seed,
        "versions": summary["versions"],
        "profiles": {name: "5a1e" for name, arm in summary["arms"].items() if arm["profile"]},
        "digest": "5a1d",
    }


def report_of(directory: Path) -> Report:
    """What `kvbm bench` renders, with the summary in the directory."""
    opened = BenchDirectory.open(directory)
    return Report.of(opened, Results.read(opened), opened.read_json("summary.json"))


def build(directory: Path) -> Path:
    """Write report.html and return its path."""
    opened = BenchDirectory.open(directory)
    return build_report(opened, Results.read(opened), opened.read_json("summary.json"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _records(
    source: random.Random, cell: str, arm: str, pair: int, pressure: float, sessions: int, turns: int, answer: int
) -> list[dict[str, Any]]:
    rows = []
    for index in range(sessions * turns):
        turn, session = index // sessions + 1, index % sessions
        prompt = 300 + 700 * turn + 37 * session
        history = 0 if turn == 1 else (prompt - 700) // BLOCK * BLOCK
        tokens = _sources(source, arm, pressure, prompt, history)
        work = tokens["computed"] * PREFILL_MS_PER_TOKEN + tokens["g2"] * LOAD_MS_PER_TOKEN
        work += tokens["g3"] * LOAD_MS_PER_TOKEN * 3 + FIXED_MS
        late, queue = abs(source.gauss(0.4, 0.4)), max(0.0, source.gauss(9, 6))
        from_launch = work * math.exp(source.gauss(0, 0.09)) + queue
        intended = index * 900.0 + source.uniform(0, 90)
        gaps = [STEP_MS * math.exp(source.gauss(0, 0.12)) for _ in range(answer - 1)]
        intended, launched = round(intended, 3), round(intended + late, 3)
        first = round(launched + from_launch, 3)
        end = round(first + sum(gaps) + 0.5, 3)
        rows.append(
            {
                "run": f"{cell}.{pair}.{arm}",
                "arm": arm,
                "cell": cell,
                "pair": pair,
                "index": index,
                "session": session,
                "turn": turn,
                "status": "ok",
                "error": None,
                "http_status": 200,
                "phase": "cold" if turn == 1 else "fill" if turn == 2 else "steady",
                "intended_ms": intended,
                "launched_ms": launched,
                "first_token_ms": first,
                "first_text_ms": first,
                "last_token_ms": round(first + sum(gaps), 3),
                "end_ms": end,
                "token_gaps_ms": [round(gap, 3) for gap in gaps],
                "first_chunk_tokens": 1,
                "output_tokens": answer,
                "prompt_tokens": prompt,
                "cached_tokens": prompt - tokens["computed"],
                **{f"{tier}_tokens": tokens[tier] for tier in TIERS},
                "token_ids": list(range(answer)),
                "logprobs": [-0.5] * answer,
                "text": "",
                "finish_reason": "length",
                "ttft_ms": first - intended,
                "ttft_from_launch_ms": first - launched,
                "end_to_end_ms": end - intended,
                "lateness_ms": launched - intended,
                "tpot_ms": round(sum(gaps) / len(gaps), 3),
            }
        )
    return rows


def _sources(source: random.Random, arm: str, pressure: float, prompt: int, history: int) -> dict[str, int]:
    """Where the tokens of one prompt came from: all from G1 in the floor, by chance elsewhere."""
    tokens = dict.fromkeys(TIERS[:-1], 0)
    in_g1 = arm == "floor" or source.random() < 1 / pressure**2.2 - 0.15
    if history and in_g1:
        tokens["g1"] = history
    elif history and arm not in ("baseline", "floor"):
        from_disk = source.random() < max(0.0, pressure - 1.3) * 0.6
        kept = history // 3 // BLOCK * BLOCK
        tokens["g1"] = kept
        tokens["g3" if from_disk else "g2"] = history - kept
    return {**tokens, "computed": prompt - sum(tokens.values())}


def _samples(rows: list[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    kvbm = arm not in ("baseline", "floor")
    end_s = int(max(row["end_ms"] for row in rows) / 1000) + 2
    samples = []
    waiting = sorted(rows, key=lambda row: row["first_token_ms"], reverse=True)
    tokens, done = dict.fromkeys(TIERS, 0), 0
    for second in range(end_s):
        while waiting and waiting[-1]["first_token_ms"] <= second * 1000:
            row, done = waiting.pop(), done + 1
            tokens = {tier: amount + row[f"{tier}_tokens"] for tier, amount in tokens.items()}
        offloaded = tokens["computed"] * 1200 if kvbm else 0
        samples.append(
            {
                "t_ms": second * 1000.0,
                "prompt_tokens": tokens,
                "onboard": {"bytes": tokens["g2"] * 1200, "blocks": tokens["g2"] // BLOCK, "seconds": done * 0.01},
                "offload": {"bytes": offloaded, "blocks": offloaded // 19200, "seconds": done * 0.02},
                "disk": {"read_bytes": tokens["g3"] * 1200, "written_bytes": offloaded // 2},
                "evictions": max(0, (tokens["computed"] - 20000) // BLOCK) if arm != "floor" else 0,
                "running": 1,
                "waiting": 0,
                "kv_usage": min(1.0, tokens["computed"] / 30000),
                "rss_bytes": int((1.1 + (0.9 if kvbm else 0.0)) * 2**30) + second * 40960,
                "cpu_s": round(second * 1.3 + done * 0.05, 2),
                "gpu": [],
            }
        )
    return samples


def _run(
    cell: str, arm: str, pair: int, position: int, rows: list[dict[str, Any]], samples: list[dict[str, Any]] | None
) -> dict[str, Any]:
    return {
        "run": f"{cell}.{pair}.{arm}",
        "arm": arm,
        "cell": cell,
        "pair": pair,
        "position": position,
        "together": 1,
        "started_unix_s": 1_790_000_000.0 + pair * 1000 + position * 100,
        "startup_s": 4.2,
        "engine_ended": False,
        "duration_s": round(max(row["end_ms"] for row in rows) / 1000, 3),
        "client": {"cpu_share": 0.11, "loop_lag_p99_ms": 1.4, "lateness_p99_ms": 2.1, "workers": 1},
        "server": _server(samples or []),
    }


def _server(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """As of an engine without metrics if there are no samples."""
    if not samples:
        return {"samples": 0, "prompt_tokens": None, "gpu": [], "caveats": ["the engine has no metrics"], "peaks": {}}
    last = samples[-1]
    return {
        "samples": len(samples),
        "prompt_tokens": last["prompt_tokens"],
        "disk": last["disk"],
        "evictions": last["evictions"],
        "cpu_s": last["cpu_s"],
        "energy_j": None,
        "gpu": [],
        "caveats": [],
        "peaks": {"rss_bytes": max(sample["rss_bytes"] for sample in samples)},
    }


def _spread(values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)

    def at(share: float, least: int) -> float | None:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if len(ordered) >= least else None

    percentiles = {"p50": at(0.5, 5), "p90": at(0.9, 20), "p95": at(0.95, 72), "p99": at(0.99, 368)}
    return {**percentiles, "mean": round(statistics.fmean(ordered), 2) if ordered else None, "count": len(ordered)}


def _times(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{name: _spread([row[name] for row in rows]) for name in ("ttft_ms", "ttft_from_launch_ms", "end_to_end_ms")},
        "itl_ms": _spread([gap for row in rows for gap in row["token_gaps_ms"]]),
        "tpot_ms": _spread([row["tpot_ms"] for row in rows]),
    }


def _tokens(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {tier: sum(row[f"{tier}_tokens"] for row in rows) for tier in TIERS}


def _arm(rows: list[dict[str, Any]], run: dict[str, Any], turns: int) -> dict[str, Any]:
    steady = [row for row in rows if row["phase"] == "steady"]
    return {
        "requests": len(rows),
        "errors": 0,
        **_times(steady),
        "phases": {phase: _times([row for row in rows if row["phase"] == phase]) for phase in PHASES},
        "turns": [
            {
                "turn": turn,
                "requests": len(own),
                "errors": 0,
                **_times(own),
                "prompt_tokens": _tokens(own),
            }
            for turn in range(1, turns + 1)
            for own in [[row for row in rows if row["turn"] == turn]]
        ],
        "prompt_tokens": _tokens(rows),
        "throughput": {"requests_per_s": 1.1, "prompt_tokens_per_s": 2912.4, "output_tokens_per_s": 17.7},
        "goodput": {"slo": {"ttft_ms": 500}, "share": 0.82, "requests_per_s": 0.9},
        "utilisation": 0.61,
        "queue_wait_ms": 8.7,
        "duration_s": run["duration_s"],
        "runs": sorted({row["run"] for row in rows}),
        "prompt_tokens_by_usage": _tokens(rows),
        "prompt_tokens_by_metrics": run["server"]["prompt_tokens"],
        "startup_s": run["startup_s"],
        "engine_ended": False,
        "client": {
            "lateness_ms": _spread([row["lateness_ms"] for row in rows]),
            "cpu_share": 0.11,
            "loop_lag_p99_ms": 1.4,
        },
        "server": [run["server"]],
    }


def _cell(
    name: str,
    workload: str,
    pressure: float | None,
    arms: tuple[str, ...],
    pairs: int,
    sessions: int,
    turns: int,
    rows: list[dict[str, Any]],
    runs: list[dict[str, Any]],
    server_metrics: bool,
) -> dict[str, Any]:
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in arms}
    last_run = {run["arm"]: run for run in runs if run["cell"] == name}
    return {
        "name": name,
        "pressure": pressure,
        "working_set_tokens": 43_200,
        "g1_tokens": 19_200,
        "workload": {"name": workload, "kind": "conversations", "sessions": sessions, "turns": turns},
        "plan": {
            "digest": "9f1c0a7e",
            "requests": sessions * turns,
            "sessions": sessions,
            "turns": turns,
            "concurrency": None,
            "duration_s": 65.0,
            "primary": "steady",
            "interval_s": 0.9,
        },
        "interleaved": False,
        "pairs": pairs,
        "order": [
            {"pair": pair, "arms": [arm]}
            for pair in range(1, pairs + 1)
            for arm in (arms if pair % 2 else tuple(reversed(arms)))
        ],
        "answers": {},
        "pairs_done": pairs,
        "stopped_early": False,
        "arms": {arm: _arm(by_arm[arm], last_run[arm], turns) for arm in arms},
        "comparisons": [_comparison(by_arm, arm, "baseline", pairs) for arm in arms if arm not in ("baseline", "floor")]
        if "baseline" in arms
        else [],
        "caveats": [] if server_metrics else ["the server reports no counters: hits are from the answers"],
    }


def _comparison(by_arm: dict[str, list[dict[str, Any]]], measured: str, reference: str, pairs: int) -> dict[str, Any]:
    steady = {arm: [row for row in rows if row["phase"] == "steady"] for arm, rows in by_arm.items()}
    logs = [
        math.log(one["ttft_ms"] / other["ttft_ms"])
        for one, other in zip(steady[reference], steady[measured], strict=True)
    ]
    ratio, half = math.exp(statistics.fmean(logs)), 0.07
    paired = {"geometric_mean": round(ratio, 3), "interval_95": [round(ratio * (1 - half), 3), round(ratio * 1.075, 3)]}
    times = {arm: _spread([row["ttft_ms"] for row in rows]) for arm, rows in steady.items()}
    return {
        "measured": measured,
        "reference": reference,
        "verdict": "faster" if ratio > 1.05 else "same",
        "explanation": f"in steady state, the first token comes {ratio:.1f} times faster with {measured}, same outputs",
        "reasons": [],
        "hint": None,
        "ttft_speedup": round(times[reference]["p50"] / times[measured]["p50"], 3),
        "ttft_speedup_paired": {**paired, "covers_runs": pairs > 1, "pairs": len(logs), "sessions": 12, "runs": pairs},
        "ttft_percentiles": {
            name: {
                "measured": _estimate(times[measured][name]),
                "reference": _estimate(times[reference][name]),
                "difference": _difference(times[measured][name], times[reference][name]),
            }
            for name in ("p50", "p90")
            if times[measured][name] is not None
        },
        "noise": {"ratio": 1.01, "low": 0.97, "high": 1.04, "source": "baseline, pairs 1 and 2"},
        "share_of_possible_gain": {"value": 0.87, "interval_95": [0.81, 0.93], "is_noise": False},
        "outputs": {
            "compared": len(logs),
            "different": 0,
            "largest_logprob_difference": 0.0,
            "verdict": "equal",
            "reason": f"all {len(logs)} answers are equal",
            "requests_that_differ": [],
            "control": "two runs of baseline",
            "control_logprob": 0.0,
            "p_value": 1.0,
            "control_compared": len(logs),
            "control_different": 0,
        },
        "outputs_equal": True,
        "has_loads": any(row["g2_tokens"] for row in by_arm[measured]),
        "ttft_model": {
            "base_ms": 43.1,
            "load_ms": 2.2,
            "computed_ms_per_token": PREFILL_MS_PER_TOKEN,
            "g2_ms_per_token": LOAD_MS_PER_TOKEN,
            "g3_ms_per_token": None,
            "explained": 0.94,
            "request_count": sum(map(len, by_arm.values())),
        },
        "why_not": [{"cause": "working_set", "text": "the working set nearly fits into G1", "key": "tiers.device"}]
        if ratio < 1.6
        else [],
    }


def _estimate(value: float) -> dict[str, Any]:
    return {"value": value, "interval_95": [round(value * 0.96, 2), round(value * 1.05, 2)]}


def _difference(measured: float, reference: float) -> dict[str, Any]:
    difference = measured - reference
    return {"value": round(difference, 2), "interval_95": [round(difference * k, 2) for k in (1.12, 0.88)]}


def _summary(cells: list[dict[str, Any]], arms: tuple[str, ...]) -> dict[str, Any]:
    found = [comparison for cell in cells for comparison in cell["comparisons"]]
    best = found[-1] if found else {}
    kinds = {"baseline": "baseline", "kvbm": "kvbm", "floor": "floor"}
    return {
        "format": 2,
        "complete": True,
        "verdict": best.get("verdict", "invalid"),
        "reasons": [],
        "hint": None,
        "explanation": best.get("explanation", "one arm alone cannot be compared"),
        **({"compared": {role: best[role] for role in ("measured", "reference")}} if best else {}),
        **{key: best[key] for key in HEADLINE if key in best},
        "arms": {
            arm: {"kind": kinds.get(arm, "profile"), "profile": "demo", "url": None, "differences": {}} for arm in arms
        },
        "seed": 1,
        "digest": "5a1d",
        "cells": cells,
        "caveats": [
            "users take turns in a fixed order, which is the worst case for a G1 that is too small",
            "p99 requires 368 samples: it is not reported",
        ],
        "command": None,
        "machine": {
            "platform": "Linux-6.1-x86_64",
            "processor": "AMD EPYC 7B13",
            "cpu_count": 2,
            "memory": "16265012 kB",
            "load_average": 0.4,
            "time_unix_s": 1_790_000_000.0,
        },
        "versions": {"python": "3.11.7", "kvbm-cli": "0.1.0", "torch": "2.13.0", "vllm": None},
        "profile": {"name": "demo", "engine": {"kind": "embedded", "model": "tiny-llama-81m"}},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--pressures", type=float, nargs="*", default=(0.8, 1.2, 2.0))
    given = parser.parse_args()
    chosen = tuple(given.pressures) or (None,)
    write_sample(given.directory, sessions=given.sessions, turns=given.turns, pairs=given.pairs, pressures=chosen)
