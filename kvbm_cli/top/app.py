"""`kvbm top`: its options and help."""

from __future__ import annotations

from typing import Annotated

from kvbm_cli.runs.app import LivingRunArgument
from kvbm_cli.terminal.options import JsonOption, flag, option


def top(
    run: LivingRunArgument = None,
    url: Annotated[
        str | None, option("--url", "URL", "Address of an engine or of its metrics, instead of a run.")
    ] = None,
    interval: Annotated[
        float, option("--interval -i", "SECONDS", "Time between two readings.", min=0.2, max=60.0)
    ] = 2.0,
    once: Annotated[bool, flag("--once", "Print one page and exit; also without a terminal.")] = False,
    json: JsonOption = False,
) -> int:
    """Show live what engines do.

    Keys: q quits, p pauses, s sorts by the next column, r reverses the order.
    """
    from kvbm_cli.top.command import run_top

    return run_top(run, url=url, interval_s=interval, once=once, as_json=json)
