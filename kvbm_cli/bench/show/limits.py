"""What `kvbm bench --find-limit` prints: a row per arm, and a sentence per reference."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from kvbm_cli.terminal.console import print_data, print_json, table

if TYPE_CHECKING:
    from kvbm_cli.bench.limit.found import ArmLimit, FoundLimits


def show_limits(found: FoundLimits, directory: str | os.PathLike[str], *, as_json: bool) -> None:
    if as_json:
        print_json(found.to_json())
        return
    rows = [(one.arm, _bounds(one), str(one.probes), f"{one.different} of {one.compared}") for one in found.arms]
    lines = [table([("arm", "requests/s", "probes", "answers that differ"), *rows], right=(2, 3)), ""]
    lines += [found.sentence(reference) for reference in found.references]
    lines += [f"note: {note}" for note in found.notes]
    print_data("\n".join([*lines, "", f"every probe: {os.fspath(directory)}"]))


def _bounds(one: ArmLimit) -> str:
    bounds = one.bounds
    if bounds.low == 0:
        return "none holds" if math.isinf(bounds.high) else f"none holds, {bounds.high:.3g} fails"
    if math.isinf(bounds.high):
        return f"{bounds.low:.3g} holds, none fails"
    text = f"{bounds.low:.3g} to {bounds.high:.3g}"
    return text if bounds.is_known else f"{text}: noise forbids an answer"
