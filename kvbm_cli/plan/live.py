"""`kvbm plan RUN` and `--url`: the hit rates that running engines measure with `metrics.capacities`.

Read from the engine's metrics, once. The engine simulates host memory of a few other sizes with its own requests
(`kvbm/core/shadow_caches.py`), so nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.config.sizes import format_size
from kvbm.core.shadow_caches import EVICTIONS
from kvbm.errors import EnvironmentProblem
from kvbm.text.outside import one_line
from kvbm_cli.plan import advice
from kvbm_cli.plan.advice import Curve, Prices, Prompts
from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.terminal.console import print_data, print_json, table
from kvbm_cli.top.watched import EngineReader, MetricsTarget

HIT_RATE_AT = "kvbm_hit_rate_at"
LOADED = ("host", "disk", "object")
HINT = "set `metrics.capacities: true` in the profile and restart; the first request must have ended"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What one engine has measured. Its own caches, device memory included, have had the `hit_rate`."""

    name: str
    curve: Curve
    prompts: Prompts
    hit_rate: float | None


def show_live(
    targets: Callable[[], Sequence[MetricsTarget]], prices: Prices | None, *, html: Path | None, as_json: bool
) -> int:
    """Print the plan of each engine. Raises EnvironmentProblem if none has measured anything."""
    engines = EngineReader(targets).read()
    plans = [plan_of(one.name, one.readings[-1].page) for one in engines if one.readings]
    known = [plan for plan in plans if plan is not None]
    if not known:
        problems = "; ".join(f"{one.name}: {one.problem}" for one in engines if one.problem)
        raise EnvironmentProblem(
            "no engine has measured the hit rates of other capacities" + (f" ({problems})" if problems else ""),
            hint=HINT,
        )
    if html is not None:
        from kvbm_cli.plan.page import PlanSection, write_page

        sections = [
            PlanSection(_head(plan), plan.curve, advice.sentences(plan.curve, plan.prompts, prices)) for plan in known
        ]
        write_page(html, sections)
    if as_json:
        print_json([as_data(plan, prices) for plan in known])
    else:
        print_data("\n\n".join(text(plan, prices) for plan in known))
    return 0


def plan_of(name: str, page: MetricsPage) -> EnginePlan | None:
    """Return None if the engine measures nothing."""
    measured: dict[str, dict[str, float]] = {eviction: {} for eviction in EVICTIONS}
    for labels, rate in page.series.get(HIT_RATE_AT, ()):
        if _is_number(size := labels.get("capacity", "")) and (eviction := labels.get("eviction")) in measured:
            measured[eviction][size] = rate
    found = sorted({size for of_one in measured.values() for size in of_one}, key=float)
    host = sum(page.values("kvbm_tier_capacity_bytes", tier="host"))
    rates = {
        eviction: [of_one[size] for size in found] for eviction, of_one in measured.items() if len(of_one) == len(found)
    }
    if not found or not rates or not host:
        return None
    sizes = tuple(float(size) * host for size in found)
    names = tuple(format_size(round(size)) for size in sizes)
    tokens, requests = sum(page.values("kvbm_prompt_tokens")), sum(page.values("kvbm_matches"))
    loaded = sum(sum(page.values("kvbm_prompt_tokens", source=source)) for source in LOADED)
    saved_s = sum(page.values("kvbm_saved_prefill_seconds"))
    prompts = Prompts(tokens / requests if requests else None, loaded / saved_s if saved_s and loaded else None)
    computed = sum(page.values("kvbm_prompt_tokens", source="computed"))
    return EnginePlan(name, Curve(names, sizes, rates), prompts, 1 - computed / tokens if tokens else None)


def _is_number(text: str) -> bool:
    try:
        return 0 < float(text) < 1e6
    except ValueError:
        return False


def text(plan: EnginePlan, prices: Prices | None) -> str:
    curve = plan.curve
    rows = [("host memory", *curve.rates)]
    rows += [(name, *rates) for name, rates in zip(curve.names, curve.shown_rates(), strict=True)]
    lines = advice.sentences(curve, plan.prompts, prices)
    return "\n".join([_head(plan), "", table(rows, right=tuple(range(len(rows[0])))), "", *lines])


def _head(plan: EnginePlan) -> str:
    own = "" if plan.hit_rate is None else f"; {plan.hit_rate:.1%} of its prompt tokens came from caches so far"
    return f"{one_line(plan.name)}: hit rates for its last requests{own}"


def as_data(plan: EnginePlan, prices: Prices | None) -> dict[str, Any]:
    curve = plan.curve
    assert curve.sizes is not None, "an engine knows the bytes of its blocks"
    return {
        "name": plan.name,
        "hit_rate": plan.hit_rate,
        "curve": [
            {"policy": eviction, "capacity_bytes": round(size), "hit_rate": rate}
            for eviction, rates in curve.rates.items()
            for size, rate in zip(curve.sizes, rates, strict=True)
        ],
        **advice.as_data(curve, plan.prompts, prices),
    }
