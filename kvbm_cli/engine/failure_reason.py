"""FailureReason: why an engine exited or did not start, from its exit code, the kernel's counters and its log.

The error also shows the last lines of the log. A reason is given only if it is certain. The embedded engine prints
`error:` and `hint:` itself.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from kvbm.engines.vllm.versions import INSTALL_FOR_CPU
from kvbm_cli.engine.refused_flag import refusal

VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class FailureReason:
    text: str
    hint: str | None = None


def oom_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed since boot, 0 if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def failure_reason_of(lines: Sequence[str], exit_code: int, *, oom_kill_count: int = 0) -> FailureReason | None:
    """Return the reason, None if it is not certain. `lines` are the last ones of the log, `oom_kill_count` counts OOM
    kills during the run."""
    if oom_kill_count and exit_code != 0:
        return FailureReason("out of memory: the kernel's OOM killer killed a process", LESS_MEMORY)
    if (own := _own_error(lines)) is not None:
        return own
    if (refused := refusal(lines)) is not None:
        return FailureReason(*refused)
    return _known(lines) or _signal(exit_code)


LESS_MEMORY = "lower `tiers.host.capacity`; `kvbm status` lists the running engines"
_HINT = re.compile(r"^hint: (.+)")
_OWN = re.compile(r"^error: (.+)")


def _own_error(lines: Sequence[str]) -> FailureReason | None:
    """Return the last `error:` of the embedded engine with its `hint:`."""
    for index in range(len(lines) - 1, -1, -1):
        if found := _OWN.match(lines[index]):
            hints = filter(None, map(_HINT.match, lines[index + 1 :]))
            return FailureReason(found[1], next((hint[1] for hint in hints), None))
    return None


@cache
def _table() -> list[dict[str, str]]:
    """Return the rows of failures.yaml, and one whose hint is used above."""
    rows: list[dict[str, str]] = yaml.safe_load(Path(__file__).with_name("failures.yaml").read_text())
    pattern = r"[Cc]annot allocate memory|can't allocate memory|std::bad_alloc|MemoryError"
    return [*rows, {"pattern": pattern, "text": "out of memory", "hint": LESS_MEMORY}]


def _known(lines: Sequence[str]) -> FailureReason | None:
    """Return the reason of the last line that matches a pattern of the table."""
    for line in reversed(lines):
        for row in _table():
            if found := re.search(row["pattern"], line):
                return FailureReason(row["text"].format(*found.groups("")), row.get("hint"))
    return None


_DMESG = "check the kernel's messages with `dmesg | tail`"
_SIGNALS = {
    signal.SIGKILL: FailureReason("killed by SIGKILL, by a user or by the kernel's OOM killer", _DMESG),
    signal.SIGBUS: FailureReason(
        "killed by SIGBUS: a mapped page was not available, for example because /dev/shm is full", _DMESG
    ),
    signal.SIGILL: FailureReason(
        "killed by SIGILL: a library uses instructions that this CPU does not have",
        "for vLLM on a CPU, run `pip uninstall vllm` in its environment, then "
        f"`{INSTALL_FOR_CPU} --force-reinstall --no-deps`",
    ),
}


def _signal(exit_code: int) -> FailureReason | None:
    try:
        number = signal.Signals(exit_code - 128)
    except ValueError:
        return None
    return _SIGNALS.get(number, FailureReason(f"killed by {number.name}"))
