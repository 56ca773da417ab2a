"""Verdict: computes one of five verdicts from the evidence. Pure; has every threshold and every explanation.

wrong     kvbm changed an answer or its log-probabilities; no other finding counts      exit 12
invalid   the run cannot be used: failed requests, no transfer, a late client          exit 11
slower    the whole interval of the paired ratio is below 1, by a margin               exit 10
faster    the whole interval is above 1, by a margin                                   exit 0
same      neither                                                                      exit 0
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbm_cli.bench.analysis.paired import PairedRatio, direction
from kvbm_cli.bench.comparison import AGAINST_BASELINE, Comparison


class Verdict(enum.StrEnum):
    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    INVALID = "invalid"
    WRONG = "wrong"

    @property
    def exit_code(self) -> int:
        return {Verdict.SLOWER: 10, Verdict.INVALID: 11, Verdict.WRONG: 12}.get(self, 0)


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    """Limits of a valid run. `margin` is the smallest relative difference that counts as faster or slower.

    The client's lateness adds to every time to first token, in all arms alike. It may reach `lateness_share` of the
    reference's TTFT or `lateness_ms`, whichever is more. A reference that is busy or queues beyond `busy_*` gets a
    caveat; beyond `collapse_*` its times are mostly queueing, and the run is invalid. Logprobs of an arm with kvbm may
    differ from the recorded ones by `logprob`, or by `logprob_factor` times the difference in the arms without kvbm.
    """

    margin: float = 0.05
    logprob: float = 1e-3
    logprob_factor: float = 10.0
    lateness_ms: float = 25.0
    lateness_share: float = 0.1
    client_cpu_share: float = 0.7
    busy_utilisation: float = 0.7
    busy_queue_share: float = 0.2
    collapse_utilisation: float = 0.95
    collapse_queue_share: float = 0.5


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a verdict depends on. Times are of turns 2 and later; mappings are by the name of the arm.

    `utilisation` and `queue_share` are the load of the reference.
    """

    request_count: int
    compared_count: int
    comparison: Comparison = AGAINST_BASELINE
    errors: Mapping[str, int] = field(default_factory=dict)
    different_answers: Mapping[str, int] = field(default_factory=dict)
    logprob_differences: Mapping[str, float | None] = field(default_factory=dict)
    reference_ttft_ms: float | None = None
    measured_ttft_ms: float | None = None
    ratio: PairedRatio | None = None
    transfers_proven: Mapping[str, bool] = field(default_factory=dict)
    lateness_p99_ms: Mapping[str, float] = field(default_factory=dict)
    client_cpu_share: Mapping[str, float] = field(default_factory=dict)
    utilisation: float | None = None
    queue_share: float | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """`sentence` explains the verdict. `reasons` are the findings behind `invalid` or `wrong`. `hint` says what to do
    about an invalid run."""

    verdict: Verdict
    sentence: str
    reasons: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    hint: str | None = None


DEFAULT_LIMITS = VerdictLimits()
LESS_LOAD = (
    "repeat the run on an idle machine; if that does not help, lower `schedule.target_utilisation` in the workload to "
    "launch requests less often"
)


def judge(evidence: Evidence, limits: VerdictLimits = DEFAULT_LIMITS) -> Judgement:
    caveats = tuple(_caveats(evidence, limits))
    if wrong := _wrong(evidence, limits):
        return Judgement(Verdict.WRONG, f"the outputs are not equal: {'; '.join(wrong)}", tuple(wrong), caveats)
    if invalid := list(_invalid(evidence, limits)):
        hint = LESS_LOAD if _was_too_busy(evidence, limits) else None
        return Judgement(
            Verdict.INVALID, f"the result cannot be used: {'; '.join(invalid)}", tuple(invalid), caveats, hint
        )
    verdict = _compare(evidence, limits)
    return Judgement(verdict, _sentence(verdict, evidence), (), caveats)


