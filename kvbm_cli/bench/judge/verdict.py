"""Verdict: computes one of seven verdicts from the evidence. Pure; has every threshold and every explanation.

wrong         kvbm changed an answer or its log-probabilities; no other finding counts       exit 12
invalid       the run cannot be used: failed requests, a late client, an overloaded engine   exit 11
slower        the interval of the paired ratio is below 1, and the mean below 1/1.05         exit 10
faster        the interval is above 1, and the mean above 1.05                               exit 0
inconclusive  neither, and the interval reaches beyond 1/1.05 or 1.05                        exit 13
same          the interval is from 1/1.05 to 1.05 or narrower                                exit 0
measured      one server without a reference: there is nothing to compare                    exit 0
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbm_cli.bench.judge.correctness import OutputJudgement, OutputVerdict
from kvbm_cli.bench.judge.paired import MARGIN, MARGIN_OF_ONE_RUN, PairedRatio
from kvbm_cli.bench.result.results import percentile
from kvbm_cli.terminal.quantities import counted, shown_ms

LONGER_TIMES = "use a larger `time_scale` in the workload"  # of a trace, whose times are fixed
FEWER_REQUESTS = "lower `schedule.target_utilisation` in the workload, or give a lower `--rate`"


class Verdict(enum.StrEnum):
    WRONG = "wrong"
    INVALID = "invalid"
    SLOWER = "slower"
    FASTER = "faster"
    INCONCLUSIVE = "inconclusive"
    SAME = "same"
    MEASURED = "measured"

    @property
    def exit_code(self) -> int:
        codes = {Verdict.SLOWER: 10, Verdict.INVALID: 11, Verdict.WRONG: 12, Verdict.INCONCLUSIVE: 13}
        return codes.get(self, 0)

    @property
    def is_usable(self) -> bool:
        return self not in (Verdict.WRONG, Verdict.INVALID)


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of several comparisons: the first in the order of the class."""
    found = set(verdicts)
    return next((one for one in Verdict if one in found), Verdict.MEASURED)


