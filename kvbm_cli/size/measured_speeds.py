"""MeasuredSpeeds: how long tiers take to start and to fill on a machine, from what `kvbm doctor --json` measured."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbm.errors import UsageError, reason_of
from kvbm.sizing import Sizing
from kvbm.text.reading import parse_json, read_at_most
from kvbm_cli.terminal.quantities import shown_rate

MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """Bytes per second; None if doctor did not measure it."""

    allocation: float | None
    disk_write: float | None

    @classmethod
    def read(cls, path: Path) -> MeasuredSpeeds:
        """Read a file that `kvbm doctor --json` wrote. UsageError if it is not one."""
        try:
            checks = parse_json(read_at_most(path, MAX_BYTES))["checks"]
            facts = {check["name"]: check["facts"] for check in checks}
        except OSError as error:
            raise UsageError(f"cannot read `{path}`: {reason_of(error)}") from None
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"`{path}` is not a result of doctor", hint=f"run `kvbm doctor --json > {shlex.quote(str(path))}`"
            ) from None
        return cls(_rate(facts, "allocation rate", "bytes_per_s"), _rate(facts, "sequential", "write_bytes_per_s"))

    def times(self, sizing: Sizing) -> Mapping[str, float | None]:
        """Seconds to allocate G2 at start-up, and to fill G3 once. None if unknown."""
        disk = sizing.disk.total_bytes if sizing.disk is not None else None
        return {
            "start_s": sizing.host.total_bytes / self.allocation if self.allocation else None,
            "disk_fill_s": disk / self.disk_write if self.disk_write and disk is not None else None,
        }

    def lines(self, sizing: Sizing) -> Iterator[str]:
        times = self.times(sizing)
        if (start_s := times["start_s"]) is not None:
            yield f"start-up: allocating G2 takes {_duration(start_s)}, at {shown_rate(self.allocation or 0)}"
        if (fill_s := times["disk_fill_s"]) is not None:
            yield f"filling G3 once takes {_duration(fill_s)}, at {shown_rate(self.disk_write or 0)}"


def _rate(facts: Mapping[str, Mapping[str, object]], check: str, name: str) -> float | None:
    rate = facts.get(check, {}).get(name)
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
