"""Setup: all that an experiment measures, its plan for `--dry-run`, its caveats, and its runs that have not ended."""

from __future__ import annotations

import hashlib
import json
import random
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvbm.config.sizes import format_size
from kvbm.engines.engine_kind import ServerTraits
from kvbm.engines.table import engine_version, kind_of
from kvbm_cli.bench.arms import DEFAULT_PAIRS, Arm, ArmGroup, Comparison, groups
from kvbm_cli.bench.cells import Cell, known_launches, script_of, timed_launches
from kvbm_cli.bench.engines import HEADROOM
from kvbm_cli.bench.judge.compared import is_cell_tight
from kvbm_cli.bench.preparation import SMALLEST_INTERVAL_S, repeats_answers
from kvbm_cli.bench.result.directory import FORMAT, run_name
from kvbm_cli.bench.result.results import CellResult, Results
from kvbm_cli.bench.show.terminal import WIDTH
from kvbm_cli.bench.workload.plan import Dialect, Plan
from kvbm_cli.bench.workload.script import LengthWriter, Script, with_canned_answers
from kvbm_cli.profile.size import size_if_known
from kvbm_cli.system.machine import load_average, usable_cpu_count, versions
from kvbm_cli.terminal.printable import printable
from kvbm_cli.terminal.quantities import duration

SMALLEST_PAIRS = 2
SESSIONS = ("users", "agents")

ASSUMED_G1_TOKENS = 400_000  # of a model with 8 billion parameters on a GPU of 80 GB, about


@dataclass(frozen=True, slots=True)
class AssumedSpeed:
    """What a plan assumes of an engine: the time of a start, and tokens per second."""

    start_s: float
    prompt_tokens: float
    answer_tokens: float

    def seconds(self, script: Script, *, at_once: int = 1) -> float:
        """Time to answer all requests without a cache."""
        prompts = sum(request.prompt_token_count for request in script.requests)
        answers = sum(request.answer_tokens or 0 for request in script.requests)
        return prompts / self.prompt_tokens + answers / self.answer_tokens / at_once


ON_CPU, ON_GPU = AssumedSpeed(20.0, 2_000, 50), AssumedSpeed(90.0, 10_000, 100)


def show_plan(setup: Setup, *, as_json: bool, first_starts: int = 0, notes: Sequence[str] = ()) -> int:
    """Print the plan of a benchmark. `first_starts` is the number of engines before those of the plan."""
    plan = plan_of(setup, first_starts=first_starts, notes=notes)
    if as_json:
        print(json.dumps(plan, indent=2))
        return 0
    print("arms")
    for name, arm in plan["arms"].items():
        about = arm["url"] or f"profile {arm['profile']}, {_memory(arm['memory_bytes'])}"
        print(printable(f"  {name:<16}{arm['kind']:<10}{about}"))
    for cell in plan["cells"]:
        pressure = "" if cell["pressure"] is None else f", pressure {cell['pressure']:g}"
        print(f"\n{cell['name']}: {cell['workload']['kind']}{pressure}")
        print(f"  requests       {'' if cell['requests'] else 'at most '}{cell['most_requests']:,} per run")
        print(f"  working set    {_tokens(cell['working_set_tokens'])}; G1 holds {_tokens(cell['g1_tokens'])}")
        print(f"  order          {'  '.join('+'.join(group['arms']) for group in cell['order'])}")
        print(f"  duration       about {duration(cell['duration_s'])}")
    at_once = plan["memory_bytes_at_once"]
    memory = _memory(at_once) + (" at once" if at_once is not None else "")
    print(f"\nin total: {plan['starts']} engine starts, {memory}")
    print(f"duration: about {duration(plan['duration_s'])}")
    for note in plan["notes"]:
        print(textwrap.fill(printable(f"note: {note}"), WIDTH, subsequent_indent="  ", break_long_words=False))
    return 0


def plan_of(setup: Setup, *, first_starts: int = 0, notes: Sequence[str] = ()) -> dict[str, Any]:
    """`duration_s` is an estimate. `notes` say what it assumes."""
    speed = ON_GPU if setup.is_on_gpu else ON_CPU
    content = setup.to_json()
    running = {arm.name for arm in setup.comparison.arms if arm.url is not None}
    starts = first_starts
    starts += 0 if setup.comparison.is_of_urls else 1 if setup.resets_cache else len(setup.cells)
    duration_s, is_assumed = speed.start_s * starts, False
    for cell, described in zip(setup.cells, content["cells"], strict=True):
        runs = [name for group in setup.groups(cell) for name in group.arms]
        cell_starts = len([name for name in runs if name not in running])
        starts += cell_starts
        outline = CellOutline.of(cell, speed)
        described |= asdict(outline)
        described["duration_s"] = outline.duration_s * len(described["order"]) + speed.start_s * cell_starts
        duration_s += described["duration_s"] + outline.recording_s
        is_assumed |= outline.is_assumed
    assumption = (
        f"the duration assumes {speed.prompt_tokens:,.0f} prompt tokens per second; the preparation measures them, and "
        "`--duration` limits a run"
    )
    working_set = max((cell["working_set_tokens"] for cell in content["cells"]), default=0)
    memory = {arm.name: _memory_bytes(arm, working_set) for arm in setup.comparison.arms}
    groups = [group.arms for cell in setup.cells for group in setup.groups(cell)]
    at_once = max((sum(memory[one] or 0 for one in arms) for arms in groups), default=0)
    return {
        **content,
        "arms": {name: {**arm, "memory_bytes": memory[name]} for name, arm in content["arms"].items()},
        "starts": starts,
        "duration_s": duration_s,
        "memory_bytes_at_once": None if None in memory.values() else at_once,
        "notes": [*notes, *([assumption] if is_assumed else [])],
    }


