"""Prints a summary in at most 80 columns: the arms, the turns, the load of the reference, and the verdict."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvbm_cli.terminal.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 80
ARM_AND_BAR_CELLS = 19
LONGEST_ARM = 13
NUMBER_WIDTHS = (6, 6, 6, 6, 7, 7, 9, 7)
EIGHTHS = " ▏▎▍▌▋▊▉█"
UNMEASURED = ("invalid", "wrong")
COLOURS = {"faster": "green", "same": "yellow", "slower": "red", "invalid": "red", "wrong": "red"}


def show(summary: dict[str, Any], console: Console, *, directory: str | os.PathLike[str]) -> None:
    """Print the page, with the numbers of the summary rounded."""
    from rich.padding import Padding
    from rich.text import Text

    summary = _printable(summary)
    workload = summary["workload"]
    console.print(
        f"\n{workload['name']}: {workload['users']} users of {workload['turns']} turns, a request every "
        f"{summary['plan']['interval_s']:g} s",
        highlight=False,
    )
    for line in (_schedule_line(summary), *_profile_lines(summary)):
        console.print(line, highlight=False)
    console.print(_arms_table(summary))
    for line in _turn_lines(summary["arms"]):
        console.print(Text(line))
    console.print(f"\n{_load_line(summary)}", highlight=False)
    if floor_line := _floor_line(summary):
        console.print(floor_line, highlight=False)
    console.print(_outputs_line(summary), highlight=False)
    verdict = summary["verdict"]
    console.print()
    console.print(Text.assemble((f"{verdict}: ", f"bold {COLOURS[verdict]}"), summary["explanation"]))
    if summary["hint"]:
        console.print(Text(f"hint: {summary['hint']}"))
    for caveat in summary["caveats"]:
        console.print(Padding(Text(f"note: {caveat}", style="dim"), (0, 0, 0, 2)))
    console.print(f"\nevery request: {printable(os.fspath(directory))}", highlight=False, soft_wrap=True)


def _printable(value: Any) -> Any:
    """Returns the value with every text in it printable: names and errors come from profiles and engines."""
    if isinstance(value, dict):
        return {name: _printable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def _schedule_line(summary: dict[str, Any]) -> str:
    """How the arms ran. Results of two runs are comparable only if this is equal."""
    if summary["workload"]["schedule"]["arms"] == "interleaved":
        apart_s = summary["plan"]["interval_s"] / len(summary["arms"])
        return f"arms: interleaved, all engines at the same time, launches {apart_s:.3g} s apart"
    return "arms: in turn, one engine after the other"


def _profile_lines(summary: dict[str, Any]) -> list[str]:
    """Which profile an arm ran and what its tiers hold, and the keys that differ; nothing for the baseline."""
    if (profiles := summary.get("compared_profiles")) is None:
        return []
    lines = [f"{arm}: profile {about['name']}; {_tier_sizes(about['tiers'])}" for arm, about in profiles.items()]
    keys = ", ".join(summary["profile_differences"])
    return [*lines, f"they differ in {keys}" if keys else "the profiles are equal"]


def _tier_sizes(tiers: dict[str, Any] | None) -> str:
    """`tiers` is `None`, and so is G1, where only the engine knows the size."""
    if tiers is None:
        return "tier sizes unknown"
    return ", ".join(f"{name} {tier['tokens']:,}" for name, tier in tiers.items() if tier is not None) + " tokens"


def _arms_table(summary: dict[str, Any]) -> Table:
    """One column per arm, one row per quantity with its unit."""
    from rich import box
    from rich.table import Table

    arms, turns = summary["arms"].values(), summary["workload"]["turns"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column(f"turns 2 to {turns}" if turns > 2 else f"turn {turns}", no_wrap=True)
    for name in summary["arms"]:
        table.add_column(name, justify="right", no_wrap=True)
    for label, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("end to end", "end_to_end_ms")):
        for percent in ("p50", "p90", "p99"):
            table.add_row(f"{label} {percent}, ms", *(_milliseconds(arm[key][percent]) for arm in arms))
    table.add_section()
    for label, tier in (("from G1", "g1"), ("from G2", "g2"), ("computed", "computed")):
        table.add_row(f"prompt tokens {label}, all turns", *(_count(arm["prompt_tokens"][tier]) for arm in arms))
    table.add_row("requests that failed", *(_count(arm["errors"]) for arm in arms))
    return table


def _turn_lines(arms: dict[str, Any]) -> list[str]:
    """One line per turn and arm; the bars show medians, all on one scale."""
    width = min(LONGEST_ARM, max(map(len, arms))) + 1
    bar_cells = ARM_AND_BAR_CELLS - width
    medians = [turn["ttft_ms"]["p50"] or 0.0 for arm in arms.values() for turn in arm["turns"]]
    longest = max(medians, default=0.0) or 1.0
    lines = [_turn_line("", f"{'':<{width}}TTFT, ms", "p50", "p90", "p99", "ITL", "G1", "G2", "computed", "failed")]
    for turns in zip(*(arm["turns"] for arm in arms.values()), strict=True):
        for position, (name, turn) in enumerate(zip(arms, turns, strict=True)):
            lines.append(
                _turn_line(
                    f"turn {turn['turn']}" if position == 0 else "",
                    f"{name[:LONGEST_ARM]:<{width}}" + _bar((turn["ttft_ms"]["p50"] or 0.0) / longest, bar_cells),
                    *(_milliseconds(turn["ttft_ms"][percent]) for percent in ("p50", "p90", "p99")),
                    _milliseconds(turn["itl_ms"]["p50"]),
                    *(_count(turn["prompt_tokens"][tier]) for tier in ("g1", "g2", "computed")),
                    _count(turn["errors"]),
                )
            )
    return lines


def _turn_line(turn: str, arm_and_bar: str, *numbers: str) -> str:
    cells = (f"{number:>{width}}" for number, width in zip(numbers, NUMBER_WIDTHS, strict=True))
    return f"{turn:<7}{arm_and_bar:<{ARM_AND_BAR_CELLS}}{''.join(cells)}"


def _bar(share: float, cells: int) -> str:
    full, eighths = divmod(round(share * cells * 8), 8)
    return "█" * full + (EIGHTHS[eighths] if eighths else "") or EIGHTHS[1]


def _load_line(summary: dict[str, Any]) -> str:
    reference = summary["compared"]["reference"]
    load = summary["arms"][reference]
    queue_ms, queue_share = load["queue_wait_ms"], load["queue_share_of_ttft"]
    waits = "queue time unknown" if queue_ms is None else f"{_milliseconds(queue_ms)} ms in its queue per request"
    part = "" if queue_share is None else f", {queue_share:.1%} of its TTFT"
    return f"{reference} load: busy {load['utilisation']:.0%} of the time, {waits}{part}"


def _outputs_line(summary: dict[str, Any]) -> str:
    differences = summary["largest_logprob_difference"].values()
    known = [difference for difference in differences if difference is not None]
    count = sum(len(keys) for keys in summary["different_answers"].values())
    tokens = "all answers are equal, token for token" if count == 0 else f"{count} answers differ"
    return f"{tokens}; logprobs differ by {max(known):.2g} at most" if known else tokens


def _floor_line(summary: dict[str, Any]) -> str | None:
    ratio, share = summary["kvbm_over_floor"], summary["share_of_possible_gain"]
    if ratio is None or summary["verdict"] in UNMEASURED:
        return None
    measured = summary["compared"]["measured"]
    floor = "the floor (G1 large enough for everything)"
    if ratio < 1:
        gain = "" if share is None else ": all of the possible gain"
        return f"TTFT of {measured} equals that of {floor} within the noise of this run{gain}"
    gain = "" if share is None else f"; {max(0.0, share):.0%} of the possible gain"
    return f"TTFT of {measured} is {ratio:.2f} times that of {floor}{gain}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value}"
