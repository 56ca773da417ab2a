"""The page of `kvbm plan --html FILE`: the curves, the table and the sentences in one file.

It looks like the report of `kvbm bench`, requires neither scripts nor network, and equal input gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.bench.show.elements import Markup, bullets, element, join, prose, table
from kvbm_cli.bench.show.page import page_files, policy
from kvbm_cli.plan.advice import Curve
from kvbm_cli.system.filesystem import write_atomically

WIDTH, HEIGHT = 720, 300
LEFT, BOTTOM, TOP, RIGHT = 50, 40, 15, 30
COLOURS = ("var(--arm-1)", "var(--arm-0)")
LINES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of hit rates


@dataclass(frozen=True, slots=True)
class PlanSection:
    """What the page says of a trace, or of an engine."""

    title: str
    curve: Curve
    sentences: Sequence[str]


def write_page(path: Path, sections: Sequence[PlanSection]) -> None:
    """Write the page atomically. Raises EnvironmentProblem."""
    try:
        write_atomically(path, page(sections))
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{path}`: {reason_of(error)}") from None


def page(sections: Sequence[PlanSection]) -> str:
    _, style = page_files()
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy([], style)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", "kvbm plan"),
        element("style", Markup(style)),
    )
    body = element("main", element("h1", "Hit rate by capacity"), [_section(one) for one in sections])
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body), lang='en')}\n"


def _section(one: PlanSection) -> Markup:
    curve = one.curve
    rows = [(name, *rates) for name, rates in zip(curve.names, curve.shown_rates(), strict=True)]
    return element(
        "section",
        element("p", one.title, class_="kicker"),
        element("figure", chart(curve)),
        table("Hit rates", ("capacity", *curve.rates), rows),
        bullets([prose(sentence) for sentence in one.sentences]),
    )


def chart(curve: Curve) -> Markup:
    """Return the curves as a drawing, with the capacities at equal distances."""
    steps = max(1, len(curve.names) - 1)

    def x(index: int) -> float:
        return LEFT + index * (WIDTH - LEFT - RIGHT) / steps

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - rate * (HEIGHT - BOTTOM - TOP)

    parts: list[Markup] = []
    for rate in LINES:
        parts.append(
            element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y(rate):.1f}", y2=f"{y(rate):.1f}", stroke="var(--grid)")
        )
        parts.append(_label(f"{rate:.0%}", LEFT - 6, y(rate) + 4, anchor="end"))
    for index, name in enumerate(curve.names):
        parts.append(_label(name, x(index), HEIGHT - BOTTOM + 20, anchor="middle"))
    for colour, (eviction, rates) in zip(COLOURS, curve.rates.items(), strict=False):
        points = " ".join(
            f"{'M' if index == 0 else 'L'}{x(index):.1f} {y(rate):.1f}" for index, rate in enumerate(rates)
        )
        parts.append(element("path", d=points, fill="none", stroke=colour, stroke_width=2))
        for index, rate in enumerate(rates):
            title = element("title", f"{eviction}, {curve.names[index]}: {rate:.1%}")
            parts.append(
                Markup(f'<circle cx="{x(index):.1f}" cy="{y(rate):.1f}" r="3.5" fill="{colour}">{title}</circle>')
            )
    legend = join(
        [
            _label(eviction, LEFT + 12 + 90 * number, TOP + 2, anchor="start", fill=colour)
            for number, (colour, eviction) in enumerate(zip(COLOURS, curve.rates, strict=False))
        ]
    )
    return element(
        "svg",
        parts,
        legend,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width="100%",
        role="img",
        aria_label="Hit rate by capacity; the table has the numbers",
    )


def _label(text: str, x: float, y: float, *, anchor: str, fill: str = "var(--muted)") -> Markup:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, font_size=12, fill=fill)
