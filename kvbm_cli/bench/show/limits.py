"""What `kvbm bench --find-limit` prints: a row per arm, and a sentence per reference."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING

from kvbm_cli.terminal.printable import printable

if TYPE_CHECKING:
    from kvbm_cli.bench.limit.found import ArmLimit, FoundLimits


def show_limits(found: FoundLimits, directory: str | os.PathLike[str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table("arm", "requests/s", "probes", "answers that differ", box=None, pad_edge=False)
    for one in found.arms:
        table.add_row(printable(one.arm), _bounds(one), str(one.probes), f"{one.different} of {one.compared}")
    console.print(table)
    for reference in found.references:
        console.print(found.sentence(reference))
    for note in found.notes:
        console.print(f"note: {note}")
    console.print(f"\nevery probe: {printable(os.fspath(directory))}", soft_wrap=True)


def _bounds(one: ArmLimit) -> str:
    bounds = one.bounds
    if bounds.low == 0:
        return "none holds" if math.isinf(bounds.high) else f"none holds, {bounds.high:.3g} fails"
    if math.isinf(bounds.high):
        return f"{bounds.low:.3g} holds, none fails"
    text = f"{bounds.low:.3g} to {bounds.high:.3g}"
    return text if bounds.is_known else f"{text}: noise forbids an answer"
