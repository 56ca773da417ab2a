"""Collects the numbers of a comparison for `reasons`, which lists why it shows no gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbm_cli.bench.reasons.cell_facts import ArmFacts, CauseLimits, CellFacts
from kvbm_cli.bench.reasons.reuse import reuse_of
from kvbm_cli.bench.verdicts.compared import Compared, queue_share_of
from kvbm_cli.bench.verdicts.verdict import VerdictLimits


def facts_of(
    compared: Compared,
    arms: Mapping[str, Mapping[str, Any]],
    *,
    floor: str | None,
    profile: Mapping[str, Any] | None,
    limits: VerdictLimits,
) -> CellFacts:
    """`arms` are the arms of the cell in summary.json, `profile` is the one there."""
    cell = compared.cell
    has_plan = cell.plan is not None  # without one, the server's counters include LMBenchmark's warm-up
    facts = {
        name: ArmFacts(name, arm, queue_share_of(cell.of_arm(name)) if has_plan else None) for name, arm in arms.items()
    }
    reference = facts[compared.reference]
    block_size = reference.size("block_size")
    return CellFacts(
        cell=cell,
        verdict=compared.judgement.verdict.value,
        ratio=compared.ratio,
        noise=compared.noise,
        ttft_model=compared.ttft_model,
        limits=_limits(limits, compared),
        measured=facts[compared.measured],
        reference=reference,
        floor=facts.get(floor) if floor else None,
        reuse=reuse_of(cell.plan, block_size) if cell.plan and block_size else None,
        profile=profile or {},
    )


def _limits(limits: VerdictLimits, compared: Compared) -> CauseLimits:
    return CauseLimits(
        gain=limits.margin,
        late_ms=limits.most_late_ms(compared.medians_ms[1]),
        client_cpu_share=limits.client_cpu_share,
        utilisation=limits.collapse_utilisation,
        queue_share=limits.collapse_queue_share,
    )
