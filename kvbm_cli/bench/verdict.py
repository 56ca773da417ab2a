"""From evidence to one word. Pure: every threshold is here, and every sentence that a verdict is explained with.

wrong     kvbm changed an answer or its probabilities: nothing else matters        exit 12
invalid   the numbers do not measure the cache: errors, no transfer, a late client  exit 11
slower    the whole interval of the paired ratio lies below 1, by a margin          exit 10
faster    the whole interval lies above 1, by a margin                              exit 0
same      neither                                                                   exit 0
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbm_cli.bench.experiment import KVBM
from kvbm_cli.bench.statistics import PairedRatio


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
    """What a run may look like and still count. `margin` is the smallest difference worth a word.

    The client's lateness is part of every time to first token, in both arms alike: it may reach `lateness_share` of
    the baseline's or `lateness_ms`, whichever is more. A baseline that is busy or queues beyond `busy_*` is pointed
    out as a caveat; beyond `collapse_*` its numbers are those of a queue. Logprobs of the kvbm arm may differ from the
    recorded ones by `logprob`, or by `logprob_factor` times what they differ by without kvbm.
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
    """Everything that a verdict depends on. Times are of turns 2 and later; per-arm values by the arm's name."""

    request_count: int
    compared_count: int
    errors: Mapping[str, int] = field(default_factory=dict)
    different_answers: Mapping[str, int] = field(default_factory=dict)
    kvbm_logprob_difference: float | None = None
    other_logprob_difference: float | None = None
    baseline_ttft_ms: float | None = None
    kvbm_ttft_ms: float | None = None
    ratio: PairedRatio | None = None
    transfers_proven: bool = False
    lateness_p99_ms: Mapping[str, float] = field(default_factory=dict)
    client_cpu_share: Mapping[str, float] = field(default_factory=dict)
    utilisation: float | None = None
    queue_share: float | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """`sentence` explains the verdict; `reasons` are the findings behind `invalid` or `wrong`; `caveats` qualify;
    `hint` is what to do about a run that measured nothing."""

    verdict: Verdict
    sentence: str
    reasons: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    hint: str | None = None


DEFAULT_LIMITS = VerdictLimits()
LESS_LOAD = (
    "repeat it while nothing else runs on this machine; if that does not help, launch less often, by a smaller "
    "`schedule.target_utilisation` in the workload"
)


def judge(evidence: Evidence, limits: VerdictLimits = DEFAULT_LIMITS) -> Judgement:
    caveats = tuple(_caveats(evidence, limits))
    if wrong := _wrong(evidence, limits):
        return Judgement(Verdict.WRONG, f"the outputs are not equal: {'; '.join(wrong)}", tuple(wrong), caveats)
    if invalid := list(_invalid(evidence, limits)):
        hint = LESS_LOAD if _was_too_busy(evidence, limits) else None
        return Judgement(Verdict.INVALID, f"nothing was measured: {'; '.join(invalid)}", tuple(invalid), caveats, hint)
    verdict = _compare(evidence, limits)
    return Judgement(verdict, _sentence(verdict, evidence), (), caveats)


def _wrong(evidence: Evidence, limits: VerdictLimits) -> list[str]:
    reasons = []
    if evidence.different_answers.get(KVBM) and not _unsteady(evidence):
        count = f"{evidence.different_answers[KVBM]} of {evidence.request_count}"
        reasons.append(f"arm {KVBM} answered {count} requests differently from the recording")
    difference, other = evidence.kvbm_logprob_difference or 0.0, evidence.other_logprob_difference or 0.0
    if difference > max(limits.logprob, limits.logprob_factor * other):
        reasons.append(
            f"the same tokens had other probabilities with kvbm: logprobs differ by up to {difference:.2g}, without "
            f"kvbm by {other:.2g}; blocks with wrong content do that"
        )
    return reasons


def _unsteady(evidence: Evidence) -> dict[str, int]:
    """Arms without kvbm that differ from the recording. Such an engine answers a prompt that it computes otherwise than
    one that it has in its cache, as most do in bfloat16: other tokens with kvbm then prove nothing."""
    return {arm: count for arm, count in evidence.different_answers.items() if count and arm != KVBM}


