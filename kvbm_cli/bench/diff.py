"""`kvbm bench diff A B`: compares the same arms of two experiments, request by request: times and answers.

Both must have sent the same requests at the same times: their plans must have equal digests, cell by cell. Differences
in machine, versions and profile are printed, because they may be the cause. The verdict on the measured arm sets the
exit code. It is 12 if the verdict of one of the two was `wrong`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.judge.answers import answers_in
from kvbm_cli.bench.judge.compared import pairs_of, ratio_data
from kvbm_cli.bench.judge.correctness import OutputDifference, compare_answers, pooled
from kvbm_cli.bench.judge.paired import PairedRatio, paired_ratio
from kvbm_cli.bench.judge.verdict import Verdict, direction, worst_of
from kvbm_cli.bench.result.directory import SUMMARY, BenchDirectory
from kvbm_cli.bench.result.results import CellResult, Results, rounded
from kvbm_cli.terminal.console import print_json
from kvbm_cli.terminal.printable import printable

SURROUNDINGS = ("machine", "versions", "profile")
IGNORED = ("load_average", "time_unix_s")
OF_ENGINE = ("versions.", "profile.engine.")


@dataclass(frozen=True, slots=True)
class Experiment:
    """One side of the comparison."""

    path: Path
    directory: BenchDirectory
    results: Results
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """UsageError for a file that is missing, damaged, or of another format."""
        directory = BenchDirectory.open(path)
        results = Results.read(directory)
        if not (path / SUMMARY).exists():
            raise UsageError(f"{path} has no {SUMMARY}", hint=f"`kvbm bench report {shlex.quote(str(path))}` writes it")
        return cls(path, directory, results, directory.read_json(SUMMARY))

    @property
    def cells(self) -> dict[str, CellResult]:
        """Those with a run that has ended."""
        return {cell.name: cell for cell in self.results.cells if cell.runs}

    @property
    def arms(self) -> list[str]:
        """Those with a run that has ended."""
        return list(dict.fromkeys(arm for cell in self.cells.values() for arm in cell.arms))

    def digests(self, cell: str) -> dict[str, str | None]:
        """By file: servers that cannot be emptied get other prompts in every pair."""
        files = sorted((self.path / "cells" / cell).glob("plan*.json"))
        return {file.name: self.directory.read_json(file.relative_to(self.path)).get("digest") for file in files}


@dataclass(frozen=True, slots=True)
class ArmChange:
    """One arm of one cell in both experiments. `ratio` is above 1 if the second is faster."""

    cell: str
    arm: str
    ratio: PairedRatio | None
    medians_ms: tuple[float | None, float | None]
    answers: OutputDifference

    @property
    def verdict(self) -> Verdict:
        return Verdict.INVALID if self.ratio is None else direction(self.ratio)

    def to_json(self) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "arm": self.arm,
            "verdict": self.verdict.value,
            "first_ttft_p50_ms": self.medians_ms[0],
            "second_ttft_p50_ms": self.medians_ms[1],
            "ttft_speedup_paired": ratio_data(self.ratio),
            "answers": {
                "compared": self.answers.compared_count,
                "different": self.answers.different_count,
                "largest_logprob_difference": self.answers.logprob,
            },
        }


def diff(first: Path, second: Path, *, as_json: bool) -> int:
    """Print the comparison; returns the exit code of its verdict."""
    one, other = Experiment.read(first), Experiment.read(second)
    _require_like(one, other)
    changes = list(_changes(one, other))
    judged = _judged_arms(one, other)
    verdict = _verdict(one, other, [change.verdict for change in changes if change.arm in judged])
    differences = list(_differences(one.summary, other.summary))
    notes = [*_notes(one), *_notes(other), *_arms_of_one_side(one, other)]
    if as_json:
        content = {
            "verdict": verdict.value,
            "judged_arms": judged,
            "changes": [change.to_json() for change in changes],
            "differences": differences,
            "notes": notes,
        }
        print_json(rounded(content))
        return verdict.exit_code
    _show(changes, is_engine_equal=not any(difference.startswith(OF_ENGINE) for difference in differences))
    print(f"\n{verdict.value}: {printable(', '.join(judged))}, TTFT of the primary requests, paired by request")
    for line in (*(f"differs: {difference}" for difference in differences), *(f"note: {note}" for note in notes)):
        print(f"  {printable(line)}")
    return verdict.exit_code


def _require_like(one: Experiment, other: Experiment) -> None:
    """UsageError unless both have the same cells with the same requests, and an arm in common."""
    refused = f"{one.path} and {other.path} cannot be compared"
    for has, lacks in ((one, other), (other, one)):
        if missing := [name for name in has.cells if name not in lacks.cells]:
            raise UsageError(f"{refused}: {lacks.path} has no run of {_quoted(missing)}")
    if not one.cells:
        raise UsageError(f"{refused}: no run has ended")
    for name in one.cells:
        theirs = other.digests(name)
        if any(theirs.get(file, digest) != digest for file, digest in one.digests(name).items()):
            raise UsageError(
                f"{refused}: they sent different requests in `{name}`",
                hint="set `schedule.interval_s` and `history: canned` in the workload, and use the same model and seed",
            )
    if not set(one.arms) & set(other.arms):
        raise UsageError(f"{refused}: they have no arm in common: {_quoted(one.arms)} and {_quoted(other.arms)}")


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _judged_arms(one: Experiment, other: Experiment) -> list[str]:
    """Return the measured arm, if both ran it; else all arms in common."""
    common = [arm for arm in one.arms if arm in other.arms]
    measured = [arm for arm in common if arm in (one.results.plan["measured"], other.results.plan["measured"])]
    return measured or common


def _verdict(one: Experiment, other: Experiment, verdicts: Sequence[Verdict]) -> Verdict:
    if Verdict.WRONG in (one.summary.get("verdict"), other.summary.get("verdict")):
        return Verdict.WRONG
    return worst_of(verdicts)


def _changes(one: Experiment, other: Experiment) -> Iterator[ArmChange]:
    for name, cell in one.cells.items():
        second = other.cells[name]
        for arm in cell.arms:
            if second.of_arm(arm):
                yield _change(cell, second, arm)


def _change(cell: CellResult, second: CellResult, arm: str) -> ArmChange:
    ratio = paired_ratio(pairs_of(cell, cell.of_arm(arm), second.of_arm(arm)))
    others = {run.pair: answers_in(run) for run in second.of_arm(arm)}
    answers = pooled(compare_answers(answers_in(run), others.get(run.pair, {})) for run in cell.of_arm(arm))
    return ArmChange(cell.name, arm, ratio, (cell.median_ms(arm), second.median_ms(arm)), answers)


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between the surroundings of the two."""
    for section in SURROUNDINGS:
        one, other = _flat(first.get(section) or {}), _flat(second.get(section) or {})
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key) and key.rpartition(".")[2] not in IGNORED:
                yield f"{section}.{key}: {_shown(one.get(key))} and {_shown(other.get(key))}"


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _notes(one: Experiment) -> Iterator[str]:
    """Yield notes on an experiment that is not complete, or whose own verdict is bad."""
    verdict = one.summary.get("verdict")
    if verdict in (Verdict.WRONG, Verdict.INVALID) or not one.summary.get("complete"):
        yield f"{one.path} is {verdict}: {one.summary.get('explanation')}"


