"""Finds the limit of every arm, one engine after the other, with the requests of one plan at different rates.

A probe empties the cache and sends all requests of the plan at one rate. A rate that does not hold at once is probed
again. probes.jsonl has every probe, requests.jsonl every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvbm.errors import EngineError, UsageError
from kvbm_cli.bench.arms import Arm
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.engines import NeededRoom, OpenArm
from kvbm_cli.bench.experiment import ExperimentProgress, prepare
from kvbm_cli.bench.limit.conditions import Condition, LimitOutcome, outcome_of
from kvbm_cli.bench.limit.found import ArmLimit, FoundLimits
from kvbm_cli.bench.limit.search import find_limit
from kvbm_cli.bench.load.drive import drive
from kvbm_cli.bench.preparation import warm_up
from kvbm_cli.bench.result.directory import REQUESTS, BenchDirectory, cell_plan, run_name
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.setup import Setup
from kvbm_cli.bench.workload.plan import Plan

MOST_PROBES = 3
MOST_PROBE_S = 600.0
PROBES = "probes.jsonl"
LIMIT = "limit.json"


def find_limits(
    setup: Setup,
    conditions: tuple[Condition, ...],
    engines: OpenArm,
    directory: BenchDirectory,
    progress: ExperimentProgress,
) -> FoundLimits:
    """EngineError if an engine does not start or cannot be emptied. UsageError as `require_searchable`."""
    (cell,) = setup.cells
    prepare(setup, engines, directory, progress)
    data = directory.read_json(cell_plan(cell.name))
    plan = Plan.from_json(data)
    require_probes(plan, conditions)
    if not data["can_reset"]:
        raise EngineError("a server cannot be emptied, and each probe needs an empty cache")
    arms = [arm for arm in setup.comparison.arms if arm.kind != "floor"]
    found = tuple(_LimitSearch(arm, cell, plan, conditions, directory, progress).run(engines) for arm in arms)
    return FoundLimits(conditions, cell.name, len(plan.requests), found, setup.comparison.measured.name)


def require_searchable(setup: Setup) -> None:
    """UsageError for what has no rate to search, or no empty cache before each probe."""
    if len(setup.cells) != 1:
        raise UsageError("`--find-limit` searches with one workload at one pressure")
    (cell,) = setup.cells
    if cell.is_faithful or cell.schedule.concurrency is not None:
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

    def run(self, engines: OpenArm) -> ArmLimit:
        self._progress.phase(f"starting {self._arm}")
        room = NeededRoom(self._plan.total_tokens, self._plan.session_count)
        with ExitStack() as stack:
            log = self._directory.run(run_name(self._cell.name, 1, self._arm))
            self._engine = stack.enter_context(engines(self._arm, log, room))
            warm_up(self._engine, self._plan)
            least = len(self._plan.requests) / MOST_PROBE_S
            bounds = find_limit(self._judge, self._start, least=least)
        return ArmLimit(self._arm, bounds, self._probes, self._compared, self._different)

    def _judge(self, rate: float) -> LimitOutcome:
        """Probe the rate. A stall of the machine makes a probe fail, so a failure counts when another one fails too."""
        records: list[RequestRecord] = []
        outcomes: list[LimitOutcome] = []
        for _ in range(MOST_PROBES):
            probed = self._probe(rate)
            records += probed
            outcomes.append(outcome_of(self._conditions, probed))
            self._write_probe(rate, probed, outcomes[-1])
            if outcomes == [LimitOutcome.HOLDS]:
                return LimitOutcome.HOLDS
            for one in (LimitOutcome.HOLDS, LimitOutcome.FAILS):
                if outcomes.count(one) == 2:
                    return one
        return outcome_of(self._conditions, records)

    def _write_probe(self, rate: float, records: Sequence[RequestRecord], outcome: LimitOutcome) -> None:
        shares = {str(one): one.exceeded_share(records) for one in self._conditions}
        line = {"arm": self._arm, "rate": rate, "requests": len(records), "outcome": outcome.value, "exceeded": shares}
        self._directory.append(PROBES, line)

    def _probe(self, rate: float) -> tuple[RequestRecord, ...]:
        self._probes += 1
        plan = at_rate(self._plan, rate)
        text = f"{self._arm}, probe {self._probes}: {rate:.3g} requests/s"
        self._progress.phase(text, expected_s=plan.duration_s)
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
        return records

    def _keep(self, record: RequestRecord) -> None:
        self._directory.append(REQUESTS, record.to_json())
        self._progress.request_ended(record)
        recorded = self._plan.requests[record.index].answer
        if recorded is not None and record.is_ok and record.token_ids:
            self._compared += 1
            self._different += tuple(record.token_ids) != recorded.token_ids
