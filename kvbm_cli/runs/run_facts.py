"""RunFacts: the content of a run's run.json, and the checks that make it safe to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvbm.text.reading import parse_json
from kvbm_cli.system.process_identity import ProcessIdentity

FORMAT = 1
LATEST_S = 1e11  # in the year 5138


class UnreadableFacts(ValueError):
    """The content of a run.json cannot be used; the message says why."""


class RunState(StrEnum):
    """State of a run as its launcher writes it. Readers see DEAD for a run whose launcher was killed."""

    STARTING = "starting"
    HEALTHY = "healthy"
    STOPPING = "stopping"
    ENDED = "ended"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Content of run.json. Times are seconds since 1970; `memory_bytes` is host memory for blocks (G2), `engine_bytes`
    that of weights and G1 of an engine on a CPU. `metrics_url` has the kvbm_* series; if it is empty, the server of the
    engine has them. `chosen` says by tier, as G2, how kvbm chose its size."""

    name: str
    profile: str
    profile_path: str
    engine: str
    model: str
    url: str
    ports: tuple[int, ...]
    logs: Mapping[str, str]
    launcher: ProcessIdentity
    memory_bytes: int
    disk_directory: str | None
    directory: str
    command: tuple[str, ...]
    versions: Mapping[str, str]
    stop_timeout_s: float
    started_s: float
    processes: Mapping[str, ProcessIdentity] = field(default_factory=dict)
    is_detached: bool = False
    is_baseline: bool = False
    state: RunState = RunState.STARTING
    ready_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    message: str = ""
    metrics_url: str = ""
    engine_bytes: int = 0
    chosen: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def log_paths(self) -> dict[str, Path]:
        return {name: Path(path) for name, path in self.logs.items()}

    @classmethod
    def from_json(cls, text: str) -> RunFacts:
        """Raise UnreadableFacts for invalid content. Ignores keys of later versions."""
        later = False
        try:
            content = parse_json(text)
            later = isinstance(content, dict) and content.get("format", FORMAT) != FORMAT
            return cls._from_content(content)
        except (ValueError, TypeError, KeyError, AttributeError):
            why = "has the format of another version" if later else "is damaged" if text else "is empty"
            raise UnreadableFacts(why) from None

    @classmethod
    def _from_content(cls, content: Any) -> RunFacts:
        """Raise ValueError, TypeError, KeyError or AttributeError for invalid content."""
        known = {name: content[name] for name in (one.name for one in fields(cls)) if name in content}
        known["launcher"] = ProcessIdentity(**known["launcher"])
        known["processes"] = {name: ProcessIdentity(**one) for name, one in known.get("processes", {}).items()}
        known["state"] = RunState(known["state"])
        facts = cls(**{**known, "ports": tuple(known["ports"]), "command": tuple(known["command"])})
        if not facts._are_valid():
            raise ValueError("not written by a launcher")
        return facts

    def _are_valid(self) -> bool:
        """Whether every value has the right type and range. Raises ValueError or TypeError if it cannot be compared."""
        texts = [self.name, self.profile, self.profile_path, self.engine, self.model, self.url, self.directory]
        texts += [self.message, *self.command, *self.logs.values(), *self.versions.values(), *self.chosen.values()]
        texts += [self.disk_directory] if self.disk_directory is not None else []
        times = [self.started_s, self.stop_timeout_s, *(one for one in (self.ready_s, self.ended_s) if one is not None)]
        numbers = [*self.ports, self.memory_bytes, self.engine_bytes]
        numbers += [self.exit_code] if self.exit_code is not None else []
        processes = [self.launcher, *self.processes.values()]
        address = urlsplit(self.url)
        return (
            all(isinstance(text, str) and "\0" not in text for text in texts)
            and all(0 <= moment < LATEST_S for moment in times)
            and all(isinstance(number, int) for number in numbers)
            and all(one.is_valid() for one in processes)
            and all(isinstance(flag, bool) for flag in (self.is_detached, self.is_baseline))
            and bool(self.logs and address.hostname and address.port is not None)
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"
