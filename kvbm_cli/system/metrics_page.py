"""MetricsPage: the wanted series of a page in Prometheus' text format.

A page of vLLM has hundreds of lines, most of them buckets of histograms. Only the lines of wanted names are parsed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
TOTAL = "_total"
LARGEST, SMALLEST = 1e30, 1e-30  # so that no sum, product or ratio of a few values overflows


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Series by name without `_total`: labels and value. A value that is not finite, or beyond LARGEST, is left out."""

    series: dict[str, list[tuple[dict[str, str], float]]]
    is_readable: bool = True

    @classmethod
    def parse(cls, text: str, names: Collection[str]) -> MetricsPage:
        """Read the series with these names, given without `_total`. `is_readable` is False if no line of the text is a
        comment or a series, as on an error page."""
        series: dict[str, list[tuple[dict[str, str], float]]] = {}
        is_readable = not text
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0].removesuffix(TOTAL)
            if name not in names:
                is_readable = is_readable or line.startswith("# ") or _LINE.match(line) is not None
                continue
            found = _LINE.match(line)
            value = None if found is None else _number(found[3])
            if found is not None and value is not None:
                is_readable = True
                series.setdefault(name, []).append((dict(_LABEL.findall(found[2] or "")), value))
        return cls(series, is_readable)

    def values(self, name: str, **labels: str) -> list[float]:
        wanted = labels.items()
        return [value for found, value in self.series.get(name, ()) if wanted <= found.items()]

    def labels_of(self, name: str) -> list[dict[str, str]]:
        return [labels for labels, _ in self.series.get(name, ())]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not abs(value) <= LARGEST:  # NaN too
        return None
    return value if abs(value) >= SMALLEST else 0.0
