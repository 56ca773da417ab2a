"""Templates that escape their values: only `Markup` enters the page unescaped.

Templates format numbers for people by filters. Each takes `None`, or a key that an older summary lacks, for an unknown
value and returns `None` for it. Charts get distributions, and fewer points with the same outline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from kvbm.config.sizes import format_size
from kvbm.text.outside import one_line, without_url_secrets
from kvbm_cli.terminal.quantities import utc_time

if TYPE_CHECKING:
    from jinja2 import Environment

THIN = "\u202f"  # narrow space that does not break
Point = tuple[float, float]
Formats = tuple[Callable[..., Any], ...]
ECDF_POINTS = 300


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table in a box that scrolls. The first column names the row; the first `names` columns are text, the others
    are numbers. `None` is shown as a dash."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | None]]
    names: int = 1


def render(template: str, **values: Any) -> str:
    """Return a page. `template` is the path of a file in kvbm_cli, whose values are escaped unless they are Markup."""
    return f"{_templates().get_template(template).render(**values)}\n"


@cache
def _templates() -> Environment:
    from jinja2 import ChainableUndefined, Environment, FileSystemLoader, StrictUndefined

    class Absent(ChainableUndefined, StrictUndefined):
        """A key that an older summary lacks: unknown to a filter, and an error anywhere else."""

    found = Environment(
        loader=FileSystemLoader(Path(__file__).resolve().parents[2]),
        autoescape=True,
        finalize=printable_text,
        trim_blocks=True,
        undefined=Absent,
    )
    words: Formats = (address, interval, prose, sentence_case, with_interval)
    numbers: Formats = (count, day, decimal, microseconds, percent, ratio, size)
    found.filters.update({one.__name__: one for one in (*numbers, *words)})
    found.filters["text"] = string
    for_macros: Formats = (decimal, interval_words, median_interval, percent, versus)
    found.globals.update({one.__name__: one for one in for_macros})
    found.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return found


def printable_text(value: object) -> str:
    """Replace control characters, marks of text direction and lone surrogates, except in HTML. None becomes empty."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else one_line(str(value)).encode("utf-8", "backslashreplace").decode("utf-8")


def prose(sentence: str) -> Markup:
    """Return a sentence whose `code` is in backticks."""
    parts = sentence.split("`")
    if len(parts) % 2 == 0:
        parts = [sentence]
    forms = (Markup("<code>{}</code>" if index % 2 else "{}") for index in range(len(parts)))
    return Markup().join(form.format(printable_text(part)) for form, part in zip(forms, parts, strict=True))


def at(data: Any, *path: str) -> Any:
    """Return the value below the keys, `None` where one of them is missing."""
    for key in path:
        if not isinstance(data, dict):
            return None
        data = data.get(key)
    return data


def number(value: Any) -> float | None:
    """Return the value if it is a finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def listing(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def strings(value: Any) -> list[str]:
    return [item for item in listing(value) if isinstance(item, str)]


def string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def decimal(value: Any) -> str | None:
    """Three digits, more of a number above 1000."""
    amount = number(value)
    if amount is None:
        return None
    size = abs(amount)
    return grouped(f"{amount:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}")


def grouped(digits: str) -> str:
    return digits.replace(",", THIN)


def count(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else grouped(f"{amount:,.0f}")


def ratio(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else f"{amount:.{2 if abs(amount) < 10 else 1}f}"


def percent(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else f"{amount * 100:.0f}%"


def size(value: Any) -> str | None:
    amount = number(value)
    return None if amount is None else format_size(round(amount))


def microseconds(milliseconds: Any) -> str | None:
    amount = number(milliseconds)
    return None if amount is None else decimal(amount * 1e3)


def address(url: str | None) -> str | None:
    return None if url is None else without_url_secrets(url)


def versus(comparison: Mapping[str, Any]) -> str:
    return f"{comparison['measured']} against {comparison['reference']}"


def interval_words(ends: str | None) -> str:
    return "no interval: too few samples" if ends is None else f"95% interval {ends}"


def interval(value: Any, shown: Callable[[Any], str | None] = ratio) -> str | None:
    """`1.9 to 2.8` for a list of two numbers."""
    ends = listing(value)
    low, high = (shown(end) for end in ends) if len(ends) == 2 else (None, None)
    return None if low is None or high is None else f"{low} to {high}"


def with_interval(value: str | None, ends: str | None) -> str | None:
    return value if value is None or ends is None else f"{value} ({ends})"


def sentence_case(sentence: str) -> str:
    """Let a sentence start with a capital letter, unless its first word is a name such as `kvbm` or `p99`, and end with
    a stop."""
    first = sentence.partition(" ")[0].rstrip(",:;")
    start = sentence[:1].upper() if first.isalpha() and first != "kvbm" else sentence[:1]
    return start + sentence[1:] + ("" if sentence.endswith((".", "!", "?")) else ".")


def day(unix_s: Any) -> str | None:
    moment = number(unix_s)
    return None if moment is None else utc_time(moment).strftime("%Y-%m-%d %H:%M UTC")


def distribution(values: Sequence[float], limit: int = ECDF_POINTS) -> list[Point]:
    """(value, share of values up to it), ascending, at most `limit` points, with the smallest and the largest."""
    ordered = sorted(values)
    last = len(ordered) - 1
    ranks = range(len(ordered)) if last < limit else (round(step * last / (limit - 1)) for step in range(limit))
    return [(ordered[rank], (rank + 1) / len(ordered)) for rank in dict.fromkeys(ranks)]


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """Return about `limit` points that keep the outline: the lowest and the highest of equally long parts, and the
    last. `points` ascend in their first coordinate."""
    if len(points) <= limit:
        return list(points)
    length = -(-2 * len(points) // limit)
    parts = [points[start : start + length] for start in range(0, len(points), length)]
    ends = {end(part, key=itemgetter(1)) for part in parts for end in (min, max)}
    return sorted({points[0], *ends, points[-1]})


def median_interval(cell: dict[str, Any], arm: str) -> str | None:
    """Return the interval of an arm's median TTFT, which is part of its comparisons."""
    for found in listing(cell.get("comparisons")):
        for role in ("measured", "reference"):
            if at(found, role) == arm:
                return interval(at(found, "ttft_percentiles", "p50", role, "interval_95"), decimal)
    return None


def caveats_in(summary: Mapping[str, Any]) -> list[str]:
    """Return those of the run, then those of the cells, with the name of the cell if there are several."""
    cells = summary["cells"]
    own = [caveat if len(cells) == 1 else f"{cell['name']}: {caveat}" for cell in cells for caveat in cell["caveats"]]
    return list(dict.fromkeys([*(summary.get("caveats") or ()), *own]))