@dataclass(frozen=True, slots=True)
class CellOutline:
    """What a run of a cell sends, without an engine. `requests` is `None` if it is not known; `most_requests` includes
    those that the end of the duration leaves out. `is_assumed`: `duration_s` depends on the speed of the engine.
    `recording_s` is the time of the preparation."""

    requests: int | None
    most_requests: int
    duration_s: float
    working_set_tokens: int
    is_assumed: bool
    recording_s: float

    @classmethod
    def of(cls, cell: Cell, speed: AssumedSpeed) -> CellOutline:
        writer = LengthWriter()
        script = script_of(cell.workload, writer, seed=cell.workload.seed)
        whole = with_canned_answers(script, lambda tokens: writer.content(random.Random(0), tokens))
        known = known_launches(cell, script)
        schedule, count, tokens = cell.schedule, len(script.requests), script.working_set_tokens
        alone_s = speed.seconds(whole)
        interval_s = alone_s / count / schedule.target_utilisation
        launches = known or timed_launches(cell, max(SMALLEST_INTERVAL_S, interval_s))
        plan = Plan.make(whole, launches, Dialect(""), request_timeout_s=cell.workload.request_timeout_s)
        most = count if known is None else len(plan.requests)
        duration_s = plan.duration_s
        is_assumed = known is None or duration_s is None
        if duration_s is None:
            at_once = min(launches.concurrency or count, count)
            duration_s = speed.seconds(whole, at_once=at_once) + count / at_once * launches.think_s
        is_cut = schedule.duration_s is not None and (known is None or plan.is_closed_loop)
        return cls(
            None if is_cut else most, most, duration_s, tokens, is_assumed, alone_s if repeats_answers(script) else 0.0
        )


def _memory_bytes(arm: Arm, working_set_tokens: int) -> int | None:
    """G1 and G2 of the arm; `None` if only the engine knows, or for a server that runs elsewhere.

    G1 of the floor holds the working set.
    """
    sizing = size_if_known(arm.resolved) if arm.resolved is not None else None
    if sizing is None or sizing.device is None:
        return None
    if arm.kind == "floor":
        needed = round(HEADROOM * working_set_tokens)
        held = sizing.device.block_count // sizing.group_count * sizing.block_tokens
        return sizing.device.total_bytes * max(needed, held) // held
    return sizing.device.total_bytes + (sizing.host.total_bytes + sizing.buffer_bytes if arm.has_kvbm else 0)


def _memory(byte_count: int | None) -> str:
    return "memory unknown" if byte_count is None else f"{format_size(byte_count)} for the KV cache"


def _tokens(count: int | None) -> str:
    return "an unknown number of tokens" if count is None else f"{count:,} tokens"


def caveats_of(setup: Setup) -> list[str]:
    return [
        *_of_profile(setup),
        *_of_order(setup),
        *(one for cell in setup.cells for one in _of_pressure(cell)),
        *_of_machine(),
    ]


def _of_profile(setup: Setup) -> Iterator[str]:
    resolved = setup.comparison.measured.resolved
    if resolved is None:
        return
    kind = kind_of(resolved.profile)
    yield from kind.caveats(resolved.profile)
    if not kind.has_prefix_caching(resolved.profile):
        yield "the engine's own prefix cache is off, so the baseline computes the whole of every prompt"
    for arm in setup.comparison.references:
        if arm.engine_differences:
            keys = ", ".join(f"`{key}`" for key in arm.engine_differences)
            yield f"the engine of {arm.name} differs in {keys}; its answers were not judged"


def _of_order(setup: Setup) -> Iterator[str]:
    for cell in setup.cells:
        if cell.schedule.arms == "interleaved" and (why := setup.why_in_turn):
            yield f"{cell.name}: arms ran in turn although `schedule.arms` is `interleaved`, because {why}"


def is_on_gpu(comparison: Comparison) -> bool:
    """Whether each engine that is started takes most of a device that is not a CPU."""
    if (measured := comparison.measured.resolved) is None:
        return False
    kind = kind_of(measured.profile)
    return not (kind.traits.shares_device or kind.runs_on_cpu(measured.profile))


