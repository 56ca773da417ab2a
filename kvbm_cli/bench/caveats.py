"""Caveats that follow from the profiles and the load of the machine."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.experiment import Setup
from kvbm_cli.bench.machine import load_average, usable_cpu_count
from kvbm_cli.engine.engines import has_prefix_caching, runs_on_cpu

SESSIONS = ("users", "agents")


def caveats_of(setup: Setup) -> list[str]:
    return [*_of_profile(setup), *(one for cell in setup.cells for one in _of_pressure(cell)), *_of_machine()]


def _of_profile(setup: Setup) -> Iterator[str]:
    resolved = setup.comparison.measured.resolved
    if resolved is None:
        return
    if resolved.profile.engine.kind == "embedded":
        yield "the embedded engine is a reference implementation: compare the arms with each other only"
    elif runs_on_cpu(resolved.profile):
        yield "vLLM computes on a CPU: the speed-up on a GPU is different"
    if not has_prefix_caching(resolved.profile):
        yield "the engine's own prefix cache is off, so the baseline computes the whole of every prompt"
    for arm in setup.comparison.references:
        if arm.engine_differences:
            keys = ", ".join(f"`{key}`" for key in arm.engine_differences)
            yield f"the engine of {arm.name} differs in {keys}; its answers were not judged"


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
