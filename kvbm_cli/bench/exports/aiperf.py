"""`profile_export_aiperf.json` and `profile_export.jsonl` of aiperf 0.13.0, schema 1.4, from our records.

A request starts at its launch; its credit is issued at the intended launch. `effective_latency` therefore contains the
lateness of the client, and `request_latency` does not. Latencies end with the last token. `inter_token_latency` is one
value per request, the time per token after the first chunk; `inter_chunk_latency` has our gaps between tokens.
`adj_` metrics count a failed request as infinitely slow; values that are infinite are left out, as aiperf does.
`input_config`, metrics of the HTTP connection and of load over time are not written.

`replay_lines` writes the other direction: a trace of our requests, which aiperf replays.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.result.arm_result import ArmResult, Slo, launch_ms, output_tokens, started_unix_s, wait_ms
from kvbm_cli.bench.result.results import TIERS, RequestRecord
from kvbm_cli.bench.workload.plan import RESPONSES, Plan
from kvbm_cli.terminal.quantities import utc_time

SCHEMA_VERSION = "1.4"
AIPERF_VERSION = "0.13.0"  # whose formulas the values follow
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
ADJUSTED = ("time_to_first_token", "request_latency", "decode_duration", "inter_token_latency")

Value = dict[str, Any]


def aiperf_summary(result: ArmResult) -> dict[str, Any]:
    """profile_export_aiperf.json."""
    values = [request_metrics(record, result.slo) for record in result.succeeded]
    return {
        "schema_version": SCHEMA_VERSION,
        "aiperf_version": AIPERF_VERSION,
        "benchmark_id": _identifier(result),
        **_distributions(values),
        **_totals(result, values),
        **_adjusted(values, len(result.failed)),
        **_waiting(result),
        **_run(result),
    }


def aiperf_records(result: ArmResult) -> Iterator[dict[str, Any]]:
    """Yield the lines of profile_export.jsonl."""
    for record in result.requests:
        line = {"metadata": _metadata(result, record), "metrics": {}}
        if record.is_ok:
            line["metrics"] = request_metrics(record, result.slo)
        else:
            line["error"] = _error(record)
        yield line


def request_metrics(record: RequestRecord, slo: Slo | None) -> dict[str, Value]:
    """All metrics of a successful request; those without a value are left out."""
    metrics = {
        name: {"value": value, "unit": unit} for name, value, unit in _request_metrics(record) if value is not None
    }
    if slo is not None:
        metrics["good_request_count"] = {"value": int(_is_good(metrics, slo)), "unit": "requests"}
    return metrics


def _is_good(metrics: dict[str, Value], slo: Slo) -> bool:
    """aiperf's rule: a request without the metric of a limit is not good."""
    limits = {
        "time_to_first_token": slo.ttft_ms,
        "inter_token_latency": slo.tpot_ms,
        "request_latency": slo.e2e_ms,
    }
    return all(
        name in metrics and metrics[name]["value"] <= limit for name, limit in limits.items() if limit is not None
    )


def _request_metrics(record: RequestRecord) -> Iterator[tuple[str, Any, str]]:
    launch, first, last = launch_ms(record), record.first_token_ms, record.last_token_ms
    text, gaps = record.first_text_ms, record.token_gaps_ms
    prompt, tokens = record.prompt_tokens, output_tokens(record)
    ttft = None if first is None else first - launch
    latency = None if last is None else last - launch
    later = tokens - (record.first_chunk_tokens or 1)
    decode = None if latency is None or ttft is None else latency - ttft
    per_token = decode / later if decode is not None and later > 0 else None
    yield "request_latency", latency, "ms"
    yield "time_to_first_token", ttft, "ms"
    yield "time_to_first_output_token", None if text is None else text - launch, "ms"
    yield "time_to_second_token", gaps[0] if gaps else None, "ms"
    yield "inter_token_latency", per_token, "ms"
    yield "inter_chunk_latency", list(gaps) or None, "ms"
    yield "decode_duration", decode, "ms"
    yield "output_token_throughput_per_user", 1e3 / per_token if per_token else None, "tokens/sec/user"
    yield "e2e_output_token_throughput", tokens / latency * 1e3 if latency else None, "tokens/sec/user"
    yield "prefill_throughput_per_user", prompt / ttft * 1e3 if ttft and prompt is not None else None, "tokens/sec/user"
    yield "input_sequence_length", prompt, "tokens"
    yield "output_sequence_length", tokens, "tokens"
    # Without reasoning all tokens are output; how many belong to the reasoning, the server does not say.
    yield "output_token_count", tokens if text == first else None, "tokens"
    yield "usage_prompt_tokens", prompt, "tokens"
    yield "usage_completion_tokens", record.output_tokens, "tokens"
    yield "usage_total_tokens", None if prompt is None else prompt + tokens, "tokens"
    yield "usage_prompt_cache_read_tokens", record.cached_tokens, "tokens"
    for tier in TIERS:
        yield f"kvbm_{tier}_tokens", getattr(record, f"{tier}_tokens"), "tokens"