def _of_pressure(cell: Cell) -> Iterator[str]:
    """Sessions that wait for their turn in a closed loop are not part of the working set."""
    workload, active = cell.workload, cell.schedule.concurrency
    if cell.pressure is None or not cell.g1_tokens or active is None or workload.scale_key not in SESSIONS:
        return
    sessions = getattr(workload, workload.scale_key)
    if active < sessions:
        pressure = (workload.with_count(active).working_set_tokens or 0) / cell.g1_tokens
        yield (
            f"{cell.name}: {active} of {sessions} sessions are active at a time, so the pressure is {pressure:.2g}; "
            "remove `schedule.concurrency`, or raise it"
        )


def _of_machine() -> Iterator[str]:
    load, cpu_count = load_average() or 0.0, usable_cpu_count()
    if load > cpu_count:
        yield f"the machine was busy: load {load:.1f} on {cpu_count} cores"


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured: at least one cell."""

    comparison: Comparison
    cells: tuple[Cell, ...]

    @property
    def seed(self) -> int:
        return self.cells[0].workload.seed

    @property
    def traits(self) -> ServerTraits | None:
        """Those of the engines that are started; all have one kind."""
        measured = self.comparison.measured.resolved
        return None if measured is None else kind_of(measured.profile).traits

    @property
    def is_on_gpu(self) -> bool:
        return is_on_gpu(self.comparison)

    @property
    def why_in_turn(self) -> str | None:
        """Why the engines cannot run at the same time; None if they can."""
        if self.traits is not None and self.is_on_gpu:
            return f"an engine of {self.traits.title} takes a share of the device memory that is free"
        with_kvbm = [arm.resolved.profile for arm in self.comparison.arms if arm.resolved and arm.has_kvbm]
        if any(profile.tiers.has_auto for profile in with_kvbm):
            return "with `capacity: auto`, an engine takes most of the memory or disk space that is free"
        return None

    @property
    def resets_cache(self) -> bool:
        """Whether a request empties the engine of the preparation, as far as it is known."""
        return self.traits is None or self.traits.resets_cache

    def interleaved(self, cell: Cell) -> bool:
        """Whether all arms run at the same time. Running servers do."""
        if self.why_in_turn is not None:
            return False
        return self.comparison.is_of_urls or cell.schedule.arms == "interleaved"

    def pairs(self, cell: Cell) -> int:
        return cell.schedule.pairs or DEFAULT_PAIRS["interleaved" if self.interleaved(cell) else "in_turn"]

    def groups(self, cell: Cell) -> list[ArmGroup]:
        return groups(
            self.comparison, interleaved=self.interleaved(cell), pairs=self.pairs(cell), seed=cell.workload.seed
        )

    def is_tight(self, cell: CellResult) -> bool:
        references = [arm.name for arm in self.comparison.references]
        return is_cell_tight(cell, measured=self.comparison.measured.name, references=references)

    def to_json(self) -> dict[str, Any]:
        """Return what `--resume` compares: `versions` of this interpreter, `engines` of each profile's own."""
        started = [arm for arm in self.comparison.arms if arm.resolved is not None]
        content = {
            "format": FORMAT,
            "arms": {arm.name: arm.to_json() for arm in self.comparison.arms},
            "measured": self.comparison.measured.name,
            "references": [arm.name for arm in self.comparison.references],
            "floor": self.comparison.floor.name if self.comparison.floor else None,
            "cells": [
                {
                    **cell.to_json(),
                    "interleaved": self.interleaved(cell),
                    "pairs": self.pairs(cell),
                    "order": [{"pair": group.pair, "arms": list(group.arms)} for group in self.groups(cell)],
                }
                for cell in self.cells
            ],
            "seed": self.seed,
            "versions": versions(),
            "engines": {arm.name: engine_version(arm.resolved.profile) for arm in started if arm.resolved is not None},
            "profiles": {arm.name: _profile_digest(arm) for arm in started},
        }
        return {**content, "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _profile_digest(arm: Arm) -> str:
    """Of all keys of the arm's profile, `--set` included."""
    assert arm.resolved is not None
    return hashlib.sha256(arm.resolved.profile.model_dump_json().encode()).hexdigest()


def planned_runs(results: Results) -> list[str]:
    return [run for cell in results.plan["cells"] for _, run in _order(cell) if run not in results.left_out]


def missing_runs(results: Results) -> list[str]:
    """Planned runs without a result, except those that a tight interval made superfluous."""
    found = {cell.name: cell for cell in results.cells}
    return [run for one in results.plan["cells"] for run in _missing(results, one, found.get(one["name"]))]


def _missing(results: Results, definition: Mapping[str, Any], cell: CellResult | None) -> list[str]:
    arms = {name: results.plan[name] for name in ("measured", "references")}
    done = {*results.left_out, *(run.run for run in (cell.runs if cell else ()))}
    missing = [(pair, run) for pair, run in _order(definition) if run not in done]
    first = min((pair for pair, _ in missing), default=0)
    if cell and first == cell.pairs_done + 1 > SMALLEST_PAIRS and is_cell_tight(cell, **arms):
        return []
    return [run for _, run in missing]


def _order(definition: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the pair and the name of every run of a cell, as `kvbm bench` makes them."""
    name, order = definition["name"], definition["order"]
    return [(group["pair"], run_name(name, group["pair"], arm)) for group in order for arm in group["arms"]]
