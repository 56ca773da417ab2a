"""Computes summary.json from records and metrics. Pure: equal records give an equal summary.

`ttft_ms`, `itl_ms` and `end_to_end_ms` of an arm cover turns 2 and later, which a cache can speed up. `ttft_speedup` is
the ratio of two such medians. `turns` has every turn. Token counts cover all requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from kvbm_cli.bench.analysis.correctness import Answer, OutputDifference, compare_answers
from kvbm_cli.bench.analysis.paired import PairedRatio, paired_ratio
from kvbm_cli.bench.analysis.statistics import busy_share, percentile
from kvbm_cli.bench.comparison import FLOOR, Comparison
from kvbm_cli.bench.experiment import ArmResult, Experiment
from kvbm_cli.bench.request_record import RequestRecord
from kvbm_cli.bench.schedule import Plan
from kvbm_cli.bench.verdict import DEFAULT_LIMITS, Evidence, Judgement, Verdict, VerdictLimits, judge

FORMAT = 1
UNMEASURED = (Verdict.INVALID, Verdict.WRONG)
FEW_SAMPLES = 100
ONBOARDED_BLOCKS = "kvbm_onboard_blocks_h2d"
TIERS = ("g1", "g2", "computed")
DIGITS = 4


def summarise(
    experiment: Experiment,
    *,
    surroundings: dict[str, Any],
    caveats: Sequence[str] = (),
    limits: VerdictLimits = DEFAULT_LIMITS,
) -> dict[str, Any]:
    """The content of summary.json. `surroundings` (machine, versions, profile) is copied into it unchanged."""
    plan, comparison = experiment.plan, experiment.comparison
    measured, reference = comparison.measured, comparison.reference
    results = {name: experiment.arms[name] for name in comparison.arms}
    arms = {name: _arm(plan, result) for name, result in results.items()}
    outputs = {name: _compare_outputs(plan, result.records) for name, result in results.items()}
    ratio = paired_ratio({1: _pairs(results[reference].records, results[measured].records)})
    p50 = {name: arm["ttft_ms"]["p50"] for name, arm in arms.items()}
    transfers = {name: _transfers(arms[name]) for name in comparison.arms_with_kvbm}
    evidence = Evidence(
        comparison=comparison,
        request_count=len(plan.requests),
        compared_count=outputs[measured].compared_count,
        errors={name: arm["errors"] for name, arm in arms.items()},
        different_answers={name: difference.different_count for name, difference in outputs.items()},
        logprob_differences={name: difference.logprob for name, difference in outputs.items()},
        reference_ttft_ms=p50[reference],
        measured_ttft_ms=p50[measured],
        ratio=ratio,
        transfers_proven={name: found["proven"] for name, found in transfers.items()},
        lateness_p99_ms={name: arm["client"]["lateness_ms"]["p99"] or 0.0 for name, arm in arms.items()},
        client_cpu_share={name: arm["client"]["cpu_share"] for name, arm in arms.items()},
        utilisation=arms[reference]["utilisation"],
        queue_share=arms[reference]["queue_share_of_ttft"],
    )
    judgement = judge(evidence, limits)
    has_gain = judgement.verdict not in UNMEASURED and not comparison.is_of_profiles
    share = _share_of_gain(p50[reference], p50[measured], p50[FLOOR]) if has_gain else None
    result = {
        "format": FORMAT,
        "complete": True,
        **_verdict(judgement),
        "compared": {"measured": measured, "reference": reference},
        "ttft_speedup": _quotient(p50[reference], p50[measured]),
        "ttft_speedup_paired": _ratio(ratio),
        "kvbm_over_floor": _quotient(p50[measured], p50[FLOOR]),
        "share_of_possible_gain": share,
        "share_of_possible_gain_is_noise": share is not None and share > 1,
        "outputs_equal": _are_equal(evidence, judgement),
        "different_answers": {
            name: [list(one.key) for one in difference.differences] for name, difference in outputs.items()
        },
        "largest_logprob_difference": {name: difference.logprob for name, difference in outputs.items()},
        "transfers": transfers[measured],
        "arms": arms,
        "caveats": [*judgement.caveats, *caveats, *_caveats(plan, comparison, arms)],
        "workload": plan.workload.model_dump(),
        "plan": {"digest": plan.digest, "interval_s": plan.interval_s, "duration_s": plan.duration_s},
        **surroundings,
    }
    rounded = _rounded(result)
    assert isinstance(rounded, dict)
    return rounded


def _compare_outputs(plan: Plan, records: Sequence[RequestRecord]) -> OutputDifference:
    """Compare all complete answers of an arm with the recorded ones."""
    return compare_answers(
        {request.key: Answer(request.answer.token_ids, request.answer.logprobs) for request in plan.requests},
        {record.key: Answer(tuple(record.token_ids), tuple(record.logprobs)) for record in records if record.is_ok},
    )


def _are_equal(evidence: Evidence, judgement: Judgement) -> bool:
    differs = (
        any(evidence.different_answers[name] for name in evidence.comparison.judged_arms)
        or judgement.verdict is Verdict.WRONG
    )
    return evidence.compared_count > 0 and not differs


def interrupted_summary(reason: str, surroundings: dict[str, Any]) -> dict[str, Any]:
    """The summary of an incomplete run."""
    return {
        "format": FORMAT,
        "complete": False,
        "verdict": "invalid",
        "explanation": reason,
        "reasons": [reason],
        "hint": None,
        "ttft_speedup": None,
        "outputs_equal": None,
        "arms": {},
        **surroundings,
    }


def _verdict(judgement: Judgement) -> dict[str, Any]:
    return {
        "verdict": judgement.verdict.value,
        "explanation": judgement.sentence,
        "reasons": list(judgement.reasons),
        "hint": judgement.hint,
    }


def _arm(plan: Plan, arm: ArmResult) -> dict[str, Any]:
    records = arm.records
    answered = [record for record in records if record.is_ok]
    later = [record for record in answered if record.turn > 1]
    by_usage = _tokens(answered)
    by_metrics = arm.metrics.prompt_tokens_by_source() if arm.metrics else None
    queue_wait_ms = arm.metrics.queue_wait_ms() if arm.metrics else None
    ttft_all = _spread(_values(record.ttft_ms for record in answered))
    return {
        "requests": len(records),
        "errors": len(records) - len(answered),
        **_times(later),
        "ttft_ms_all_turns": ttft_all,
        "ttft_ms_from_launch": _spread(_values(record.ttft_from_launch_ms for record in later)),
        "prompt_tokens": by_usage if None not in by_usage.values() else by_metrics or by_usage,
        "prompt_tokens_by_usage": by_usage,
        "prompt_tokens_by_metrics": by_metrics,
        "turns": [
            _turn(turn, [record for record in records if record.turn == turn])
            for turn in range(1, plan.workload.turns + 1)
        ],
        "throughput": _throughput(answered),
        "utilisation": _utilisation(records),
        "queue_wait_ms": queue_wait_ms,
        "queue_share_of_ttft": _quotient(queue_wait_ms, ttft_all["mean"]),
        "client": {
            "lateness_ms": _spread(_values(record.lateness_ms for record in records)),
            "cpu_share": arm.client_cpu_share,
        },
        "engine": {**_engine(arm), "startup_s": arm.startup_s, "ended_early": arm.engine_ended},
        "kvbm_counters": arm.metrics.kvbm_counters() if arm.metrics else {},
        "started_unix_s": arm.started_unix_s,
        "duration_s": arm.duration_s,
    }


def _turn(turn: int, records: list[RequestRecord]) -> dict[str, Any]:
    answered = [record for record in records if record.is_ok]
    return {
        "turn": turn,
        "requests": len(records),
        "errors": len(records) - len(answered),
        **_times(answered),
        "throughput": _throughput(answered),
        "prompt_tokens": _tokens(answered),
    }


def _times(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "ttft_ms": _spread(_values(record.ttft_ms for record in records)),
        "itl_ms": _spread([gap for record in records for gap in record.token_gaps_ms]),
        "end_to_end_ms": _spread(_values(record.end_to_end_ms for record in records)),
    }


def _values(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 and the mean, each `None` without values. Few values give p99 close to the maximum."""
    percentiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {**percentiles, "mean": sum(values) / len(values) if values else None}


