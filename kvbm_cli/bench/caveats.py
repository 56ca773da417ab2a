"""Caveats that follow from the profiles, the workloads and the load of the machine."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm_cli.bench.experiment import Setup
from kvbm_cli.bench.machine import load_average, usable_cpu_count
from kvbm_cli.engine.engines import has_prefix_caching, runs_on_cpu
from kvbm_cli.profile.size import size_if_known


def caveats_of(setup: Setup) -> list[str]:
    return [*_of_profile(setup), *_of_cells(setup), *_of_machine()]


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


def _of_cells(setup: Setup) -> Iterator[str]:
    resolved = setup.comparison.measured.resolved
    sizing = size_if_known(resolved) if resolved else None
    for cell in setup.cells:
        needed = cell.workload.working_set_tokens
        if needed is None:
            continue
        if sizing is not None and sizing.host.token_count < needed:
            yield f"{cell.name}: G2 holds {sizing.host.token_count:,} tokens, less than the working set of {needed:,}"
        if cell.g1_tokens is not None and cell.g1_tokens >= needed:
            yield f"{cell.name}: the working set of {needed:,} tokens fits into G1 ({cell.g1_tokens:,} tokens)"


def _of_machine() -> Iterator[str]:
    load, cpu_count = load_average() or 0.0, usable_cpu_count()
    if load > cpu_count:
        yield f"the machine was busy: load {load:.1f} on {cpu_count} cores"
