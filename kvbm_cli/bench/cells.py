"""Cells: every workload at every pressure. The pressure is the working set over the tokens that G1 holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError
from kvbm.text.outside import shown
from kvbm_cli.bench.lmbenchmark.of_workload import strict_script, strict_workload
from kvbm_cli.bench.trace.analysis import findings_of
from kvbm_cli.bench.trace.request import TraceFormat, Turns
from kvbm_cli.bench.trace.script import trace_script
from kvbm_cli.bench.workload.build import build_script, with_hints
from kvbm_cli.bench.workload.files import image_of
from kvbm_cli.bench.workload.plan import Launches
from kvbm_cli.bench.workload.schema import (
    AgenticCoding,
    Conversations,
    Lmbenchmark,
    Schedule,
    Trace,
    Workload,
    as_definition,
)
from kvbm_cli.bench.workload.script import LengthWriter, Script, Writer


@dataclass(frozen=True, slots=True)
class Overrides:
    """Options of the command line that replace the schedule of every workload."""

    rate: float | None = None
    concurrency: int | None = None
    duration_s: float | None = None
    pairs: int | None = None
    burstiness: float | None = None
    endpoint: str | None = None
    ramp_to: float | None = None

    def applied(self, workload: Workload) -> Workload:
        changes: dict[str, Any] = {}
        if self.rate is not None:
            ramp_to_s = None if self.ramp_to is None else 1 / self.ramp_to
            changes |= {"interval_s": 1 / self.rate, "ramp_to_s": ramp_to_s, "concurrency": None}
        if self.concurrency is not None:
            changes |= {"interval_s": None, "ramp_to_s": None, "concurrency": self.concurrency}
        others = {"duration_s": self.duration_s, "pairs": self.pairs, "burstiness": self.burstiness}
        changes |= {name: value for name, value in others.items() if value is not None}
        if self.ramp_to is not None and isinstance(workload, Lmbenchmark):
            raise UsageError(f"`--ramp-to` does not apply to `{workload.name}`: LMBenchmark has one rate")
        schedule = workload.schedule.model_copy(update=changes)
        update: dict[str, Any] = {"schedule": schedule}
        if self.endpoint is not None:
            update["endpoint"] = self.endpoint
        if isinstance(workload, Lmbenchmark):
            update |= {"qps": self.rate or workload.qps, "time_s": self.duration_s or workload.time_s}
        return strict_workload(workload.model_copy(update=update))


@dataclass(frozen=True, slots=True)
class Sweep:
    """`key` is `rate` or `concurrency`; every workload runs with each of the values."""

    key: str
    values: tuple[float, ...]

    def applied(self, workloads: Iterable[Workload]) -> list[Workload]:
        """UsageError for a workload whose launches have times of their own."""
        return [self._at(workload, value) for workload in workloads for value in self.values]

    def _at(self, workload: Workload, value: float) -> Workload:
        if isinstance(workload, Trace):
            raise UsageError(f"`--sweep` cannot change the times of the trace `{workload.name}`")
        override = Overrides(rate=value) if self.key == "rate" else Overrides(concurrency=int(value))
        return override.applied(workload.model_copy(update={"name": f"{workload.name}-{self.key}{value:g}"}))


def parse_sweep(text: str | None) -> Sweep | None:
    """Such as `rate=1,2,4`. UsageError for anything else."""
    if text is None:
        return None
    key, _, given = text.partition("=")
    values = _numbers(given)
    is_whole = key == "rate" or all(value.is_integer() for value in values)
    if key not in ("rate", "concurrency") or not is_whole or not _are_different(values, 1e-6, 1e5):
        raise UsageError(
            f"--sweep takes `rate=` or `concurrency=` and different numbers above 0, not `{shown(text)}`",
            hint="`--sweep rate=1,2,4,8`",
        )
    return Sweep(key, values)


def _numbers(text: str) -> tuple[float, ...]:
    """Return the numbers between commas; none if a part is no number."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return ()


def _are_different(values: Sequence[float], least: float, most: float) -> bool:
    """Whether there are values, within the limits, that six digits tell apart."""
    names = {f"{value:g}" for value in values}
    return bool(values) and all(least <= value <= most for value in values) and len(names) == len(values)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one pressure; `None` where the workload's own size counts."""

    name: str
    workload: Workload
    pressure: float | None = None
    g1_tokens: int | None = None

    @property
    def schedule(self) -> Schedule:
        return self.workload.schedule

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pressure": self.pressure,
            "g1_tokens": self.g1_tokens,
            "workload": as_definition(self.workload),
        }


AUTO, OWN_SIZE = "auto", "none"
AUTO_PRESSURE = 2.0  # more than G1 holds, so that G1 alone must compute prompts again


@dataclass(frozen=True, slots=True)
class Pressures:
    """What `--pressure` says. None of them: every workload has its own size. `is_auto`: a workload that cannot be
    scaled, or that has no G1 to compare with, keeps it."""

    values: tuple[float, ...] = ()
    is_auto: bool = False

    def scales(self, workloads: Iterable[Workload]) -> bool:
        """Whether the size of G1 decides the size of a workload."""
        return bool(self.values) and (not self.is_auto or any(one.scale_key is not None for one in workloads))


