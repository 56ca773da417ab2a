"""`kvbm plan RUN` and `--url`: the hit rates that running engines measure with `metrics.capacities`.

Read from the engine's metrics, once. The engine simulates host memory of a few other sizes with its own requests
(`kvbm/core/shadow_caches.py`), so nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbm.config.sizes import format_size
from kvbm.core.shadow_caches import EVICTIONS
from kvbm.errors import EnvironmentProblem
from kvbm.text.outside import one_line
from kvbm_cli.plan.advice import CapacityPlan, Curve, Prompts
from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.top.watched import EngineReader, MetricsTarget

HIT_RATE_AT = "kvbm_hit_rate_at"
LOADED = ("host", "disk", "object")
HINT = "set `metrics.capacities: true` in the profile and restart; the first request must have ended"


def live_plans(targets: Callable[[], Sequence[MetricsTarget]]) -> list[CapacityPlan]:
    """Return the plan of each engine that has measured something. Raises EnvironmentProblem if none has."""
    engines = EngineReader(targets).read()
    plans = [plan_of(one.name, one.readings[-1].page) for one in engines if one.readings]
    known = [plan for plan in plans if plan is not None]
    if not known:
        problems = "; ".join(f"{one.name}: {one.problem}" for one in engines if one.problem)
        raise EnvironmentProblem(
            "no engine has measured the hit rates of other capacities" + (f" ({problems})" if problems else ""),
            hint=HINT,
        )
    return known


def plan_of(name: str, metrics: MetricsPage) -> CapacityPlan | None:
    """Return None if the engine measures nothing."""
    measured: dict[str, dict[str, float]] = {eviction: {} for eviction in EVICTIONS}
    for labels, rate in metrics.series.get(HIT_RATE_AT, ()):
        if _is_number(size := labels.get("capacity", "")) and (eviction := labels.get("eviction")) in measured:
            measured[eviction][size] = rate
    found = sorted({size for of_one in measured.values() for size in of_one}, key=float)
    host = sum(metrics.values("kvbm_tier_capacity_bytes", tier="host"))
    rates = {
        eviction: [of_one[size] for size in found] for eviction, of_one in measured.items() if len(of_one) == len(found)
    }
    if not found or not rates or not host:
        return None
    sizes = tuple(float(size) * host for size in found)
    names = tuple(format_size(round(size)) for size in sizes)
    tokens, requests = sum(metrics.values("kvbm_prompt_tokens")), sum(metrics.values("kvbm_matches"))
    loaded = sum(sum(metrics.values("kvbm_prompt_tokens", source=source)) for source in LOADED)
    saved_s = sum(metrics.values("kvbm_saved_prefill_seconds"))
    prompts = Prompts(tokens / requests if requests else None, loaded / saved_s if saved_s and loaded else None)
    computed = sum(metrics.values("kvbm_prompt_tokens", source="computed"))
    hit_rate = 1 - computed / tokens if tokens else None
    own = "" if hit_rate is None else f"; {hit_rate:.1%} of its prompt tokens came from caches so far"
    curve = Curve(names, sizes, rates)
    points = curve.as_data("capacity_bytes", [round(size) for size in sizes])
    return CapacityPlan(
        f"{one_line(name)}: hit rates for its last requests{own}",
        curve,
        prompts,
        {"host memory": names},
        {"name": name, "hit_rate": hit_rate, "curve": points},
    )


def _is_number(text: str) -> bool:
    try:
        return 0 < float(text) < 1e6
    except ValueError:
        return False
