"""What the terminal shows: the progress of an experiment on stderr, then its summary in 80 columns.

The summary has per cell the arms, the turns and the load of the reference; then the verdict. The table of many arms is
wider. BenchProgress shows one live line on a terminal, and a line per phase elsewhere. The load client only changes
plain attributes; the thread of ProgressDisplay draws the line.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from kvbm.config.sizes import format_size
from kvbm_cli.bench.result.results import ALL, LOADED, TIERS, RequestRecord
from kvbm_cli.bench.show.elements import caveats_in
from kvbm_cli.terminal.printable import printable
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.quantities import counted, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 80
ARM_AND_BAR_CELLS = 19
LONGEST_ARM = 13
MOST_TURNS = 8
NUMBER_WIDTHS = (6, 6, 6, 6, 7, 7, 9, 7)
EIGHTHS = " ▏▎▍▌▋▊▉█"
COLOURS = {
    **dict.fromkeys(("inconclusive", "same", "measured"), "yellow"),
    **dict.fromkeys(("slower", "invalid", "wrong"), "red"),
    "faster": "green",
}
PERCENTS = ("p50", "p90", "p99")
COSTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tokens per core second", "tokens_per_core_s", lambda tokens: f"{tokens:,.0f}"),
    ("host memory, peak", "peak_memory_bytes", lambda size: format_size(round(size))),
    ("SSD written per 1,000 requests", "written_bytes_per_1000_requests", lambda size: format_size(round(size))),
    ("GPU energy per 1,000 requests, J", "energy_j_per_1000_requests", lambda joules: f"{joules:,.0f}"),
    ("price per million tokens", "price_per_1m_tokens", lambda price: f"{price:.4g}"),
)
RECENT_REQUESTS = 20  # of an arm, whose median is shown


def show(summary: dict[str, Any], console: Console, *, directory: str | os.PathLike[str]) -> None:
    """Print the page, with the numbers of the summary rounded."""
    from rich.padding import Padding
    from rich.text import Text

    summary = _printable(summary)
    for cell in summary["cells"]:
        _show_cell(cell, summary, console)
    verdict = summary["verdict"]
    console.print()
    console.print(Text.assemble((f"{verdict}: ", f"bold {COLOURS[verdict]}"), summary["explanation"]))
    if summary["hint"]:
        console.print(Text(f"hint: {summary['hint']}"))
    for line in _why_lines(summary):
        console.print(line)
    for caveat in caveats_in(summary):
        console.print(Padding(Text(f"note: {caveat}", style="dim"), (0, 0, 0, 2)))
    path = printable(os.fspath(directory))
    console.print(f"\nreport: {path}/report.html\nevery request: {path}", highlight=False, soft_wrap=True)


def _why_lines(summary: Mapping[str, Any]) -> Iterator[Any]:
    """Why a comparison shows no gain: a title, and one numbered paragraph per cause."""
    from rich.padding import Padding
    from rich.text import Text

    cells = summary["cells"]
    for cell in cells:
        for comparison in cell["comparisons"]:
            if not comparison["why_not"]:
                continue
            place = f" in {cell['name']}" if len(cells) > 1 else ""
            measured, reference = comparison["measured"], comparison["reference"]
            question = f"why {measured} was not faster than {reference}"
            if comparison["verdict"] == "invalid":
                question = f"why {measured} against {reference} is invalid"
            yield Text(f"{question}{place}:")
            for number, why in enumerate(comparison["why_not"], start=1):
                yield Padding(Text(f"{number}. {why['text']}"), (0, 0, 0, 2))


def _show_cell(cell: Mapping[str, Any], summary: Mapping[str, Any], console: Console) -> None:
    from rich.text import Text

    console.print(f"\n{_workload_line(cell)}", highlight=False)
    console.print(_schedule_line(cell), highlight=False)
    _print_whole(_arms_table(cell), console)
    for line in _turn_lines(cell["arms"]):
        console.print(Text(line))
    console.print()
    for comparison in cell["comparisons"]:
        for line in _comparison_lines(comparison, cell, has_several=len(summary["cells"]) > 1):
            console.print(Text(line))


def _print_whole(table: Table, console: Console) -> None:
    """Print a table with many arms wider than the console rather than with cut numbers."""
    from rich.measure import Measurement

    usual = console.width
    console.width = max(usual, Measurement.get(console, console.options.update(max_width=10_000), table).maximum)
    console.print(table)
    console.width = usual


def _printable(value: Any) -> Any:
    """Return the value with every text in it printable: names and errors come from profiles and engines."""
    if isinstance(value, dict):
        return {name: _printable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def _workload_line(cell: Mapping[str, Any]) -> str:
    plan = cell["plan"]
    parts = [f"{plan['requests']} requests of {plan['sessions']} sessions"]
    if plan["interval_s"]:
        burstiness = plan.get("burstiness")
        about = "" if burstiness is None else f" on average, burstiness {burstiness:g}"
        ramp = f", in the end every {plan['ramp_to_s']:g} s" if plan.get("ramp_to_s") else ""
        parts.append(f"one every {plan['interval_s']:g} s{ramp}{about}")
    if plan["concurrency"]:
        parts.append(f"{plan['concurrency']} sessions at a time")
    if cell["pressure"]:
        parts.append(f"working set {cell['pressure']:g} times G1")
    return f"{cell['name']}: {', '.join(parts)}"


def _schedule_line(cell: Mapping[str, Any]) -> str:
    """How the arms ran. Results of two runs are comparable only if this is equal."""
    pairs = counted(cell["pairs_done"], "pair")
    early = ", stopped early because the interval was tight" if cell["stopped_early"] else ""
    if cell["interleaved"]:
        return f"arms: interleaved, all engines at the same time, {pairs}"
    return f"arms: in turn, one engine after the other, {pairs} of alternating order{early}"


def _arms_table(cell: Mapping[str, Any]) -> Table:
    """One column per arm, one row per quantity with its unit."""
    from rich import box
    from rich.table import Table

    arms, primary = cell["arms"].values(), cell["plan"]["primary"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column("all requests" if primary == ALL else f"{primary} phase", no_wrap=True)
    for name in cell["arms"]:
        table.add_column(name, justify="right", no_wrap=True)
    for label, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("end to end", "end_to_end_ms")):
        for percent in PERCENTS:
            if any(arm[key][percent] is not None for arm in arms):
                table.add_row(f"{label} {percent}, ms", *(_milliseconds(arm[key][percent]) for arm in arms))
    if any(arm["goodput"] for arm in arms):
        goods = (f"{arm['goodput']['share']:.0%}" if arm["goodput"] else "-" for arm in arms)
        table.add_row(f"within {next(arm['goodput']['slo'] for arm in arms if arm['goodput'])}", *goods)
    table.add_section()
    for tier in TIERS:
        label = tier if tier == "computed" else f"from {tier.upper()}"
        if tier not in ("g3", "g4") or any(arm["prompt_tokens"].get(tier) for arm in arms):  # earlier ones lack g4
            counts = (_count(arm["prompt_tokens"].get(tier)) for arm in arms)
            table.add_row(f"prompt tokens {label}, all requests", *counts)
    table.add_row("requests that failed", *(_count(arm["errors"]) for arm in arms))
    costs = [arm.get("cost") or {} for arm in arms]  # earlier versions have none
    for label, key, shown in COSTS:
        if any(cost.get(key) is not None for cost in costs):
            table.add_row(label, *("-" if cost.get(key) is None else shown(cost[key]) for cost in costs))
    return table


def _turn_lines(arms: Mapping[str, Any]) -> Iterator[str]:
    """One line per turn and arm; the bars show medians, all on one scale."""
    turns = sorted({turn["turn"] for arm in arms.values() for turn in arm["turns"]})
    if len(turns) < 2:
        return
    width = min(LONGEST_ARM, max(map(len, arms))) + 1
    bar_cells = ARM_AND_BAR_CELLS - width
    medians = [turn["ttft_ms"]["p50"] or 0.0 for arm in arms.values() for turn in arm["turns"]]
    longest = max(medians, default=0.0) or 1.0
    columns = ("p50", "mean", "p90", "ITL", "G1", "loaded", "computed", "failed")
    yield _turn_line("", f"{'':<{width}}TTFT, ms", *columns)
    for number in turns[:MOST_TURNS]:
        label = f"turn {number}"
        for name, arm in arms.items():
            turn = next((one for one in arm["turns"] if one["turn"] == number), None)
            if turn is None:
                continue
            yield _turn_line(
                label,
                f"{name[:LONGEST_ARM]:<{width}}" + _bar((turn["ttft_ms"]["p50"] or 0.0) / longest, bar_cells),
                *(_milliseconds(turn["ttft_ms"][key]) for key in ("p50", "mean", "p90")),
                _milliseconds(turn["itl_ms"]["p50"]),
                _count(turn["prompt_tokens"]["g1"]),
                _count(_loaded(turn["prompt_tokens"])),
                _count(turn["prompt_tokens"]["computed"]),
                _count(turn["errors"]),
            )
            label = ""
    if len(turns) > MOST_TURNS:
        yield f"... and {len(turns) - MOST_TURNS} more turns: see report.html"


def _loaded(tokens: Mapping[str, int | None]) -> int | None:
    """Tokens from the tiers below G1; None if no number of them is known."""
    known = [count for tier in LOADED if (count := tokens.get(tier)) is not None]
    return sum(known) if known else None


def _turn_line(turn: str, arm_and_bar: str, *numbers: str) -> str:
    cells = (f"{number:>{width}}" for number, width in zip(numbers, NUMBER_WIDTHS, strict=True))
    return f"{turn:<7}{arm_and_bar:<{ARM_AND_BAR_CELLS}}{''.join(cells)}"


def _bar(share: float, cells: int) -> str:
    full, eighths = divmod(round(share * cells * 8), 8)
    return "█" * full + (EIGHTHS[eighths] if eighths else "") or EIGHTHS[1]


def _comparison_lines(comparison: Mapping[str, Any], cell: Mapping[str, Any], *, has_several: bool) -> Iterator[str]:
    measured, reference = comparison["measured"], comparison["reference"]
    prefix = f"{measured} against {reference}: "
    if has_several or len(cell["comparisons"]) > 1:
        yield f"{prefix}{comparison['verdict']}: {comparison['explanation']}"
    yield f"{prefix}{_load(cell['arms'][reference], reference)}"
    if noise := comparison["noise"]:
        yield f"{prefix}two runs of {reference} itself differ by {noise['ratio'] - 1:.1%} ({noise['source']})"
    else:
        yield f"{prefix}the noise between two runs of {reference} was not measured"
    if share := comparison["share_of_possible_gain"]:
        yield f"{prefix}{_share(share)}"
    yield f"{prefix}{_outputs(comparison['outputs'])}"


def _load(arm: Mapping[str, Any], name: str) -> str:
    wait_ms = arm["queue_wait_ms"]
    waits = "queue time unknown" if wait_ms is None else f"{_milliseconds(wait_ms)} ms in its queue per request"
    busy = "" if arm["utilisation"] is None else f"busy {arm['utilisation']:.0%} of the time, "
    return f"{name} was {busy}{waits}"


def _share(share: Mapping[str, Any]) -> str:
    if share["is_noise"]:
        return "all of the possible gain, within the noise of this run"
    interval = share["interval_95"]
    within = f" (95% interval {interval[0]:.0%} to {interval[1]:.0%})" if interval else ""
    return f"{max(0.0, share['value']):.0%} of the possible gain{within}"


def _outputs(outputs: Mapping[str, Any]) -> str:
    logprob = outputs["largest_logprob_difference"]
    probabilities = "" if logprob is None else f"; logprobs differ by {logprob:.2g} at most"
    return f"outputs {outputs['verdict']}: {outputs['reason']}{probabilities}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value}"


class BenchProgress(ProgressDisplay):
    """Follows the phases of an experiment. As a context manager it owns the terminal's last line."""

    def __init__(self) -> None:
        super().__init__(interval_s=0.0)
        self._answered = self._failed = 0
        self._ttft_ms: dict[str, deque[float]] = {}

    def phase(self, text: str) -> None:
        self._answered = self._failed = 0
        self._ttft_ms = {}
        self.report(text)

    def request_ended(self, record: RequestRecord) -> None:
        self._answered += record.is_ok
        self._failed += not record.is_ok
        if record.is_ok and record.ttft_ms is not None:
            self._ttft_ms.setdefault(record.arm, deque(maxlen=RECENT_REQUESTS)).append(record.ttft_ms)

    def line(self, phase: str, elapsed_s: float, width: int) -> str:
        """Return phase, counts and time. Drops the least important until the rest fits."""
        if not self.is_live:
            return phase
        details = []
        if self._answered or self._failed:
            details.append(f"{self._answered} answered" + (f", {self._failed} failed" if self._failed else ""))
        arms = dict(self._ttft_ms)  # the client's thread adds arms
        if arms:
            medians = (f"{name} {median(tuple(times)):.0f}" for name, times in arms.items())
            details.append(f"first token: {', '.join(medians)} ms")
        room, clock = width - 1, f"{duration(elapsed_s)} so far"
        while len(words := " · ".join([phase, *details, clock])) > room and details:
            details.pop()
        return words if len(words) <= room else f"{words[: room - 1]}…"