def _tokens(records: Sequence[RequestRecord]) -> dict[str, int | None]:
    """Prompt tokens by source, from the usage of the answers; `None` if an answer does not report one."""
    return {
        "g1": _sum_if_known(record.g1_tokens for record in records),
        "g2": _sum_if_known(record.g2_tokens for record in records),
        "computed": _sum_if_known(record.computed_tokens for record in records),
    }


def _sum_if_known(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return sum(count for count in known if count is not None) if known and None not in known else None


def _throughput(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Rates from the first launch to the last end. The fixed launch times of the schedule limit all of them."""
    starts, ends = _values(record.launched_ms for record in records), _values(record.end_ms for record in records)
    span_s = (max(ends) - min(starts)) / 1e3 if starts and ends else 0.0
    prompt_tokens = sum(_values(record.prompt_tokens for record in records))
    return {
        "requests_per_s": _quotient(len(records), span_s),
        "prompt_tokens_per_s": _quotient(prompt_tokens, span_s),
        "output_tokens_per_s": _quotient(sum(len(record.token_ids) for record in records), span_s),
    }


def _utilisation(records: Sequence[RequestRecord]) -> float:
    """Share of the time from the first launch to the last end in which at least one request was in flight."""
    intervals = [
        (record.launched_ms, record.end_ms)
        for record in records
        if record.launched_ms is not None and record.end_ms is not None
    ]
    if not intervals:
        return 0.0
    return busy_share(intervals, min(start for start, _ in intervals), max(end for _, end in intervals))


def _engine(arm: ArmResult) -> dict[str, int | None]:
    labels = arm.metrics.after.labels_of("vllm:cache_config_info") if arm.metrics else {}
    block_size, blocks = labels.get("block_size"), labels.get("num_gpu_blocks")
    return {"block_size": int(block_size) if block_size else None, "g1_blocks": int(blocks) if blocks else None}


def _pairs(first: Sequence[RequestRecord], second: Sequence[RequestRecord]) -> dict[int, list[tuple[float, float]]]:
    """Times to first token in both arms, by user, of every request of turn 2 or later that both answered."""
    others = {record.key: record.ttft_ms for record in second if record.is_ok}
    pairs: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for record in first:
        other_ms = others.get(record.key)
        if record.turn > 1 and record.is_ok and record.ttft_ms is not None and other_ms is not None:
            pairs[record.user].append((record.ttft_ms, other_ms))
    return pairs


def _transfers(kvbm: dict[str, Any]) -> dict[str, Any]:
    """Evidence that blocks came back from G2: the engine's token counts or kvbm's block counter."""
    tokens = max((kvbm[key] or {}).get("g2") or 0 for key in ("prompt_tokens", "prompt_tokens_by_metrics"))
    blocks = kvbm["kvbm_counters"].get(ONBOARDED_BLOCKS, 0)
    return {"proven": max(tokens, blocks) > 0, "g2_tokens": tokens, "counters": kvbm["kvbm_counters"]}


def _ratio(ratio: PairedRatio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    return {
        "geometric_mean": ratio.ratio,
        "interval_95": [ratio.low, ratio.high] if ratio.session_count > 1 else None,
        "pairs": ratio.request_count,
        "users": ratio.session_count,
    }


def _quotient(dividend: float | None, divisor: float | None) -> float | None:
    return dividend / divisor if dividend is not None and divisor else None


def _share_of_gain(baseline: float | None, kvbm: float | None, floor: float | None) -> float | None:
    """The time that kvbm saves over the time that the all-hit floor saves. Above 1, the difference is noise: the floor
    is the lower limit."""
    if baseline is None or kvbm is None or floor is None or baseline <= floor:
        return None
    return (baseline - kvbm) / (baseline - floor)


def _caveats(plan: Plan, comparison: Comparison, arms: dict[str, dict[str, Any]]) -> list[str]:
    workload = plan.workload
    caveats = []
    engine = arms[comparison.reference]["engine"]
    blocks, block_size = engine["g1_blocks"], engine["block_size"]
    if blocks and block_size and blocks * block_size >= workload.working_set_tokens:
        caveats.append(
            f"the working set of {workload.working_set_tokens} tokens fits into G1 ({blocks * block_size} tokens): "
            "kvbm cannot speed it up"
        )
    if workload.answer_tokens == 1:
        caveats.append("with answers of one token, the cost of offloading during generation is not visible")
    if workload.users > 1:
        caveats.append("users take turns in a fixed order, which is the worst case for a G1 that is too small")
    samples = workload.users * (workload.turns - 1)
    if samples < FEW_SAMPLES:
        caveats.append(f"p99 is over {samples} requests, so it is close to the maximum")
    if any(arm["prompt_tokens_by_usage"]["g1"] is None for arm in arms.values()):
        caveats.append(
            "the engine does not report per request which tier cached tokens came from: G1 and G2 are known per arm, "
            "from its metrics, and not per turn"
        )
    caveats += [
        f"arm {name}: usage and /metrics disagree on where prompt tokens came from"
        for name, arm in arms.items()
        if _disagree(arm["prompt_tokens_by_usage"], arm["prompt_tokens_by_metrics"])
    ]
    return caveats


def _disagree(by_usage: dict[str, int | None], by_metrics: dict[str, int] | None) -> bool:
    """Whether a count that both report differs."""
    return by_metrics is not None and any(by_usage[tier] not in (None, by_metrics[tier]) for tier in TIERS)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
