"""ServeOptions: the options of `kvbm serve` besides the profile and its overrides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`port` is the text of `--port`, `log` the path of the engine's log; both are None by default."""

    port: str | None
    is_dry_run: bool
    is_forced: bool
    is_strict: bool
    is_detached: bool
    is_baseline: bool
    is_quiet: bool
    as_json: bool
    log: Path | None

    @property
    def streams_log(self) -> bool:
        """Whether the engine's log is printed while it runs."""
        return not (self.is_quiet or self.is_detached)