def _distributions(values: Sequence[dict[str, Value]]) -> dict[str, Value]:
    """Statistics of every metric that has a value for a request. Gaps of all requests count together."""
    found: dict[str, tuple[str, list[float]]] = {}
    for metrics in values:
        for name, metric in metrics.items():
            if name != "good_request_count":
                numbers = found.setdefault(name, (metric["unit"], []))[1]
                numbers.extend(metric["value"] if isinstance(metric["value"], list) else [metric["value"]])
    return {name: _describe(numbers, unit) for name, (unit, numbers) in found.items()}


def _describe(numbers: list[float], unit: str) -> Value:
    import numpy as np

    array = np.asarray(numbers, dtype=float)
    percentiles = np.percentile(array, PERCENTILES)
    return {
        "unit": unit,
        "avg": float(array.mean()),
        **{f"p{percent}": float(value) for percent, value in zip(PERCENTILES, percentiles, strict=True)},
        "min": float(array.min()),
        "max": float(array.max()),
        "std": float(array.std()),
        "count": len(array),
        "sum": float(array.sum()),
    }


def _totals(result: ArmResult, values: Sequence[dict[str, Value]]) -> dict[str, Value]:
    """Metrics with one value for the whole file."""
    duration_s, succeeded, failed = result.duration_s, len(values), len(result.failed)
    isl, osl = _sum(values, "input_sequence_length"), _sum(values, "output_sequence_length")
    prompt, cached = _sum(values, "usage_prompt_tokens"), _sum(values, "usage_prompt_cache_read_tokens")
    good = _sum(values, "good_request_count")
    found: dict[str, tuple[float | None, str]] = {
        "request_throughput": (succeeded / duration_s, "requests/sec"),
        "request_count": (succeeded, "requests"),
        "output_token_throughput": (_divided(osl, duration_s), "tokens/sec"),
        "input_token_throughput": (_divided(isl, duration_s), "tokens/sec"),
        "total_token_throughput": (None if isl is None else _divided(isl + (osl or 0), duration_s), "tokens/sec"),
        "goodput": (_divided(good, duration_s), "requests/sec"),
        "good_request_count": (good, "requests"),
        "good_request_fraction": (_divided(good, succeeded + failed), "ratio"),
        "total_output_tokens": (_sum(values, "output_token_count"), "tokens"),
        "benchmark_duration": (_observed_s(result), "sec"),
        "total_isl": (isl, "tokens"),
        "total_osl": (osl, "tokens"),
        "error_request_count": (failed or None, "requests"),
        "request_error_rate": (100 * failed / (succeeded + failed) if succeeded + failed else None, "%"),
        "completed_request_count": (succeeded + failed, "requests"),
        "total_usage_prompt_tokens": (prompt, "tokens"),
        "total_usage_completion_tokens": (_sum(values, "usage_completion_tokens"), "tokens"),
        "total_usage_total_tokens": (_sum(values, "usage_total_tokens"), "tokens"),
        "total_usage_prompt_cache_read_tokens": (cached, "tokens"),
        "overall_usage_prompt_cache_read_pct": (100 * cached / prompt if prompt and cached is not None else None, "%"),
    }
    return {name: {"unit": unit, "avg": float(value)} for name, (value, unit) in found.items() if value is not None}


def _sum(values: Sequence[dict[str, Value]], name: str) -> float | None:
    found = [metrics[name]["value"] for metrics in values if name in metrics]
    return float(sum(found)) if found else None


def _divided(value: float | None, by: float) -> float | None:
    return None if value is None or not by else value / by


def _observed_s(result: ArmResult) -> float | None:
    """From the first launch to the last token of a successful request, summed over the runs."""
    total = None
    for run in result.runs:
        answered = [record for record in run.records if record.is_ok]
        ends = [record.last_token_ms for record in answered if record.last_token_ms is not None]
        if ends:
            total = (total or 0.0) + (max(ends) - min(map(launch_ms, answered))) / 1e3
    return total


def _adjusted(values: Sequence[dict[str, Value]], failed: int) -> dict[str, Value]:
    """Latencies with failed requests as infinitely slow; nothing without a failed request."""
    import numpy as np

    adjusted = {}
    for name in ADJUSTED if failed else ():
        numbers = sorted(metrics[name]["value"] for metrics in values if name in metrics)
        if not numbers:
            continue
        array = np.asarray(numbers + [np.inf] * failed)
        percentiles = np.percentile(array, PERCENTILES, method="nearest")
        finite = {f"p{q}": float(value) for q, value in zip(PERCENTILES, percentiles, strict=True) if value < np.inf}
        adjusted[f"adj_{name}"] = {"unit": "ms", **finite, "min": numbers[0], "count": len(array)}
    return adjusted


