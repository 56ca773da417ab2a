"""Probe programs that the doctor runs by path (`run_probe` in machine.py). The last line of JSON is the answer.

`engine` runs with the engine's interpreter. It does not import `kvbm_cli`, because that interpreter may lack it. `disk`
and `store` run with the interpreter of the command and import the other modules.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def answer(probe: Callable[..., DataclassInstance]) -> None:
    """Run a probe with the JSON object of the command line as its arguments. Each line on stdout is JSON:
    `{"phase": ...}` while it runs, then `{"report": ...}`."""

    def print_phase(text: str) -> None:
        print(json.dumps({"phase": text}), flush=True)

    report = probe(**json.loads(sys.argv[1]), on_phase=print_phase)
    print(json.dumps({"report": asdict(report)}), flush=True)