def parse_pressures(text: str | None, *, is_on_gpu: bool = False) -> Pressures:
    """Such as `0.8,1.2,2`, `auto`, `auto:1.5` or `none`. UsageError for anything else."""
    if text is None:
        text = AUTO if is_on_gpu else OWN_SIZE
    if text == OWN_SIZE:
        return Pressures()
    values = (AUTO_PRESSURE,) if text == AUTO else _numbers(text.removeprefix(f"{AUTO}:"))
    if not values or not all(0 < value <= 1000 for value in values) or len(set(values)) < len(values):
        raise UsageError(
            "--pressure takes different numbers above 0, such as `0.8,1.2,2,4`, or `auto` or `none`, not "
            f"`{shown(text)}`"
        )
    return Pressures(values, is_auto=text.startswith(AUTO))


def cells_of(workloads: Sequence[Workload], pressures: Pressures, g1_tokens: int | None) -> tuple[Cell, ...]:
    """UsageError if two workloads have one name, or if a workload has no working set to scale."""
    names = [workload.name for workload in workloads]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two workloads are named `{name}`", hint="give one of them another `name`")
    if not pressures.values:
        return tuple(Cell(workload.name, workload, None, g1_tokens) for workload in workloads)
    cells = tuple(_under_pressure(workloads, pressures, g1_tokens))
    for name, count in Counter(cell.name for cell in cells).items():
        if count > 1:
            raise UsageError(f"--pressure makes {count} runs named `{name}`: six digits of a pressure count")
    return cells


def _under_pressure(workloads: Sequence[Workload], pressures: Pressures, g1_tokens: int | None) -> Iterable[Cell]:
    if g1_tokens is None and not pressures.is_auto:
        raise UsageError(
            "--pressure requires the size of G1, and the engine does not report it",
            hint="remove `--pressure`, and set the size of the workload instead",
        )
    for workload in workloads:
        if pressures.is_auto and (g1_tokens is None or workload.scale_key is None):
            yield Cell(workload.name, workload, None, g1_tokens)
            continue
        assert g1_tokens is not None
        if workload.scale_key is None:
            raise UsageError(
                f"--pressure cannot scale `{workload.name}`: its kind has a fixed working set",
                hint="measure it without `--pressure`",
            )
        for pressure in pressures.values:
            scaled = workload.scaled(round(pressure * g1_tokens))
            yield Cell(f"{workload.name}-x{pressure:g}", scaled, pressure, g1_tokens)


def warnings_of(workload: Workload) -> list[str]:
    """Return what the files of the workload make doubtful, read before an engine starts.

    Errors as in `script_of`, which is called, too: lines that are right may not fit to each other.
    """
    found: list[str] = []
    if isinstance(workload, Trace):
        found = findings_of(Path(workload.file), _form(workload))
    elif isinstance(workload, Conversations) and workload.images:
        if workload.endpoint == "completions":
            raise UsageError(
                f"the images of `{workload.name}` require an endpoint for messages", hint="`--endpoint chat`"
            )
        for one in workload.images:
            image_of(one)
    if isinstance(workload, Trace | Lmbenchmark):
        script_of(workload, LengthWriter(), seed=workload.seed)
    return found


def script_of(workload: Workload, writer: Writer, *, seed: int) -> Script:
    """UsageError or ProfileError for a file of the workload that is missing or wrong."""
    if isinstance(workload, Trace | AgenticCoding) and workload.hints:
        return with_hints(script_of(workload.model_copy(update={"hints": False}), writer, seed=seed))
    if isinstance(workload, Trace):
        return trace_script(
            Path(workload.file),
            _form(workload),
            writer,
            seed=seed,
            length_scale=workload.length_scale,
        )
    if isinstance(workload, Lmbenchmark):
        return strict_script(workload, writer, seed=seed)
    return build_script(workload, writer, seed=seed)


def known_launches(cell: Cell, script: Script) -> Launches | None:
    """Return the launches of a cell; None if the interval must be measured."""
    schedule = cell.schedule
    if schedule.concurrency is not None:
        return Launches(None, schedule.concurrency, schedule.think_s, schedule.duration_s)
    if all(request.has_launch_time for request in script.requests):
        return Launches(duration_s=schedule.duration_s)  # the workload fixes its own times
    return None if schedule.interval_s is None else timed_launches(cell, schedule.interval_s)


def timed_launches(cell: Cell, interval_s: float) -> Launches:
    schedule = cell.schedule
    return Launches(
        interval_s=interval_s,
        duration_s=schedule.duration_s,
        burstiness=schedule.burstiness,
        seed=cell.workload.seed,
        ramp_to_s=schedule.ramp_to_s,
    )


def _form(workload: Trace) -> TraceFormat:
    turns = Turns(workload.turns)
    limits = (workload.requests, workload.sessions)
    return TraceFormat(workload.block_tokens, workload.time_scale, workload.columns, turns, *limits)
