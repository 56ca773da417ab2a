"""Results of a comparison whose every number is given: what `kvbm bench` would read from its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbm_cli.bench.cells import script_of
from kvbm_cli.bench.judge.correctness import Key
from kvbm_cli.bench.result.results import CellResult, Measurement, RequestRecord, Results
from kvbm_cli.bench.summary import summarise
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan, PlannedRequest
from kvbm_cli.bench.workload.schema import Conversations, Schedule, Unique, Workload, as_definition
from kvbm_cli.bench.workload.script import TokenWriter

BLOCK = 16
BLOCK_BYTES = 64 * 1024
CONVERSATIONS = Conversations(
    name="talk",
    users=6,
    turns=4,
    system_tokens=64,
    history_tokens=960,
    question_tokens=32,
    answer_tokens=16,
    history="canned",
    schedule=Schedule(interval_s=1.0, pairs=2),
)
UNIQUE = Unique(
    name="once", kind="unique", requests=24, prompt_tokens=1024, answer_tokens=16, schedule=Schedule(interval_s=1.0)
)
PROFILE: dict[str, Any] = {
    "tiers": {"host": {"capacity": "64MiB", "blocks": None}, "disk": None},
    "offload": {"to_disk": "frequency", "frequency_threshold": 2, "min_priority": 0},
    "onboard": {"policy": "auto"},
    "transfer": {"max_concurrent": 4},
}


@dataclass(frozen=True)
class GivenArm:
    """`found` are the parts of a prompt's reusable blocks that came from G1, G2 and G3; a request takes
    `base_ms + ms_per_token * computed tokens + load_ms`, times 1 + `spread` by turns of its session."""

    found: tuple[float, float, float] = (0.0, 0.0, 0.0)
    base_ms: float = 20.0
    ms_per_token: float = 0.5
    load_ms: float = 0.0
    spread: float = 0.0
    queue_wait_ms: float = 0.2
    end_ms: float = 10.0
    lateness_ms: float = 1.0
    client: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, float] = field(default_factory=dict)
    g1_blocks: int = 200
    g2_blocks: int | None = None
    error: str | None = None


BASELINE = GivenArm()
KVBM = GivenArm(
    found=(0.0, 1.0, 0.0),
    g2_blocks=1024,
    counters={"kvbm_offload_blocks_d2h": 400, "kvbm_evicted_blocks": 0, "kvbm_onboard_blocks_h2d": 1000},
    states={"kvbm_disabled": 0.0, "kvbm_disk_off": 0.0},
)
NO_LOADS = {"found": (0.0, 0.0, 0.0)}


def summary_of_arms(
    *,
    workload: Workload = CONVERSATIONS,
    profile: Mapping[str, Any] | None = PROFILE,
    pairs: int = 2,
    launches: Launches | None = None,
    pressure: float | None = None,
    g1_tokens: int | None = None,
    **arms: GivenArm,
) -> dict[str, Any]:
    """The summary of `kvbm` against `baseline`; the arm `floor` is optional."""
    plan = plan_of(workload, launches or Launches(interval_s=workload.schedule.interval_s))
    given = {"baseline": BASELINE, "kvbm": KVBM, **arms}
    runs = tuple(_run(plan, name, arm, pair) for pair in range(1, pairs + 1) for name, arm in given.items())
    definition = {
        "name": workload.name,
        "pressure": pressure,
        "g1_tokens": g1_tokens,
        "workload": as_definition(workload),
        "interleaved": False,
        "pairs": pairs,
        "order": [],
    }
    floor = "floor" if "floor" in given else None
    kinds = {name: {"kind": name, "profile": "demo", "url": None, "differences": {}} for name in given}
    content = {
        "arms": kinds,
        "measured": "kvbm",
        "references": ["baseline"],
        "floor": floor,
        "cells": [definition],
        "seed": 1,
        "digest": "d",
    }
    cell = CellResult(definition, plan, plan.digest, runs)
    return summarise(Results(content, (cell,)), surroundings={"profile": profile})


def plan_of(workload: Workload, launches: Launches) -> Plan:
    writer = TokenWriter(lambda text: [ord(character) for character in text], seed=1)
    return Plan.make(script_of(workload, writer, seed=1), launches, Dialect("m"), request_timeout_s=60.0)


def _run(plan: Plan, name: str, arm: GivenArm, pair: int) -> Measurement:
    sent: dict[Key, int] = {}
    records = [_record(request, name, arm, pair, sent) for request in plan.requests]
    totals = {
        "g1": sum(one.g1_tokens or 0 for one in records),
        "g2": sum(one.g2_tokens or 0 for one in records),
        "g3": sum(one.g3_tokens or 0 for one in records),
        "computed": sum(one.computed_tokens or 0 for one in records),
    }
    server = {
        "prompt_tokens": totals,
        "queue_wait_ms": arm.queue_wait_ms,
        "kvbm_counters": dict(arm.counters),
        "kvbm_states": dict(arm.states),
        "engine": {"block_size": BLOCK, "g1_blocks": arm.g1_blocks, "g1_tokens": BLOCK * arm.g1_blocks}
        | ({"g2_blocks": arm.g2_blocks} if arm.g2_blocks else {}),
    }
    client = {"lateness_p99_ms": arm.lateness_ms, "loop_lag_p99_ms": 1.0, "cpu_share": 0.1, **arm.client}
    run = f"talk.{pair}.{name}"
    facts = {"client": client, "server": server, "startup_s": 1.0, "duration_s": 30.0, "engine_ended": False}
    return Measurement(run, name, pair, facts, tuple(records))


def _record(request: PlannedRequest, name: str, arm: GivenArm, pair: int, sent: dict[Key, int]) -> RequestRecord:
    """A prompt repeats the prompt of the turn before."""
    length = request.prompt_tokens or 0
    reusable = min(sent.get((request.session, request.turn - 1), 0), length - 1) // BLOCK
    sent[request.session, request.turn] = length
    g1, g2, g3 = (round(part * reusable) * BLOCK for part in arm.found)
    computed = length - g1 - g2 - g3
    factor = 1 + arm.spread * (-1) ** (request.session + pair)
    ttft_ms = factor * (arm.base_ms + arm.ms_per_token * computed + (arm.load_ms if g2 or g3 else 0.0))
    intended_ms = 1e3 * (request.intended_s if request.intended_s is not None else float(request.index))
    return RequestRecord(
        run=f"talk.{pair}.{name}",
        arm=name,
        cell="talk",
        pair=pair,
        index=request.index,
        session=request.session,
        turn=request.turn,
        phase=request.phase.value,
        intended_ms=intended_ms,
        launched_ms=intended_ms + arm.lateness_ms,
        first_token_ms=intended_ms + ttft_ms,
        last_token_ms=intended_ms + ttft_ms + arm.end_ms,
        end_ms=intended_ms + ttft_ms + arm.end_ms,
        error=arm.error,
        token_ids=[1, 2],
        logprobs=[-0.5, -0.5],
        prompt_tokens=length,
        cached_tokens=g1 + g2 + g3,
        g1_tokens=g1,
        g2_tokens=g2,
        g3_tokens=g3,
    )
