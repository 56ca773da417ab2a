"""The page of `kvbm plan --html FILE`: the curves, the table and the sentences in one file.

It looks like the report of `kvbm bench`, requires neither scripts nor network, and equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm_cli.bench.show.elements import ReportTable, render
from kvbm_cli.bench.show.page import page_files, policy
from kvbm_cli.plan.advice import CapacityPlan, Curve, Prices, sentences

WIDTH, HEIGHT = 720, 300
LEFT, BOTTOM, TOP, RIGHT = 50, 40, 15, 30
MUTED = "var(--muted)"
COLOURS = ("var(--arm-1)", "var(--arm-0)")
LINES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of hit rates


def page(plans: Sequence[CapacityPlan], prices: Prices | None) -> str:
    _, style = page_files()
    return render(
        "plan/plan.html.j2",
        title="kvbm plan",
        policy=policy([], style),
        style=style,
        scripts=[],
        sections=[
            {
                "title": plan.head,
                "chart": chart(plan.curve),
                "table": ReportTable("Hit rates", ("capacity", *plan.curve.rates), plan.curve.rows(plan.curve.names)),
                "sentences": sentences(plan.curve, plan.prompts, prices),
            }
            for plan in plans
        ],
    )


def chart(curve: Curve) -> dict[str, Any]:
    """Return what the drawing of the curves consists of, with the capacities at equal distances."""
    steps = max(1, len(curve.names) - 1)
    xs = [f"{LEFT + index * (WIDTH - LEFT - RIGHT) / steps:.1f}" for index in range(len(curve.names))]
    curves = list(zip(COLOURS, curve.rates.items(), strict=False))
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "lines": [f"{_y(rate):.1f}" for rate in LINES],
        "paths": [_path(curve, colour, eviction, xs) for colour, (eviction, _) in curves],
        "labels": [
            *((f"{LEFT - 6:.1f}", f"{_y(rate) + 4:.1f}", "end", MUTED, f"{rate:.0%}") for rate in LINES),
            *(
                (x, f"{HEIGHT - BOTTOM + 20:.1f}", "middle", MUTED, name)
                for x, name in zip(xs, curve.names, strict=True)
            ),
            *(
                (f"{LEFT + 12 + 90 * number:.1f}", f"{TOP + 2:.1f}", "start", colour, eviction)
                for number, (colour, (eviction, _)) in enumerate(curves)
            ),
        ],
    }


def _path(curve: Curve, colour: str, eviction: str, xs: Sequence[str]) -> dict[str, Any]:
    rates = curve.rates[eviction]
    places = [(x, f"{_y(rate):.1f}") for x, rate in zip(xs, rates, strict=True)]
    titles = [f"{eviction}, {name}: {rate:.1%}" for name, rate in zip(curve.names, rates, strict=True)]
    return {
        "colour": colour,
        "points": "M" + " L".join(f"{x} {y}" for x, y in places),
        "marks": [(x, y, title) for (x, y), title in zip(places, titles, strict=True)],
    }


def _y(rate: float) -> float:
    return HEIGHT - BOTTOM - rate * (HEIGHT - BOTTOM - TOP)