def _wrong(evidence: Evidence, limits: VerdictLimits) -> list[str]:
    reasons = []
    without_kvbm = _largest_logprob_difference_without_kvbm(evidence)
    for arm in evidence.comparison.judged_arms:
        if (count := evidence.different_answers.get(arm)) and not _unsteady(evidence):
            reasons.append(
                f"arm {arm} answered {count} of {evidence.request_count} requests differently from the recording"
            )
        difference = evidence.logprob_differences.get(arm) or 0.0
        if difference > max(limits.logprob, limits.logprob_factor * without_kvbm):
            reasons.append(
                f"arm {arm} computed different log-probabilities for equal tokens: they differ from the recording by "
                f"up to {difference:.2g}, without kvbm by {without_kvbm:.2g}; blocks with wrong content cause this"
            )
    return reasons


def _largest_logprob_difference_without_kvbm(evidence: Evidence) -> float:
    differences = evidence.logprob_differences.items()
    return max((value or 0.0 for arm, value in differences if not _has_kvbm(evidence, arm)), default=0.0)


def _has_kvbm(evidence: Evidence, arm: str) -> bool:
    return arm in evidence.comparison.arms_with_kvbm


def _unsteady(evidence: Evidence) -> dict[str, int]:
    """Arms without kvbm whose answers differ from the recording, with their count.

    Such an engine answers a cached prompt differently from a computed one, as most engines do in bfloat16. Different
    tokens with kvbm then prove nothing.
    """
    return {arm: count for arm, count in evidence.different_answers.items() if count and not _has_kvbm(evidence, arm)}


def _invalid(evidence: Evidence, limits: VerdictLimits) -> list[str]:
    reference = evidence.comparison.reference
    reasons = [
        f"{count} of {evidence.request_count} requests of arm {arm} failed"
        for arm, count in evidence.errors.items()
        if count
    ]
    if not evidence.compared_count:
        reasons.append("no answer could be compared")
    if not any(evidence.transfers_proven.values()):
        reasons.append("no prompt token came from G2, so the block manager was not tested")
    if evidence.ratio is None:
        reasons.append("no request of turn 2 or later was answered in both arms")
    most_ms = _most_late_ms(evidence, limits)
    reasons += [
        f"the client launched requests late in arm {arm}: {late_ms:.0f} ms at p99, the limit is {most_ms:.0f} ms"
        for arm, late_ms in evidence.lateness_p99_ms.items()
        if late_ms > most_ms
    ]
    reasons += [
        f"the client used {share:.0%} of a core in arm {arm}, the limit is {limits.client_cpu_share:.0%}"
        for arm, share in evidence.client_cpu_share.items()
        if share > limits.client_cpu_share
    ]
    if (evidence.utilisation or 0.0) > limits.collapse_utilisation:
        reasons.append(f"arm {reference} was overloaded: busy {evidence.utilisation:.0%} of the time")
    if (evidence.queue_share or 0.0) > limits.collapse_queue_share:
        reasons.append(f"arm {reference} was overloaded: {evidence.queue_share:.0%} of its TTFT was spent in its queue")
    return reasons


def _most_late_ms(evidence: Evidence, limits: VerdictLimits) -> float:
    return max(limits.lateness_ms, limits.lateness_share * (evidence.reference_ttft_ms or 0.0))


def _is_overloaded(evidence: Evidence, limits: VerdictLimits) -> bool:
    """Whether the reference's times are mostly queueing."""
    return (evidence.utilisation or 0.0) > limits.collapse_utilisation or (
        evidence.queue_share or 0.0
    ) > limits.collapse_queue_share


def _was_too_busy(evidence: Evidence, limits: VerdictLimits) -> bool:
    """Whether the machine had too little capacity left, because of this run's load or another's."""
    return (
        _is_overloaded(evidence, limits)
        or max(evidence.lateness_p99_ms.values(), default=0.0) > _most_late_ms(evidence, limits)
        or max(evidence.client_cpu_share.values(), default=0.0) > limits.client_cpu_share
    )