def direction(ratio: PairedRatio, margin: float = MARGIN) -> Verdict:
    """Faster or slower if three conditions hold: 1 is outside the interval, the mean is beyond the margin, and the
    typical request changes in the same direction. The same if the whole interval is within the margin on both sides of
    1. Else the measurement is inconclusive.

    With one run, the margin is at least `MARGIN_OF_ONE_RUN`, because runs of equal engines differ.
    """
    least = margin if ratio.covers_runs else max(margin, MARGIN_OF_ONE_RUN)
    if ratio.low > 1 and ratio.ratio > 1 + least and ratio.typical > 1:
        return Verdict.FASTER
    if ratio.high < 1 and ratio.ratio < 1 / (1 + least) and ratio.typical < 1:
        return Verdict.SLOWER
    is_within = ratio.low >= 1 / (1 + margin) and ratio.high <= 1 + margin
    return Verdict.SAME if is_within else Verdict.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    """Limits of a valid run. `margin` is the smallest relative difference that counts as faster or slower,
    and the largest that an interval may hold for the same.

    The client's lateness adds to every time to first token, in all arms alike. In nine of ten requests it may reach
    `lateness_share` of the reference's TTFT or `lateness_ms`, whichever is more. A tenth may be later, with a caveat: a
    single stall of the machine does not spoil a run, and the interval includes it. A reference that is busy or queues
    beyond `busy_*` gets a caveat; beyond `collapse_*` its times are mostly queueing, and the run is invalid, unless
    sessions wait for their own answers (a closed loop), where a busy engine is the normal case.
    """

    margin: float = MARGIN
    lateness_ms: float = 25.0
    lateness_share: float = 0.1
    client_cpu_share: float = 0.7
    busy_utilisation: float = 0.7
    busy_queue_share: float = 0.2
    collapse_utilisation: float = 0.95
    collapse_queue_share: float = 0.5

    def most_late_ms(self, reference_ttft_ms: float | None) -> float:
        """Return the limit of the client's lateness at p90."""
        return max(self.lateness_ms, self.lateness_share * (reference_ttft_ms or 0.0))


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """The client in one run: the lateness of every launched request, and the busiest process's share of a core."""

    run: str
    lateness_ms: Sequence[float]
    cpu_share: float

    @property
    def lateness_p90_ms(self) -> float:
        return percentile(self.lateness_ms, 90) if self.lateness_ms else 0.0

    def late_words(self, most_ms: float) -> str | None:
        """Describe the requests that were launched later than `most_ms`; None without any."""
        late = [one for one in self.lateness_ms if one > most_ms]
        count = f"{len(late)} of {len(self.lateness_ms)} requests"
        return f"{count} more than {most_ms:.0f} ms late in {self.run}, by up to {max(late):.0f} ms" if late else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the verdict of one comparison depends on. Times are of the primary requests.

    `errors` has the failed requests of both arms and of the floor. `outputs` are the judgements of the arms that must
    answer as the reference does. `warm_starts` describes runs whose cache was not empty at the start. `has_loads` says
    whether the measured arm brought back any block, `None` if unknown.
    """

    measured: str
    reference: str
    request_count: int
    errors: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, OutputJudgement] = field(default_factory=dict)
    reference_ttft_ms: float | None = None
    measured_ttft_ms: float | None = None
    ratio: PairedRatio | None = None
    has_loads: bool | None = None
    clients: Sequence[ClientLoad] = ()
    warm_starts: Sequence[str] = ()
    utilisation: float | None = None
    queue_share: float | None = None
    is_closed_loop: bool = False
    is_trace: bool = False
    what: str = "the first token"


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


def less_load(evidence: Evidence) -> str:
    action = LONGER_TIMES if evidence.is_trace else FEWER_REQUESTS
    return f"repeat the run on an idle machine; if that does not help, {action}"


def judge(evidence: Evidence, limits: VerdictLimits = DEFAULT_LIMITS) -> Judgement:
    caveats = tuple(_caveats(evidence, limits))
    if wrong := _wrong(evidence):
        return Judgement(Verdict.WRONG, f"the outputs are not equal: {'; '.join(wrong)}", tuple(wrong), caveats)
    if invalid := _invalid(evidence, limits):
        hint = less_load(evidence) if _was_too_busy(evidence, limits) else None
        message = f"the result cannot be used: {'; '.join(invalid)}"
        return Judgement(Verdict.INVALID, message, tuple(invalid), caveats, hint)
    assert evidence.ratio is not None
    verdict = direction(evidence.ratio, limits.margin)
    if verdict is Verdict.FASTER and evidence.has_loads is False:
        reason = f"{evidence.measured} was faster although it loaded no block, so another cause made it faster"
        return Judgement(
            Verdict.INVALID, f"the result cannot be used: {reason}", (reason,), caveats, less_load(evidence)
        )
    return Judgement(verdict, _sentence(verdict, evidence), (), caveats)


def _wrong(evidence: Evidence) -> list[str]:
    return [
        f"arm {arm}: {output.reason}"
        for arm, output in evidence.outputs.items()
        if output.verdict is OutputVerdict.WRONG
    ]


def _invalid(evidence: Evidence, limits: VerdictLimits) -> list[str]:
    reference = evidence.reference
    reasons = [
        f"{count} of {evidence.request_count} requests of arm {arm} failed"
        for arm, count in evidence.errors.items()
        if count
    ]
    reasons += evidence.warm_starts
    if evidence.ratio is None:
        reasons.append("no request was answered in both arms")
    most_ms = limits.most_late_ms(evidence.reference_ttft_ms)
    reasons += [
        f"the client launched requests late in {one.run}: {one.lateness_p90_ms:.0f} ms at p90, the limit is "
        f"{most_ms:.0f} ms"
        for one in evidence.clients
        if one.lateness_p90_ms > most_ms
    ]
    reasons += [
        f"the client used {one.cpu_share:.0%} of a core in {one.run}, the limit is {limits.client_cpu_share:.0%}"
        for one in evidence.clients
        if one.cpu_share > limits.client_cpu_share
    ]
    if not evidence.is_closed_loop and (evidence.utilisation or 0.0) > limits.collapse_utilisation:
        reasons.append(f"arm {reference} was overloaded: busy {evidence.utilisation:.0%} of the time")
    if not evidence.is_closed_loop and (evidence.queue_share or 0.0) > limits.collapse_queue_share:
        reasons.append(f"arm {reference} was overloaded: {evidence.queue_share:.0%} of its TTFT was spent in its queue")
    return reasons


def _is_overloaded(evidence: Evidence, limits: VerdictLimits) -> bool:
    """Whether the reference's times are mostly queueing."""
    return (evidence.utilisation or 0.0) > limits.collapse_utilisation or (
        evidence.queue_share or 0.0
    ) > limits.collapse_queue_share


