"""Compares the measured arm with one reference in one cell: paired ratio, percentiles, noise, outputs, verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from kvbm_cli.bench.judge.answers import ArmAnswers, transfers_of, warm_start
from kvbm_cli.bench.judge.correctness import OutputVerdict
from kvbm_cli.bench.judge.estimates import (
    PercentileComparison,
    ShareOfGain,
    TtftModel,
    compare_percentiles,
    fit_ttft,
    share_of_possible_gain,
)
from kvbm_cli.bench.judge.paired import Noise, PairedRatio, busy_share, is_tight, noise_of, paired_ratio
from kvbm_cli.bench.judge.verdict import ClientLoad, Evidence, Judgement, VerdictLimits, judge
from kvbm_cli.bench.result.results import ALL, CellResult, Measurement, Results
from kvbm_cli.bench.workload.script import Phase

Samples = dict[int, dict[int, list[float]]]
Pairs = dict[int, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Compared:
    """One comparison with everything that is printed of it."""

    cell: CellResult
    measured: str
    reference: str
    judgement: Judgement
    ratio: PairedRatio | None
    medians_ms: tuple[float | None, float | None]
    percentiles: dict[int, PercentileComparison | None]
    noise: Noise | None
    share: ShareOfGain | None
    ttft_model: TtftModel | str
    answers: dict[str, ArmAnswers]
    has_loads: bool | None

    @property
    def outputs_equal(self) -> bool | None:
        """`None` if it was not tested."""
        found = self.answers[self.measured].judgement
        if found is None or found.verdict is OutputVerdict.NOT_TESTED:
            return None
        return found.verdict is not OutputVerdict.WRONG

    @property
    def ttft_speedup(self) -> float | None:
        measured, reference = self.medians_ms
        return reference / measured if measured and reference is not None else None

    def headline(self) -> dict[str, Any]:
        names = ("ttft_speedup", "ttft_speedup_paired", "outputs_equal", "share_of_possible_gain")
        data = self.to_json()
        return {
            "compared": {"measured": self.measured, "reference": self.reference},
            **{name: data[name] for name in names},
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "measured": self.measured,
            "reference": self.reference,
            "verdict": self.judgement.verdict.value,
            "explanation": self.judgement.sentence,
            "reasons": list(self.judgement.reasons),
            "hint": self.judgement.hint,
            "ttft_speedup": self.ttft_speedup,
            "ttft_speedup_paired": ratio_data(self.ratio),
            "ttft_percentiles": {f"p{percent}": one and one.to_json() for percent, one in self.percentiles.items()},
            "noise": self.noise and asdict(self.noise),
            "share_of_possible_gain": self.share.to_json() if self.share and self.judgement.verdict.is_usable else None,
            "ttft_model": {"reason": model} if isinstance(model := self.ttft_model, str) else model.to_json(),
            "outputs_equal": self.outputs_equal,
            "outputs": self.answers[self.measured].to_json(),
            "has_loads": self.has_loads,
        }


def compare(
    results: Results, cell: CellResult, reference: str, answers: dict[str, ArmAnswers], limits: VerdictLimits
) -> Compared:
    """`answers` has every arm of the cell."""
    measured: str = results.plan["measured"]
    one, other = cell.of_arm(reference), cell.of_arm(measured)
    ratio = paired_ratio(pairs_of(cell, one, other))
    deviation = ratio.run_deviation if ratio else None
    samples = {name: _samples(cell, runs) for name, runs in ((reference, one), (measured, other))}
    measured_ms, reference_ms = cell.median_ms(measured), cell.median_ms(reference)
    floor = results.plan["floor"]
    about = results.arms[reference]
    is_without_kvbm = about["kind"] == "baseline" and not about["differences"]  # else a cache of its own may be slower
    share = None
    if is_without_kvbm and floor and (of_floor := cell.of_arm(floor)):
        floors = _samples(cell, of_floor)
        share = share_of_possible_gain(samples[reference], samples[measured], floors, run_deviation=deviation)
    has_loads = _has_loads(other, is_known=results.arms[measured]["kind"] != "url")
    judged = (measured, reference, *([floor] if floor else ()))
    evidence = Evidence(
        measured=measured,
        reference=reference,
        request_count=max((len(run.records) for run in cell.runs), default=0) * cell.pairs_done,
        errors={name: sum(not record.is_ok for run in cell.of_arm(name) for record in run.records) for name in judged},
        outputs={name: tested for name in answers if name in judged[:2] and (tested := answers[name].judgement)},
        reference_ttft_ms=reference_ms,
        measured_ttft_ms=measured_ms,
        ratio=ratio,
        has_loads=has_loads if is_without_kvbm else None,
        clients=[_client_of(run) for run in (*one, *other)],
        warm_starts=[found for run in (*one, *other) if (found := warm_start(run, cell.plan))],
        utilisation=max((busy for run in one if (busy := utilisation_of(run)) is not None), default=None),
        queue_share=queue_share_of(one),
        is_closed_loop=cell.plan.is_closed_loop,
        is_trace=cell.kind == "trace",
        what=_what(cell),
    )
    return Compared(
        cell=cell,
        measured=measured,
        reference=reference,
        judgement=judge(evidence, limits),
        ratio=ratio,
        medians_ms=(measured_ms, reference_ms),
        percentiles=compare_percentiles(samples[reference], samples[measured], run_deviation=deviation),
        noise=_noise(cell, one, reference) if cell.are_pairs_equal else None,
        share=share,
        ttft_model=fit_ttft(record for run in (*one, *other) for record in run.records),
        answers=answers,
        has_loads=has_loads,
    )


def _has_loads(runs: Sequence[Measurement], *, is_known: bool) -> bool | None:
    """Return whether blocks were loaded. A server elsewhere may be faster for any reason; without `is_known`, no load
    is not a finding."""
    transfers = transfers_of(runs)
    return True if transfers.are_proven else False if is_known and transfers.are_reported else None


def is_cell_tight(cell: CellResult, *, measured: str, references: Sequence[str]) -> bool:
    """Whether the ratio of the runs so far to the first reference is precise enough."""
    reference = references[0] if references else measured
    return is_tight(paired_ratio(pairs_of(cell, cell.of_arm(reference), cell.of_arm(measured))))


def pairs_of(cell: CellResult, reference: Sequence[Measurement], measured: Sequence[Measurement]) -> dict[int, Pairs]:
    """Return the times to first token in both arms, by pair and session, of every primary request that both answered.

    If pairs got other prompts, their sessions have other numbers.
    """
    step = 0 if cell.are_pairs_equal else 1 + max((one.session for run in reference for one in run.records), default=0)
    others = {run.pair: run for run in measured}
    return {
        run.pair: _pairs(cell, run, others[run.pair], sessions_from=step * run.pair)
        for run in reference
        if run.pair in others
    }


def _pairs(cell: CellResult, first: Measurement, second: Measurement, *, sessions_from: int = 0) -> Pairs:
    """Return the times to first token of two runs by session."""
    others = {one.key: one.ttft_ms for one in cell.primary_records(second)}
    found: Pairs = defaultdict(list)
    for one in cell.primary_records(first):
        other_ms = others.get(one.key)
        if one.ttft_ms and other_ms:
            found[sessions_from + one.session].append((one.ttft_ms, other_ms))
    return found


def _noise(cell: CellResult, runs: Sequence[Measurement], arm: str) -> Noise | None:
    """Compare the repeated runs of one arm with each other; `None` if two runs have no request in common."""
    repeated = combinations(sorted(runs, key=lambda run: run.pair), 2)
    return noise_of({(one.pair, other.pair): _pairs(cell, one, other) for one, other in repeated}, arm)


def _samples(cell: CellResult, runs: Sequence[Measurement]) -> Samples:
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for record in cell.primary_records(run):
            if record.ttft_ms is not None:
                samples[run.pair][record.session].append(record.ttft_ms)
    return samples


def _client_of(run: Measurement) -> ClientLoad:
    """Return the client's lateness with the requests of this run, and its CPU share, which all arms may share."""
    lateness_ms = [late for record in run.records if (late := record.lateness_ms) is not None]
    return ClientLoad(run.run, lateness_ms, run.client["cpu_share"])