def _caveats(evidence: Evidence, limits: VerdictLimits) -> list[str]:
    comparison, caveats = evidence.comparison, []
    if unsteady := _unsteady(evidence):
        with_kvbm = " and ".join(
            f"{evidence.different_answers.get(arm, 0)} in arm {arm}" for arm in comparison.arms_with_kvbm
        )
        without_kvbm = " and ".join(f"{count} in arm {arm} without kvbm" for arm, count in unsteady.items())
        caveats.append(
            f"of {evidence.request_count} answers, {with_kvbm} and {without_kvbm} differ from the recording: the "
            "engine does not repeat its own answers, so only log-probabilities were compared; `dtype: float32` makes "
            "answers comparable"
        )
    if comparison.engine_differences:
        caveats.append(_other_engine(evidence))
    if evidence.logprob_differences.get(comparison.measured) is None and evidence.compared_count:
        caveats.append("the engine sends no logprobs, so only tokens were compared, which is a weak test")
    caveats += [
        f"no prompt token came from G2 in arm {arm}"
        for arm, is_proven in evidence.transfers_proven.items()
        if not is_proven and any(evidence.transfers_proven.values())
    ]
    if _is_overloaded(evidence, limits):
        return caveats  # the verdict reports the overload
    if limits.busy_utilisation < (evidence.utilisation or 0.0):
        caveats.append(
            f"arm {comparison.reference} was busy {evidence.utilisation:.0%} of the time: requests may have queued"
        )
    if limits.busy_queue_share < (evidence.queue_share or 0.0):
        caveats.append(f"{evidence.queue_share:.0%} of the TTFT in arm {comparison.reference} was spent in its queue")
    return caveats


def _other_engine(evidence: Evidence) -> str:
    comparison = evidence.comparison
    keys = ", ".join(f"`{key}`" for key in comparison.engine_differences)
    count = evidence.different_answers.get(comparison.reference, 0)
    return (
        f"the engines of {comparison.measured} and {comparison.reference} differ in {keys}; the answers of arm "
        f"{comparison.reference} were not compared, {count} of {evidence.request_count} differ from the recording"
    )


def _compare(evidence: Evidence, limits: VerdictLimits) -> Verdict:
    assert evidence.ratio is not None
    return Verdict(direction(evidence.ratio, limits.margin))


def _sentence(verdict: Verdict, evidence: Evidence) -> str:
    ratio, comparison = evidence.ratio, evidence.comparison
    assert ratio is not None
    assert evidence.reference_ttft_ms is not None
    assert evidence.measured_ttft_ms is not None
    if verdict is Verdict.FASTER:
        times, interval = f"{ratio.ratio:.1f} times faster", f"{ratio.low:.1f} to {ratio.high:.1f}"
    elif verdict is Verdict.SLOWER:
        times, interval = f"{1 / ratio.ratio:.2f} times slower", f"{1 / ratio.high:.2f} to {1 / ratio.low:.2f}"
    else:
        times, interval = f"{ratio.ratio:.2f} times as fast", f"{ratio.low:.2f} to {ratio.high:.2f}"
    where = f"with {comparison.measured}"
    if comparison.is_of_profiles:
        where += f" {'as' if verdict is Verdict.SAME else 'than'} with {comparison.reference}"
    outputs = "" if any(evidence.different_answers.values()) else ", same outputs"
    return (
        f"from turn 2 on, the first token comes {times} {where}{outputs} (geometric mean over pairs of equal requests; "
        f"95% interval {interval} {_scope(ratio)}); the medians are {evidence.measured_ttft_ms:.0f} ms and "
        f"{evidence.reference_ttft_ms:.0f} ms"
    )


def _scope(ratio: PairedRatio) -> str:
    if ratio.covers_runs:
        return f"over {ratio.run_count} runs and their {ratio.session_count} users"
    return "over the users of this run, which does not cover differences between runs"