def _invalid(evidence: Evidence, limits: VerdictLimits) -> list[str]:
    reasons = [
        f"{count} of {evidence.request_count} requests of arm {arm} failed"
        for arm, count in evidence.errors.items()
        if count
    ]
    if not evidence.compared_count:
        reasons.append("no answer could be compared")
    if not evidence.transfers_proven:
        reasons.append("no prompt token came from G2, so the block manager was not tested")
    if evidence.ratio is None:
        reasons.append("no request of turn 2 or later was answered in both arms")
    most_ms = _most_late_ms(evidence, limits)
    reasons += [
        f"the client launched late in arm {arm}: {late_ms:.0f} ms at p99, at most {most_ms:.0f} ms are allowed"
        for arm, late_ms in evidence.lateness_p99_ms.items()
        if late_ms > most_ms
    ]
    reasons += [
        f"the client was busy {share:.0%} of a core in arm {arm}, at most {limits.client_cpu_share:.0%} are allowed"
        for arm, share in evidence.client_cpu_share.items()
        if share > limits.client_cpu_share
    ]
    if (evidence.utilisation or 0.0) > limits.collapse_utilisation:
        reasons.append(f"the baseline was overloaded: busy {evidence.utilisation:.0%} of the time")
    if (evidence.queue_share or 0.0) > limits.collapse_queue_share:
        reasons.append(f"the baseline was overloaded: {evidence.queue_share:.0%} of its TTFT is waiting in its queue")
    return reasons


def _most_late_ms(evidence: Evidence, limits: VerdictLimits) -> float:
    return max(limits.lateness_ms, limits.lateness_share * (evidence.baseline_ttft_ms or 0.0))


def _is_overloaded(evidence: Evidence, limits: VerdictLimits) -> bool:
    """Whether the baseline's numbers are those of a queue."""
    return (evidence.utilisation or 0.0) > limits.collapse_utilisation or (
        evidence.queue_share or 0.0
    ) > limits.collapse_queue_share


def _was_too_busy(evidence: Evidence, limits: VerdictLimits) -> bool:
    """Whether the machine, by this load or another, had no room for the measurement."""
    return (
        _is_overloaded(evidence, limits)
        or max(evidence.lateness_p99_ms.values(), default=0.0) > _most_late_ms(evidence, limits)
        or max(evidence.client_cpu_share.values(), default=0.0) > limits.client_cpu_share
    )


def _caveats(evidence: Evidence, limits: VerdictLimits) -> list[str]:
    caveats = []
    if unsteady := _unsteady(evidence):
        others = " and ".join(f"{count} in arm {arm}" for arm, count in unsteady.items())
        caveats.append(
            f"of {evidence.request_count} answers, {evidence.different_answers.get(KVBM, 0)} with kvbm differ from the "
            f"recording, {others} without it: the engine itself does not repeat its answers, and only log-"
            "probabilities were compared; `dtype: float32` makes answers comparable"
        )
    if evidence.kvbm_logprob_difference is None and evidence.compared_count:
        caveats.append("the engine sends no logprobs, so only tokens were compared, which is a weak test")
    if _is_overloaded(evidence, limits):
        return caveats  # the verdict says so
    if limits.busy_utilisation < (evidence.utilisation or 0.0):
        caveats.append(f"the baseline was busy {evidence.utilisation:.0%} of the time: it may have queued")
    if limits.busy_queue_share < (evidence.queue_share or 0.0):
        caveats.append(f"{evidence.queue_share:.0%} of the baseline's TTFT is waiting in its queue, not computing")
    return caveats


def _compare(evidence: Evidence, limits: VerdictLimits) -> Verdict:
    ratio = evidence.ratio
    assert ratio is not None
    medians = _quotient(evidence)
    if ratio.low > 1 and min(ratio.ratio, medians) > 1 + limits.margin:
        return Verdict.FASTER
    if ratio.high < 1 and max(ratio.ratio, medians) < 1 / (1 + limits.margin):
        return Verdict.SLOWER
    return Verdict.SAME


def _quotient(evidence: Evidence) -> float:
    """Of the medians, which a few slow requests do not move."""
    assert evidence.baseline_ttft_ms is not None
    assert evidence.kvbm_ttft_ms is not None
    return evidence.baseline_ttft_ms / evidence.kvbm_ttft_ms


def _sentence(verdict: Verdict, evidence: Evidence) -> str:
    ratio = evidence.ratio
    assert ratio is not None
    assert evidence.baseline_ttft_ms is not None
    assert evidence.kvbm_ttft_ms is not None
    medians = f"the medians are {evidence.kvbm_ttft_ms:.0f} ms and {evidence.baseline_ttft_ms:.0f} ms"
    if verdict is Verdict.FASTER:
        times, interval = f"{ratio.ratio:.1f} times faster", f"{ratio.low:.1f} to {ratio.high:.1f}"
    elif verdict is Verdict.SLOWER:
        times, interval = f"{1 / ratio.ratio:.2f} times slower", f"{1 / ratio.high:.2f} to {1 / ratio.low:.2f}"
    else:
        times, interval = f"{ratio.ratio:.2f} times as fast", f"{ratio.low:.2f} to {ratio.high:.2f}"
    outputs = "" if any(evidence.different_answers.values()) else ", same outputs"
    return (
        f"from turn 2 on the first token comes {times} with kvbm{outputs} (geometric mean over pairs of equal "
        f"requests; 95 % interval {interval} over the users of this run, which says nothing of other runs); {medians}"
    )
