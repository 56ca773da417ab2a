"""Draws the panels of the dashboard from what a Prometheus has recorded, as one SVG picture.

    python deploy/observability/draw_panels.py --url http://127.0.0.1:9090 --minutes 5 --output panels.svg

It is no picture of Grafana: it runs the same expressions, and draws their samples as lines. For the docs, and for
machines without Grafana.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parent / "grafana/dashboards/kvbm.json"
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT, GAP, HEAD = 3, 360, 200, 12, 40
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 30, 44  # margins of the lines in a panel
COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
SHOWN_SERIES = 6
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
UNITS = {"s": " s", "Bps": "B/s", "bytes": "B", "reqps": "/s", "percentunit": "%", "short": "", "bool": "", "none": ""}
STEPS = 120

Series = tuple[str, list[tuple[float, float]]]  # name, and pairs of time and value
QueryRange = Callable[[str], Sequence[Mapping[str, Any]]]


def picture(dashboard: Mapping[str, Any], query_range: QueryRange, *, note: str) -> str:
    """Return the SVG. `query_range(expression)` returns the result of Prometheus; `note` says what was recorded."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * (PANEL_WIDTH + GAP) + GAP, HEAD + rows * (PANEL_HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(GAP, 25, f"Drawn by draw_panels.py from samples in Prometheus, not a picture of Grafana. {note}", 13),
    ]
    for number, panel in enumerate(panels):
        x = GAP + number % COLUMNS * (PANEL_WIDTH + GAP)
        y = HEAD + number // COLUMNS * (PANEL_HEIGHT + GAP)
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel, query_range)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Mapping[str, Any], query_range: QueryRange) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    series = [one for target in panel["targets"] for one in _series(target, query_range)]
    parts = [
        f'<rect width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#ccc"/>',
        _text(10, 19, panel["title"], 13, weight="bold"),
    ]
    points = [point for _, line in series for point in line]
    if not points:
        return "".join([*parts, _text(LEFT, PANEL_HEIGHT / 2, "no samples", 12, colour="#777")])
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    most = max(max(value for _, value in points), 0.0) or 1.0
    for share in (0.0, 0.5, 1.0):
        y = _y(share)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{PANEL_WIDTH - RIGHT}" stroke="#eee"/>')
        parts.append(_text(LEFT - 4, y + 4, shown(share * most, unit), 10, anchor="end", colour="#555"))
    for number, (name, line) in enumerate(series[:SHOWN_SERIES]):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{_x(at, first, last):.1f},{_y(max(value, 0.0) / most):.1f}" for at, value in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x, y = LEFT + number % 3 * 100, PANEL_HEIGHT - 18 + number // 3 * 13
        parts.append(_text(x, y, name[:17], 10, colour=colour))
    return "".join(parts)


def _series(target: Mapping[str, Any], query_range: QueryRange) -> list[Series]:
    expression = target["expr"].replace("$__rate_interval", "30s").replace("$instance", ".*").replace("$engine", ".*")
    found = []
    for one in query_range(expression):
        name = target.get("legendFormat", "")
        for label, value in one["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        line = [(float(at), float(value)) for at, value in one["values"] if float(value) == float(value)]  # no NaN
        if line:
            found.append((name, line))
    return found


def shown(value: float, unit: str) -> str:
    """Return a value with its unit, short."""
    if unit == "percentunit":
        value *= 100
    for factor, prefix in PREFIXES if unit != "percentunit" else ():
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{UNITS.get(unit, '').strip()}"
    if unit == "s" and 0 < value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g}{UNITS.get(unit, '')}"


def _x(at: float, first: float, last: float) -> float:
    return LEFT + (PANEL_WIDTH - LEFT - RIGHT) * (at - first) / ((last - first) or 1.0)


def _y(share: float) -> float:
    return TOP + (PANEL_HEIGHT - TOP - BOTTOM) * (1 - share)


def _text(
    x: float, y: float, text: str, size: int, *, anchor: str = "start", colour: str = "#222", weight: str = "normal"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'


def recorded(url: str, minutes: float) -> QueryRange:
    """Return a function that asks a Prometheus for the last minutes."""
    end = time.time()
    span = {"start": f"{end - 60 * minutes:.3f}", "end": f"{end:.3f}", "step": f"{60 * minutes / STEPS:.3f}"}

    def query_range(expression: str) -> Sequence[Mapping[str, Any]]:
        asked = urllib.parse.urlencode({"query": expression, **span})
        with urllib.request.urlopen(f"{url}/api/v1/query_range?{asked}", timeout=30) as answer:
            result: list[Mapping[str, Any]] = json.load(answer)["data"]["result"]
        return result

    return query_range


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:9090", help="address of Prometheus")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--note", default="", help="what was recorded")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    dashboard = json.loads(DASHBOARD.read_text())
    options.output.write_text(picture(dashboard, recorded(options.url, options.minutes), note=options.note))


if __name__ == "__main__":
    main()
