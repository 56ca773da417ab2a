"""The JSON object of `vllm bench serve --save-result --save-detailed`, vLLM 0.32, from our records.

Values follow vLLM's definitions, so that a reader that computes them again from the lists gets the same: latencies run
from the launch to the last token, TPOT divides by the tokens minus one, percentiles interpolate linearly, standard
deviations are of the population. `client_queue_time` is the launch minus the intended launch. Lists have one
entry per request, failed ones included. With several runs, `duration` is the sum of their times under load, and the two
maxima are the largest of any run. vLLM writes 0 for statistics without a value, and so does this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvbm_cli.bench.result.arm_result import ArmResult, launch_ms, wait_ms
from kvbm_cli.bench.result.results import RequestRecord, sum_if_known
from kvbm_cli.bench.workload.slo import Slo
from kvbm_cli.terminal.quantities import utc_time

BENCH_SERVE = "vllm-bench.json"
PERCENTILES = (50, 90, 95, 99)


def bench_serve_result(result: ArmResult) -> dict[str, Any]:
    """Return the whole object; keys of vLLM in its order, then lists and facts whose names begin with `kvbm_`."""
    requests, succeeded, duration_s = result.requests, result.succeeded, result.duration_s
    input_tokens = sum_if_known(record.prompt_tokens for record in succeeded)
    tokens = sum(record.answer_token_count for record in succeeded)
    return {
        **_head(result),
        "duration": duration_s,
        "completed": len(succeeded),
        "failed": len(requests) - len(succeeded),
        "total_input_tokens": input_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(succeeded) / duration_s,
        "request_goodput": _good(slo, succeeded) / duration_s if (slo := result.cell.slo) else None,
        "output_throughput": tokens / duration_s,
        "total_token_throughput": None if input_tokens is None else (input_tokens + tokens) / duration_s,
        **_lists(result),
        "max_output_tokens_per_s": max((_most_tokens_per_s(records) for records in _runs(result)), default=0.0),
        "max_concurrent_requests": max((_most_in_flight(records) for records in _runs(result)), default=0),
        "rtfx": 0.0,
        **_statistics(succeeded),
        **result.facts(),
    }


def _head(result: ArmResult) -> dict[str, Any]:
    concurrency = result.concurrency
    return {
        "date": utc_time(result.started_unix_s).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": result.arm,
        "model_id": result.model,
        "tokenizer_id": result.model,
        "num_prompts": len(result.requests),
        "request_rate": "inf" if concurrency else result.offered_rate or "inf",
        "burstiness": result.burstiness,
        "max_concurrency": concurrency,
    }


def _lists(result: ArmResult) -> dict[str, list[Any]]:
    requests = result.requests
    origin = result.started_unix_s
    tokens = ("cached_tokens", "g1_tokens", "g2_tokens", "g3_tokens", "g4_tokens")
    names = {"run": "runs_of_requests", "pair": "pairs", "session": "sessions", "turn": "turns", "phase": "phases"}
    return {
        "input_lens": [record.prompt_tokens for record in requests],
        "output_lens": [record.answer_token_count if record.is_ok else 0 for record in requests],
        "ttfts": [ttft_s(record) if record.is_ok else 0.0 for record in requests],
        "itls": [gaps_s(record) if record.is_ok else [] for record in requests],
        "latencies": [latency_s(record) if record.is_ok else 0.0 for record in requests],
        "start_times": [result.unix_s(record, launch_ms(record)) - origin for record in requests],
        "queue_times": [wait_ms(record) / 1e3 for record in requests],
        "generated_texts": [record.text for record in requests],
        "errors": [record.error or "" for record in requests],
        **{f"kvbm_{names.get(key, key)}": [getattr(record, key) for record in requests] for key in (*names, *tokens)},
    }


def ttft_s(record: RequestRecord) -> float:
    """From the launch. 0 if no token arrived, as vLLM reports it."""
    return 0.0 if record.first_token_ms is None else (record.first_token_ms - launch_ms(record)) / 1e3


def latency_s(record: RequestRecord) -> float:
    """From the launch to the last token."""
    return 0.0 if record.last_token_ms is None else (record.last_token_ms - launch_ms(record)) / 1e3


def gaps_s(record: RequestRecord) -> list[float]:
    return [gap / 1e3 for gap in record.token_gaps_ms]


def tpot_s(record: RequestRecord) -> float | None:
    """`None` for an answer of one token."""
    later = record.answer_token_count - 1
    return (latency_s(record) - ttft_s(record)) / later if later > 0 else None


def _runs(result: ArmResult) -> list[list[RequestRecord]]:
    """Return the successful requests of each run that has any."""
    runs = ([record for record in run.records if record.is_ok] for run in result.runs)
    return [records for records in runs if records]


def _good(slo: Slo, succeeded: list[RequestRecord]) -> int:
    """Return the requests within the limits. Times count from the launch, as in vLLM."""
    return sum(
        slo.is_met(1e3 * ttft_s(record), 1e3 * (tpot_s(record) or 0.0), 1e3 * latency_s(record)) for record in succeeded
    )


def _statistics(succeeded: list[RequestRecord]) -> dict[str, float]:
    tpots = [tpot for record in succeeded if (tpot := tpot_s(record)) is not None]
    seconds = {
        "ttft": [ttft_s(record) for record in succeeded],
        "tpot": tpots,
        "itl": [gap for record in succeeded for gap in gaps_s(record)],
        "e2el": [latency_s(record) for record in succeeded],
        "client_queue_time": [wait_ms(record) / 1e3 for record in succeeded],
        "e2el_including_client_queue": [latency_s(record) + wait_ms(record) / 1e3 for record in succeeded],
    }
    return {key: value for name, values in seconds.items() for key, value in _describe(name, values)}


def _describe(name: str, values_s: list[float]) -> Iterable[tuple[str, float]]:
    import numpy as np

    values = np.asarray(values_s or [0.0]) * 1e3
    yield f"mean_{name}_ms", float(values.mean())
    yield f"median_{name}_ms", float(np.median(values))
    yield f"std_{name}_ms", float(values.std())
    for percent in PERCENTILES:
        yield f"p{percent}_{name}_ms", float(np.percentile(values, percent))


def _most_tokens_per_s(records: list[RequestRecord]) -> float:
    """Most tokens that arrived within one second; seconds count from the first launch."""
    import numpy as np

    origin_ms = min(launch_ms(record) for record in records)
    arrivals = [
        (record.first_token_ms - origin_ms + np.cumsum([0.0, *record.token_gaps_ms])) / 1e3
        for record in records
        if record.first_token_ms is not None
    ]
    return float(np.bincount(np.concatenate(arrivals).astype(int)).max()) if arrivals else 0.0


def _most_in_flight(records: list[RequestRecord]) -> int:
    """Most requests of which a part falls into the same second, which is what vLLM calls concurrent."""
    import numpy as np

    origin_ms = min(launch_ms(record) for record in records)
    starts_s = np.array([(launch_ms(record) - origin_ms) / 1e3 for record in records])
    ends_s = starts_s + [latency_s(record) for record in records]
    begun, ended = starts_s.astype(int), ends_s.astype(int) + 1
    changes = np.bincount(begun, minlength=ended.max() + 1) - np.bincount(ended)
    return int(changes.cumsum().max())
