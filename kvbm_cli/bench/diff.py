"""`kvbm bench diff A B`: compares the same arms of two experiments, request by request.

Both must have sent the same requests at the same times: their plans must have equal digests, cell by cell. What else
differs (machine, versions, profile) is printed, because it may be the cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.analysis.paired import PairedRatio, direction, paired_ratio
from kvbm_cli.bench.analysis.statistics import percentile
from kvbm_cli.bench.compared import pairs_of, ratio_data
from kvbm_cli.bench.records.bench_directory import SUMMARY, BenchDirectory
from kvbm_cli.bench.records.results import CellResult, Results
from kvbm_cli.bench.rounding import rounded
from kvbm_cli.bench.verdict import Verdict, worst_of

SURROUNDINGS = ("machine", "versions", "profile")
IGNORED = ("load_average", "time_unix_s")


@dataclass(frozen=True, slots=True)
class ArmChange:
    """One arm of one cell in both experiments. `ratio` is above 1 if the second is faster."""

    cell: str
    arm: str
    ratio: PairedRatio | None
    medians_ms: tuple[float | None, float | None]

    @property
    def verdict(self) -> Verdict:
        return Verdict.INVALID if self.ratio is None else Verdict(direction(self.ratio).value)

    def to_json(self) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "arm": self.arm,
            "verdict": self.verdict.value,
            "first_ttft_p50_ms": self.medians_ms[0],
            "second_ttft_p50_ms": self.medians_ms[1],
            "ttft_speedup_paired": ratio_data(self.ratio),
        }


def diff(first: Path, second: Path, *, as_json: bool) -> int:
    """Print the comparison; returns the exit code of the worst change of a measured arm."""
    opened = [BenchDirectory.open(path) for path in (first, second)]
    one, other = (Results.read(directory) for directory in opened)
    _require_like(one, other, first, second)
    changes = list(_changes(one, other))
    notes = list(_notes(*(directory.read_json(SUMMARY) for directory in opened)))
    measured = [change.verdict for change in changes if change.arm == other.plan["measured"]]
    verdict = worst_of(measured)
    if as_json:
        content = {"verdict": verdict.value, "changes": [change.to_json() for change in changes], "differences": notes}
        print(json.dumps(rounded(content), indent=2))
    else:
        _show(changes, notes, verdict)
    return verdict.exit_code


def _require_like(one: Results, other: Results, first: Path, second: Path) -> None:
    """UsageError unless both have the same cells with the same requests."""
    cells = [{cell.name: cell for cell in results.cells if cell.runs} for results in (one, other)]
    if cells[0].keys() != cells[1].keys():
        names = sorted(cells[0].keys() ^ cells[1].keys())
        raise UsageError(f"{first} and {second} cannot be compared: only one has {', '.join(names)}")
    for name, cell in cells[0].items():
        if cell.digest is None or cells[1][name].digest is None:
            raise UsageError(f"`{name}` cannot be compared: its requests follow the answers, so they differ each time")
        if cell.digest != cells[1][name].digest:
            raise UsageError(
                f"{first} and {second} cannot be compared: they sent different requests in `{name}`",
                hint="set `schedule.interval_s` and `history: canned` in the workload, and use the same model and seed",
            )
    if not set(one.arms) & set(other.arms):
        raise UsageError(f"{first} and {second} have no arm in common: {', '.join((*one.arms, *other.arms))}")


def _changes(one: Results, other: Results) -> Iterator[ArmChange]:
    others = {cell.name: cell for cell in other.cells}
    for cell in one.cells:
        for arm in cell.arms:
            second = others[cell.name]
            if second.of_arm(arm):
                yield _change(cell, second, arm)


def _change(cell: CellResult, second: CellResult, arm: str) -> ArmChange:
    ratio = paired_ratio(pairs_of(cell, cell.of_arm(arm), second.of_arm(arm)))
    return ArmChange(cell.name, arm, ratio, (_median_ms(cell, arm), _median_ms(second, arm)))


def _median_ms(cell: CellResult, arm: str) -> float | None:
    records = [record for run in cell.of_arm(arm) for record in cell.primary_records(run)]
    return percentile([time for record in records if (time := record.ttft_ms) is not None], 50)


def _notes(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """What differs between the surroundings of the two."""
    for section in SURROUNDINGS:
        one, other = _flat(first.get(section) or {}), _flat(second.get(section) or {})
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key) and key.rpartition(".")[2] not in IGNORED:
                yield f"{section}.{key}: {one.get(key)} and {other.get(key)}"


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _show(changes: list[ArmChange], notes: list[str], verdict: Verdict) -> None:
    print(f"{'cell':<28}{'arm':<16}{'first':>10}{'second':>10}   second against first")
    for change in changes:
        first, second = (f"{one:.1f} ms" if one is not None else "-" for one in change.medians_ms)
        print(f"{change.cell[:27]:<28}{change.arm[:15]:<16}{first:>10}{second:>10}   {_words(change)}")
    print(f"\n{verdict.value}: the measured arm, TTFT of the primary requests, paired by request")
    for note in notes:
        print(f"  differs: {note}")


def _words(change: ArmChange) -> str:
    ratio = change.ratio
    if ratio is None:
        return "no request was answered in both"
    return f"{change.verdict.value}, {ratio.ratio:.2f} times as fast ({ratio.low:.2f} to {ratio.high:.2f})"