def _waiting(result: ArmResult) -> dict[str, Value]:
    """Metrics from the intended launch, failed requests included."""
    due = [record for record in result.requests if record.intended_ms is not None]
    waited = [wait_ms(record) for record in due]
    effective = [record.end_ms - (record.intended_ms or 0.0) for record in due if record.end_ms is not None]
    if not effective:
        return {}
    return {"credit_to_start_latency": _describe(waited, "ms"), "effective_latency": _describe(effective, "ms")}


def _run(result: ArmResult) -> dict[str, Any]:
    start_s = result.started_unix_s
    last = result.runs[-1]
    counts = Counter(json.dumps(_error(record)) for record in result.failed)
    identifier = _identifier(result)
    seed = {} if result.seed is None else {"random_seed": result.seed}
    return {
        "run_info": {"benchmark_id": identifier, **seed, "trial": 0},
        "was_cancelled": False,
        "is_complete": True,
        "error_summary": [{"error_details": json.loads(error), "count": count} for error, count in counts.items()],
        "start_time": _time(start_s),
        "end_time": _time(started_unix_s(last) + last.facts["duration_s"]),
        "metadata": {"model": result.model, "variation_label": f"{result.cell.name}/{result.arm}"} | result.facts(),
    }


def _identifier(result: ArmResult) -> str:
    """Return an identifier, the same for the same runs."""
    return hashlib.sha256(json.dumps([result.arm, result.cell.name, result.started_unix_s]).encode()).hexdigest()[:12]


def _time(unix_s: float) -> str:
    return utc_time(unix_s).isoformat(timespec="microseconds")


def _error(record: RequestRecord) -> dict[str, Any]:
    code, message = record.http_status, record.error
    if code is None or code == HTTPStatus.OK:
        return {"type": "RequestError", "message": message}
    kind = HTTPStatus(code).phrase if code in HTTPStatus._value2member_map_ else "HTTPError"
    return {"code": code, "type": kind, "message": message}


def _metadata(result: ArmResult, record: RequestRecord) -> dict[str, Any]:
    correlation = f"{record.run}.session-{record.session}"
    issued = {} if record.intended_ms is None else {"credit_issued_ns": _ns(result, record, record.intended_ms)}
    return {
        "session_num": record.session,
        "x_request_id": f"{record.run}.{record.index}",
        "x_correlation_id": correlation,
        "conversation_id": f"session_{record.session:06d}",
        "turn_index": record.turn - 1,
        **issued,
        "request_start_ns": _ns(result, record, launch_ms(record)),
        "request_end_ns": _ns(result, record, launch_ms(record) if record.end_ms is None else record.end_ms),
        "worker_id": "kvbm",
        "record_processor_id": "kvbm",
        "benchmark_phase": "profiling",
        "phase_index": 0,
        "profiling_index": 0,
        "phase_name": "profiling",
        "phase_kind": "profiling",
        "was_cancelled": False,
        "context_overflow_skip": False,
        "agent_depth": 0,
        "root_correlation_id": correlation,
        "kvbm_phase": record.phase,
        "kvbm_pair": record.pair,
    }


def _ns(result: ArmResult, record: RequestRecord, stamp_ms: float) -> int:
    return int(result.unix_s(record, 0.0) * 1e9) + int(stamp_ms * 1e6)


def replay_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a trace with the times and whole bodies of the requests, in the order of the launches, for
    aiperf and for `kind: trace` (docs/reference/trace.md).

    A request in an open loop has a `timestamp` and is a session of its own. In a closed loop, `delay` counts from the
    end of the previous turn; of several requests that one waits for, that is the last. UsageError for bodies that a
    trace cannot have.
    """
    joined = {request.session for request in plan.requests if request.after}
    for request in plan.requests:
        if request.path == RESPONSES:
            raise UsageError(f"a trace has no bodies for `{RESPONSES}`")
        line: dict[str, Any] = {}
        if request.intended_s is not None:
            line["timestamp"] = round(request.intended_s * 1e3, 3)
        if request.session in joined:
            line["session_id"] = str(request.session)
        if request.after and request.turn > 1:
            line["delay"] = round(request.delay_s * 1e3, 3)
        if request.answer_tokens is not None:
            line["output_length"] = request.answer_tokens
        yield json.dumps({**line, "payload": json.loads(request.encode())}, separators=(",", ":")) + "\n"