def utilisation_of(run: Measurement) -> float | None:
    """Share of the time from the first launch to the last end in which at least one request was in flight. None if all
    were launched within the time of the shortest: such a burst has no rate that an engine could keep up with."""
    intervals = [
        (record.launched_ms, record.end_ms)
        for record in run.records
        if record.launched_ms is not None and record.end_ms is not None
    ]
    if not intervals:
        return None
    first, last = min(start for start, _ in intervals), max(start for start, _ in intervals)
    if last - first < min(end - start for start, end in intervals):
        return None
    return busy_share(intervals, first, max(end for _, end in intervals))


def queue_share_of(runs: Sequence[Measurement]) -> float | None:
    """Return the largest share of the mean TTFT that requests of a run waited in the engine's queue."""
    shares = []
    for run in runs:
        times = [record.ttft_ms for record in run.records if record.ttft_ms is not None]
        wait_ms = run.server.get("queue_wait_ms")
        if wait_ms is not None and times:
            shares.append(wait_ms / (sum(times) / len(times)))
    return max(shares, default=None)


def _what(cell: CellResult) -> str:
    primary = cell.primary
    if primary == ALL:
        return "the first token"
    turns = {record.turn for run in cell.runs for record in run.records if record.phase == primary}
    rest = {record.turn for run in cell.runs for record in run.records if record.phase != primary}
    if turns and rest and min(turns) > max(rest):
        return f"from turn {min(turns)} on, the first token"
    return (
        "in the steady phase, the first token" if primary == Phase.STEADY else "with a reusable prefix, the first token"
    )


def ratio_data(ratio: PairedRatio | None) -> dict[str, Any] | None:
    if ratio is None:
        return None
    return {
        "geometric_mean": ratio.ratio,
        "interval_95": [ratio.low, ratio.high] if ratio.session_count > 1 else None,
        "covers_runs": ratio.covers_runs,
        "pairs": ratio.request_count,
        "sessions": ratio.session_count,
        "runs": ratio.run_count,
    }
