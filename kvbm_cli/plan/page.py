"""The page of `kvbm plan --html FILE`: the curves, the table and the sentences in one file.

It looks like the report of `kvbm bench`, requires neither scripts nor network, and equal input gives equal bytes. The
template draws the curves.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_cli.bench.show.elements import ReportTable, render
from kvbm_cli.bench.show.page import page_files, policy
from kvbm_cli.plan.advice import CapacityPlan, Prices, sentences


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
                "curve": plan.curve,
                "table": ReportTable("Hit rates", ("capacity", *plan.curve.rates), plan.curve.rows(plan.curve.names)),
                "sentences": sentences(plan.curve, plan.prompts, prices),
            }
            for plan in plans
        ],
    )
