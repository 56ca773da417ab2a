"""The page of `kvbm top`: a row per engine if there are several, then what all of them do together.

It fits into 80 columns and 24 lines with up to four engines; more are cut, and the page says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm.config.sizes import format_size
from kvbm.text.outside import one_line, shortened
from kvbm_cli.terminal.printable import printable
from kvbm_cli.terminal.quantities import shown_rate
from kvbm_cli.top.figures import LOADS, OFFLOADS, Figures, figures
from kvbm_cli.top.watched import WatchedEngine

if TYPE_CHECKING:
    from rich.text import Text

NOTHING = "-"
BAR = 24
LABEL = 9
TIER_COLUMNS = 50  # of a tier's line without its bar
FULL, PART, EMPTY = "█", "▌", "░"
KEYS = "q quit  p pause  s sort  r reverse"
OTHER_LINES = 20  # than the rows of engines


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    width: int
    text: Callable[[Figures], str]
    order: Callable[[Figures], float]


COLUMNS = (
    Column("tokens/s", 10, lambda one: rate(one.prompt_tokens_per_s), lambda one: one.prompt_tokens_per_s),
    Column("hit", 6, lambda one: percent(one.hit_rate), lambda one: one.hit_rate or 0.0),
    Column("saved", 7, lambda one: f"{one.saved_s_per_s:.1f} s", lambda one: one.saved_s_per_s),
    Column("load", 10, lambda one: shown_rate(one.bandwidth(LOADS)), lambda one: one.bandwidth(LOADS)),
    Column("offload", 10, lambda one: shown_rate(one.bandwidth(OFFLOADS)), lambda one: one.bandwidth(OFFLOADS)),
    Column("queued", 7, lambda one: rate(one.queued_blocks), lambda one: one.queued_blocks),
)


@dataclass(slots=True)
class View:
    """What the keys have chosen. `column` is an index of COLUMNS; None sorts by name."""

    column: int | None = None
    is_reversed: bool = False
    is_paused: bool = False

    def press(self, key: str) -> None:
        if key == "p":
            self.is_paused = not self.is_paused
        elif key == "r":
            self.is_reversed = not self.is_reversed
        elif key == "s":
            after = 0 if self.column is None else self.column + 1
            self.column = after if after < len(COLUMNS) else None

    def sorted(self, engines: Sequence[WatchedEngine]) -> list[WatchedEngine]:
        if self.column is None:
            return sorted(engines, key=lambda one: one.name, reverse=self.is_reversed)
        order = COLUMNS[self.column].order
        return sorted(
            engines,
            key=lambda one: order(figures([one.pair])) if one.pair else -1.0,
            reverse=not self.is_reversed,
        )


def page(
    engines: Sequence[WatchedEngine], warnings: Sequence[str], view: View, *, title: str, width: int, height: int | None
) -> Text:
    """Return the page, at most `width` wide and `height` high."""
    lines = [_head(title, view, width)]
    known = [one for one in engines if one.pair]
    if len(engines) != 1 or not known:
        lines += _rows(view.sorted(engines), view, width, None if height is None else max(1, height - OTHER_LINES))
    if known:
        lines += _details(figures([one.pair for one in known if one.pair]), known, width)
    lines += [("yellow", one_line(shortened(warning))) for warning in warnings]
    return _text(lines if height is None else lines[:height], width)


Line = tuple[str, str]  # style and text


def _text(lines: Sequence[Line], width: int) -> Text:
    from rich.text import Text

    made = Text(no_wrap=True, overflow="crop")
    for number, (style, text) in enumerate(lines):
        made.append(("\n" if number else "") + _cut(printable(text), width), style=style)
    return made


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _head(title: str, view: View, width: int) -> Line:
    left, right = f"kvbm top  {one_line(shortened(title))}", "paused: p continues" if view.is_paused else KEYS
    room = width - len(right) - 2
    return "bold", left if room < len("kvbm top") else f"{_cut(left, room):<{room}}  {right}"


def _rows(engines: Sequence[WatchedEngine], view: View, width: int, most: int | None) -> list[Line]:
    name_width = max(8, width - sum(column.width + 1 for column in COLUMNS))
    titles = [
        f"{'*' if view.column == index else ''}{column.title}".rjust(column.width)
        for index, column in enumerate(COLUMNS)
    ]
    lines: list[Line] = [("dim", f"{'engine':<{name_width}} {' '.join(titles)}")]
    for one in engines[:most]:
        name = _cut(one_line(shortened(one.name)), name_width).ljust(name_width)
        if one.pair is None:
            lines.append(("red" if one.problem else "dim", f"{name} {one.problem or 'reading'}"))
        else:
            found = figures([one.pair])
            lines.append(("", f"{name} {' '.join(column.text(found).rjust(column.width) for column in COLUMNS)}"))
    if most is not None and len(engines) > most:
        lines.append(("dim", f"and {len(engines) - most} more engines; enlarge the window"))
    return [*lines, ("", "")]


def _details(found: Figures, engines: Sequence[WatchedEngine], width: int) -> list[Line]:
    return [
        *_what(found, engines),
        *_tokens(found),
        *_tiers(found, width),
        *_transfers(found),
        _queues(found),
        *_troubles(found),
    ]


def _what(found: Figures, engines: Sequence[WatchedEngine]) -> list[Line]:
    info = {name: one_line(shortened(text)) for name, text in found.info.items()}
    parts = [info.get("engine_name", ""), info.get("engine_version", ""), info.get("model", "")]
    what = " ".join(filter(None, parts)) if len(engines) == 1 else f"{len(engines)} engines together"
    requests = ", ".join(f"{count:.0f} {name}" for name, count in found.requests.items())
    return [("dim", f"{what}{f'; requests: {requests}' if requests else ''}")]


def _tokens(found: Figures) -> list[Line]:
    total, hits = found.prompt_tokens_per_s, percent(found.hit_rate)
    shares = [f"{name} {percent(_share(each, total))}" for name, each in found.tokens_per_s.items()]
    matches = ", ".join(f"{name} {rate(each)}" for name, each in found.matches_per_s.items())
    return [
        ("", f"{'prompt':<{LABEL}}{rate(total)} tokens/s: {', '.join(shares)}"),
        ("green", f"{'saved':<{LABEL}}{found.saved_s_per_s:.1f} s of prefill per second; hit rate {hits}"),
        ("", f"{'lookups':<{LABEL}}per second: {matches or NOTHING}"),
    ]


def _tiers(found: Figures, width: int) -> list[Line]:
    lines = []
    for tier, (used, capacity) in found.tiers.items():
        share, sizes = _share(used, capacity), f"{format_size(int(used))} of {format_size(int(capacity))}"
        bar = _bar(share or 0.0, max(BAR, width - TIER_COLUMNS))
        lines.append(("cyan", f"{tier:<{LABEL}}{bar} {percent(share):>5}  {sizes}"))
    return lines


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _bar(share: float, size: int) -> str:
    halves = round(2 * size * min(1.0, max(0.0, share)))
    return (FULL * (halves // 2) + PART * (halves % 2)).ljust(size, EMPTY)


def _transfers(found: Figures) -> list[Line]:
    lines: list[Line] = [("dim", f"{'':<{LABEL}}{'':<18}{'bandwidth':>12}{'p50':>11}{'p99':>11}")]
    for label, pairs in (("load", LOADS), ("offload", OFFLOADS)):
        for source, target in pairs:
            if (one := found.transfers.get((source, target))) is not None:
                what = f"{label:<{LABEL}}{f'{source} to {target}':<18}"
                times = f"{duration(one.p50_s):>11}{duration(one.p99_s):>11}"
                lines.append(("", f"{what}{shown_rate(one.bytes_per_s):>12}{times}"))
                label = ""
    return lines


def _queues(found: Figures) -> Line:
    busy = [f"{name} {blocks:.0f} ({duration(age)})" for name, (blocks, age) in found.queues.items() if blocks or age]
    return "", f"{'queues':<{LABEL}}{', '.join(busy) or 'empty'}"


def _troubles(found: Figures) -> list[Line]:
    lines: list[Line] = []
    if found.failed_blocks_per_s:
        lines.append(("red", f"{'failed':<{LABEL}}{rate(found.failed_blocks_per_s)} blocks/s"))
    if found.off:
        lines.append(("red", f"{'off':<{LABEL}}{', '.join(found.off)}"))
    return lines


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