def _arms_of_one_side(one: Experiment, other: Experiment) -> Iterator[str]:
    for has, lacks in ((one, other), (other, one)):
        if missing := [arm for arm in has.arms if arm not in lacks.arms]:
            yield f"only {has.path} has runs of the arms {_quoted(missing)}"


def _show(changes: Sequence[ArmChange], *, is_engine_equal: bool) -> None:
    print(f"{'cell':<28}{'arm':<16}{'first':>10}{'second':>10}   second against first")
    for change in changes:
        first, second = (f"{one:.1f} ms" if one is not None else "-" for one in change.medians_ms)
        place = f"{printable(change.cell)[:27]:<28}{printable(change.arm)[:15]:<16}"
        print(f"{place}{first:>10}{second:>10}   {_words(change)}")
        print(f"{'':<44}{_answer_words(change.answers, is_engine_equal=is_engine_equal)}")


def _words(change: ArmChange) -> str:
    ratio = change.ratio
    if ratio is None:
        return "no request was answered in both"
    interval = f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio.session_count > 1 else "one session, so no interval"
    return f"{change.verdict.value}, {ratio.ratio:.2f} times as fast ({interval})"


def _answer_words(answers: OutputDifference, *, is_engine_equal: bool) -> str:
    compared, different = answers.compared_count, answers.different_count
    if not compared:
        return "no answers to compare"
    if not different:
        return f"same answers ({compared} compared)"
    surprise = ", although the engine is the same" if is_engine_equal else ""
    return f"{different} of {compared} answers differ{surprise}"
