"""StateFinding: what a setting of an engine means for the states of a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StateLevel(Enum):
    """MISTAKE: vLLM refuses to start. WARNING: no hits, no cache, or a failure later. NOTE: what a setting means."""

    MISTAKE = "mistake"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class StateFinding:
    """`key` is the profile key that `message` is about; `hint` names what to set, for a mistake."""

    level: StateLevel
    key: str
    message: str
    hint: str | None = None
    disables: bool = False  # kvbm