def _was_too_busy(evidence: Evidence, limits: VerdictLimits) -> bool:
    """Whether the machine had too little capacity left, because of this run's load or another's."""
    most_ms = limits.most_late_ms(evidence.reference_ttft_ms)
    return _is_overloaded(evidence, limits) or any(
        one.lateness_p90_ms > most_ms or one.cpu_share > limits.client_cpu_share for one in evidence.clients
    )


def _caveats(evidence: Evidence, limits: VerdictLimits) -> list[str]:
    caveats = [
        f"outputs of arm {arm}: {output.verdict.value}: {output.reason}"
        for arm, output in evidence.outputs.items()
        if output.verdict in (OutputVerdict.NOT_TESTED, OutputVerdict.NOT_DISTINGUISHABLE)
    ]
    caveats += [
        f"outputs of arm {arm}: the engine sends no logprobs, so only tokens were compared, which is a weak test"
        for arm, output in evidence.outputs.items()
        if output.verdict is OutputVerdict.EQUAL and output.evidence.measured.logprob is None
    ]
    if evidence.ratio is not None and evidence.ratio.run_count == 1:
        caveats.append(
            "every arm ran once, so the interval does not cover differences between runs; `--pairs 3` repeats the runs"
        )
    most_ms = limits.most_late_ms(evidence.reference_ttft_ms)
    caveats += [
        f"the client launched {words}; their times include it"
        for one in evidence.clients
        if one.lateness_p90_ms <= most_ms and (words := one.late_words(most_ms))
    ]
    if _is_overloaded(evidence, limits) and not evidence.is_closed_loop:
        return caveats  # the verdict reports the overload
    if limits.busy_utilisation < (evidence.utilisation or 0.0) and not evidence.is_closed_loop:
        caveats.append(
            f"arm {evidence.reference} was busy {evidence.utilisation:.0%} of the time: requests may have queued"
        )
    if limits.busy_queue_share < (evidence.queue_share or 0.0):
        caveats.append(f"{evidence.queue_share:.0%} of the TTFT in arm {evidence.reference} was spent in its queue")
    return caveats


def _sentence(verdict: Verdict, evidence: Evidence) -> str:
    ratio = evidence.ratio
    assert ratio is not None
    if verdict is Verdict.SLOWER:
        times, interval = f"{1 / ratio.ratio:.2f} times slower", f"{1 / ratio.high:.2f} to {1 / ratio.low:.2f}"
    elif verdict is Verdict.FASTER and ratio.ratio >= 1.95:
        times, interval = f"{ratio.ratio:.1f} times faster", f"{ratio.low:.1f} to {ratio.high:.1f}"
    elif verdict is Verdict.FASTER:
        times, interval = f"{ratio.ratio:.2f} times faster", f"{ratio.low:.2f} to {ratio.high:.2f}"
    else:
        times, interval = f"{ratio.ratio:.2f} times as fast", f"{ratio.low:.2f} to {ratio.high:.2f}"
    conjunction = "than" if verdict in (Verdict.SLOWER, Verdict.FASTER) else "as"
    outputs = _outputs_words(evidence)
    medians = ""
    if evidence.measured_ttft_ms is not None and evidence.reference_ttft_ms is not None:
        medians = f"; the medians are {shown_ms(evidence.measured_ttft_ms)} and {shown_ms(evidence.reference_ttft_ms)}"
    counts = f"{counted(ratio.request_count, 'pair')} of equal requests, {counted(ratio.run_count, 'run')}"
    found = f"95% interval {interval}" if math.isfinite(ratio.high) else "one session, so no interval"
    return (
        f"{evidence.what} comes {times} with {evidence.measured} {conjunction} with {evidence.reference}{outputs} "
        f"({found}, {counts}){medians}"
    )


def _outputs_words(evidence: Evidence) -> str:
    verdicts = {output.verdict for output in evidence.outputs.values()}
    return ", same outputs" if verdicts == {OutputVerdict.EQUAL} else ""
