"""Why: one cause, and how its numbers are written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Why:
    """`key` is the profile key, the workload key or the option to change; `None` if there is none."""

    cause: str
    text: str
    key: str | None = None


def share(value: float) -> str:
    """Return a share with the digits that tell it from 0 and from 1."""
    percent = 100 * value
    return f"{percent:.1f}%" if 0 < percent < 10 or 90 < percent < 99.95 else f"{percent:.0f}%"


def milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"
