"""`kvbm bench --find-limit`: finds the highest rate of requests at which each arm keeps limits of its times.

One engine after the other gets the requests of one plan at different rates (`judge/limit.py` chooses them).

A probe empties the cache and sends all requests of the plan at one rate. A rate that does not hold at once is probed
again. probes.jsonl has every probe, requests.jsonl every request, limit.json the limits of all arms.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvbm.errors import EngineError, UsageError
from kvbm_cli.bench.arms import Arm
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.engines import NeededRoom, OpenArm
from kvbm_cli.bench.experiment import ExperimentProgress, PlannedExperiment
from kvbm_cli.bench.judge.limit import (
    Bounds,
    Condition,
    LimitOutcome,
    find_limit,
    outcome_of,
    ratio_of,
)
from kvbm_cli.bench.judge.verdict import DEFAULT_LIMITS
from kvbm_cli.bench.load.drive import drive
from kvbm_cli.bench.load.process import ClientHealth
from kvbm_cli.bench.preparation import warm_up
from kvbm_cli.bench.result.directory import PROBES, REQUESTS, BenchDirectory, cell_plan, run_name
from kvbm_cli.bench.result.results import RequestRecord, percentile
from kvbm_cli.bench.setup import Setup
from kvbm_cli.bench.workload.plan import Plan
from kvbm_cli.terminal.console import print_data, print_json, table

MOST_PROBES = 3
MOST_PROBE_S = 600.0
SETTLED_S = 30.0


@dataclass(frozen=True, slots=True)
class ArmLimit:
    """`compared` answers were compared with the recorded ones, and `different` of them differed.

    `doubt` says why the lowest rate that fails may be no limit of the engine.
    """

    arm: str
    bounds: Bounds
    probes: int
    compared: int
    different: int
    doubt: str | None = None

    @property
    def is_known(self) -> bool:
        return self.bounds.is_known and self.doubt is None

    def to_json(self) -> dict[str, Any]:
        high = None if math.isinf(self.bounds.high) else self.bounds.high
        return {
            "arm": self.arm,
            "requests_per_s": {"low": self.bounds.low, "high": high},
            "is_known": self.is_known,
            "probes": self.probes,
            "answers": {"compared": self.compared, "different": self.different},
            "doubt": self.doubt,
        }


def result_of(
    conditions: Sequence[Condition], workload: str, request_count: int, arms: Sequence[ArmLimit], measured: str
) -> dict[str, Any]:
    """Return the content of limit.json: the limit of every arm, ratios of the measured arm to the others, and notes on
    what makes a limit doubtful. `request_count` requests are a probe."""
    limits = [str(one) for one in conditions]
    (of_measured,) = (one for one in arms if one.arm == measured)
    lengths_s = ((one.arm, request_count / one.bounds.low) for one in arms if one.bounds.is_known)
    notes = [
        f"a probe at the limit of {arm} takes {length_s:.0f} s, too short for a queue to grow: send more"
        for arm, length_s in lengths_s
        if length_s < SETTLED_S
    ]
    notes += [f"the limit of {one.arm} is doubtful: {one.doubt}" for one in arms if one.doubt is not None]
    return {
        "limits": limits,
        "workload": workload,
        "arms": [one.to_json() for one in arms],
        "ratios": [_ratio(of_measured, one, ", ".join(limits)) for one in arms if one is not of_measured],
        "notes": notes,
    }


def _ratio(measured: ArmLimit, reference: ArmLimit, limits: str) -> dict[str, Any]:
    """Say how many times the users of `reference` the measured arm serves, or why that is not known."""
    ratio = None
    if unknown := [one.arm for one in (reference, measured) if not one.is_known]:
        sentence = f"the limit of {' and '.join(unknown)} is not known, so there is no ratio under {limits}"
    else:
        ratio = ratio_of(measured.bounds, reference.bounds)
        between = f"({ratio.low:.2f} to {ratio.high:.2f})"
        sentence = f"{measured.arm} and {reference.arm} serve equally many users under {limits}, or nearly {between}"
        if ratio.is_clear:
            sentence = (
                f"{measured.arm} serves {ratio.value:.2f} times the users of {reference.arm} under {limits} {between}"
            )
    return {
        "measured": measured.arm,
        "reference": reference.arm,
        "ratio": None if ratio is None else asdict(ratio),
        "sentence": sentence,
    }


def find_limits(
    setup: Setup,
    conditions: tuple[Condition, ...],
    engines: OpenArm,
    directory: BenchDirectory,
    progress: ExperimentProgress,
) -> dict[str, Any]:
    """Return the content of limit.json. EngineError if an engine does not start or cannot be emptied. UsageError as
    `require_searchable`."""
    (cell,) = setup.cells
    PlannedExperiment(setup, engines, directory, progress).prepare()
    data = directory.read_json(cell_plan(cell.name))
    plan = Plan.from_json(data)
    require_probes(plan, conditions)
    if not data["can_reset"]:
        raise EngineError("a server cannot be emptied, and each probe needs an empty cache")
    arms = [arm for arm in setup.comparison.arms if arm.kind != "floor"]
    found = [_LimitSearch(arm, cell, plan, conditions, directory, progress).run(engines) for arm in arms]
    return result_of(conditions, cell.name, len(plan.requests), found, setup.comparison.measured.name)


def require_searchable(setup: Setup) -> None:
    """UsageError for what has no rate to search, or no empty cache before each probe."""
    if len(setup.cells) != 1:
        raise UsageError("`--find-limit` searches with one workload at one pressure")
    (cell,) = setup.cells
    if cell.schedule.concurrency is not None or cell.schedule.ramp_to_s is not None:
        raise UsageError(f"`{cell.name}` has no rate that `--find-limit` could change", hint="give another workload")
    if setup.traits is not None and not setup.traits.resets_cache:
        raise UsageError(f"`--find-limit` needs an engine that a request empties, which {setup.traits.title} is not")
    for arm in setup.comparison.arms:
        if arm.resolved is not None and arm.has_kvbm and arm.resolved.profile.tiers.shared is not None:
            raise UsageError("`--find-limit` cannot empty the shared tier", hint="`--set tiers.shared=null`")


def require_probes(plan: Plan, conditions: Sequence[Condition]) -> None:
    """UsageError for a plan whose probes say nothing."""
    if plan.launches.interval_s is None:
        raise UsageError("the workload fixes the times of its requests, so `--find-limit` has no rate to change")
    needed, count = max(one.least_requests for one in conditions), len(plan.requests)
    if count * MOST_PROBES < needed:
        strictest = max(conditions, key=lambda one: one.least_requests)
        raise UsageError(
            f"`{strictest}` takes at least {needed} requests to judge, and {MOST_PROBES} probes of the workload have "
            f"{count * MOST_PROBES}",
            hint="give a workload with more requests, or a lower percentile",
        )


def at_rate(plan: Plan, rate: float) -> Plan:
    """Return the plan with its requests in the same order, `rate` of them per second."""
    launches = replace(plan.launches, interval_s=1 / rate, duration_s=None)
    times_s = launches.times_s(len(plan.requests))
    requests = tuple(replace(one, intended_s=time_s) for one, time_s in zip(plan.requests, times_s, strict=True))
    return replace(plan, requests=requests, launches=launches)


class _LimitSearch:
    """The search of one arm."""

    def __init__(
        self,
        arm: Arm,
        cell: Cell,
        plan: Plan,
        conditions: tuple[Condition, ...],
        directory: BenchDirectory,
        progress: ExperimentProgress,
    ) -> None:
        self._arm, self._cell, self._plan, self._conditions = arm.name, cell, plan, conditions
        self._directory, self._progress = directory, progress
        assert plan.launches.interval_s is not None
        self._start = 1 / plan.launches.interval_s
        self._probes = self._compared = self._different = 0
        self._late: dict[float, tuple[float, float]] = {}  # by rate, of its best probe: ms, and share of a core

    def run(self, engines: OpenArm) -> ArmLimit:
        self._progress.phase(f"starting {self._arm}")
        room = NeededRoom(self._plan.total_tokens, self._plan.session_count)
        with ExitStack() as stack:
            log = self._directory.run(run_name(self._cell.name, 1, self._arm))
            self._engine = stack.enter_context(engines(self._arm, log, room))
            warm_up(self._engine, self._plan)
            least = len(self._plan.requests) / MOST_PROBE_S
            bounds = find_limit(self._judge, self._start, least=least)
        doubt = self._doubt(*self._late.get(bounds.high, (0.0, 0.0)))
        return ArmLimit(self._arm, bounds, self._probes, self._compared, self._different, doubt)

    def _doubt(self, late_ms: float, cpu_share: float) -> str | None:
        """Return why a rate at which the client was so late may not fail because of the engine."""
        limits = [one.limit_ms for one in self._conditions if one.counts_from_launch]
        if late_ms <= DEFAULT_LIMITS.most_late_ms(min(limits, default=None)):
            return None
        return (
            f"at the lowest rate that fails, the load client was {late_ms:.0f} ms late and used {cpu_share:.0%} of a "
            "core; repeat the search on an idle machine, or with less load"
        )

    def _judge(self, rate: float) -> LimitOutcome:
        """Probe the rate. A stall of the machine makes a probe fail, so a failure counts when another one fails too."""
        records: list[RequestRecord] = []
        outcomes: list[LimitOutcome] = []
        for _ in range(MOST_PROBES):
            probed, health = self._probe(rate)
            records += probed
            outcomes.append(outcome_of(self._conditions, probed))
            self._write_probe(rate, probed, outcomes[-1], health)
            if outcomes == [LimitOutcome.HOLDS]:
                return LimitOutcome.HOLDS
            for one in (LimitOutcome.HOLDS, LimitOutcome.FAILS):
                if outcomes.count(one) == 2:
                    return one
        return outcome_of(self._conditions, records)

    def _write_probe(
        self, rate: float, records: Sequence[RequestRecord], outcome: LimitOutcome, health: ClientHealth
    ) -> None:
        shares = {str(one): one.exceeded_share(records) for one in self._conditions}
        late_ms = max(percentile([one.lateness_ms or 0.0 for one in records], 90), health.loop_lag_p99_ms)
        late = (round(late_ms, 3), round(health.cpu_share, 4))
        self._late[rate] = min(late, self._late.get(rate, late))
        line = {"arm": self._arm, "rate": rate, "requests": len(records), "outcome": outcome.value, "exceeded": shares}
        self._directory.append(PROBES, {**line, "client": {"late_ms": late[0], "cpu_share": late[1]}})

    def _probe(self, rate: float) -> tuple[tuple[RequestRecord, ...], ClientHealth]:
        self._probes += 1
        plan = at_rate(self._plan, rate)
        self._progress.phase(f"{self._arm}, probe {self._probes}: {rate:.3g} requests/s")
        if not self._engine.try_reset():
            raise EngineError(f"the engine of arm {self._arm} did not empty its cache")
        if self._engine.has_ended():
            raise EngineError(f"the engine of arm {self._arm} ended")
        run = run_name(self._cell.name, self._probes, self._arm)
        target = self._engine.target(run, self._arm, self._cell.name, self._probes)
        result = asyncio.run(drive(plan, [target], on_record=self._keep))
        records = result.records[run]
        failed = [record for record in records if not record.is_ok]
        if rate <= self._start and 2 * len(failed) >= len(records):  # not because of the load: slower probes fail too
            message = f"{self._arm} failed {len(failed)} of {len(records)} requests at {rate:.3g} requests/s"
            raise EngineError(f"{message}: {failed[0].error}")
        return records, result.health

    def _keep(self, record: RequestRecord) -> None:
        self._directory.append(REQUESTS, record.to_json())
        self._progress.request_ended(record)
        recorded = self._plan.requests[record.index].answer
        if recorded is not None and record.is_ok and record.token_ids:
            self._compared += 1
            self._different += tuple(record.token_ids) != recorded.token_ids


def show_limits(found: Mapping[str, Any], directory: str | os.PathLike[str], *, as_json: bool) -> None:
    """Print the content of limit.json. KeyError or TypeError if it is another one."""
    rows = [
        (one["arm"], shown_limit(one), f"{one['probes']}", "{different} of {compared}".format(**one["answers"]))
        for one in found["arms"]
    ]
    lines = [table([("arm", "requests/s", "probes", "answers that differ"), *rows], right=(2, 3)), ""]
    lines += [one["sentence"] for one in found["ratios"]]
    lines += [f"note: {note}" for note in found["notes"]]
    if as_json:
        print_json(found)
    else:
        print_data("\n".join([*lines, "", f"every probe: {os.fspath(directory)}"]))


def shown_limit(arm: Mapping[str, Any]) -> str:
    """Format the limit of an arm in limit.json."""
    low, high = arm["requests_per_s"]["low"], arm["requests_per_s"]["high"]
    if high is None:
        return f"{low:.3g} holds, none fails" if low else "none holds"
    if not low:
        return f"none holds, {high:.3g} fails"
    why = "" if arm["is_known"] else ": doubtful" if arm["doubt"] else ": noise forbids an answer"
    return f"{low:.3g} to {high:.3g}{why}"
