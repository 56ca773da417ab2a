"""Check: the result of one check, with its state, finding and remedy."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

Fact = str | int | float | bool | None


class CheckState(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """`finding` and `remedy` are one line each. A remedy names a command or a profile key. `facts` are for JSON."""

    name: str
    state: CheckState
    finding: str
    remedy: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)


def rate(bytes_per_s: float) -> str:
    """Format a rate in decimal units: `2.50 GB/s`."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


def capacity(byte_count: int) -> str:
    """Format a capacity for a profile: whole units, rounded down."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if byte_count >= 10 * factor:
            return f"{byte_count // factor}{unit}"
    return f"{byte_count // 1000}KB"


def ok(name: str, finding: str, /, **facts: Fact) -> Check:
    return Check(name, CheckState.OK, finding, None, facts)


def warning(name: str, finding: str, remedy: str | None = None, /, **facts: Fact) -> Check:
    return Check(name, CheckState.WARNING, finding, remedy, facts)


def failure(name: str, finding: str, remedy: str | None = None, /, **facts: Fact) -> Check:
    return Check(name, CheckState.FAILURE, finding, remedy, facts)


def skipped(name: str, finding: str, remedy: str | None = None) -> Check:
    return Check(name, CheckState.SKIPPED, finding, remedy)
