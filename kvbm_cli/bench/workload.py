"""A workload: who says how much to whom, and when. Read from a small YAML file, checked, frozen.

All lengths are in tokens of the engine's own tokenizer. Each user holds one conversation: the shared system prompt, an
own history, then per turn a question and an answer of fixed length, which the next turn's prompt repeats. Users take
turns in order, so that a user's conversation comes back only after everyone else's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvbm.errors import ProfileError, UsageError
from kvbm_cli.shipped import workloads_directory


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Schedule(_Section):
    """When requests are launched: a fixed time apart, whether or not earlier ones have been answered (open loop).

    Without `interval_s` it is chosen, before any arm is measured, such that an engine that computes every prompt is
    busy for `target_utilisation` of the time on this machine. `arms: interleaved` runs all engines at the same time,
    the launches of the arms evenly spread over the interval; a target below a third keeps them from meeting. It needs
    a machine with room for all of them. `in_turn` runs one engine after the other.
    """

    arms: Literal["interleaved", "in_turn"] = "in_turn"
    interval_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    target_utilisation: float = Field(default=0.5, gt=0, lt=1)


class Workload(_Section):
    name: str = Field(min_length=1)
    description: str = ""
    seed: int = Field(default=0, ge=0)
    users: int = Field(ge=1)
    turns: int = Field(ge=1)
    system_tokens: int = Field(ge=0)
    history_tokens: int = Field(ge=1)
    question_tokens: int = Field(ge=1)
    answer_tokens: int = Field(ge=1)
    history: Literal["recorded"] = "recorded"
    schedule: Schedule = Schedule()
    request_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)

    def prompt_tokens(self, turn: int) -> int:
        """Length of the prompt of turn 1, 2, ..."""
        earlier = (turn - 1) * (self.question_tokens + self.answer_tokens)
        return self.system_tokens + self.history_tokens + earlier + self.question_tokens

    @property
    def conversation_tokens(self) -> int:
        """Tokens of one user's conversation after the last answer."""
        return self.prompt_tokens(self.turns) + self.answer_tokens

    @property
    def working_set_tokens(self) -> int:
        """Tokens that a cache must hold to never compute a prefix twice: the system prompt counts once."""
        return self.system_tokens + self.users * (self.conversation_tokens - self.system_tokens)

    @property
    def request_count(self) -> int:
        return self.users * self.turns


def shipped_workloads() -> dict[str, Path]:
    """Name to file."""
    return {path.stem: path for path in sorted(workloads_directory().glob("*.yaml"))}


def load_workload(name_or_path: str) -> Workload:
    """A shipped workload by name, or a file. UsageError if there is none, ProfileError if it is wrong."""
    shipped = shipped_workloads()
    path = shipped.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise UsageError(
            f"no workload named {name_or_path}, and no such file", hint=f"shipped workloads: {', '.join(shipped)}"
        )
    return parse_workload(path.read_text(encoding="utf-8"), source=str(path))


def parse_workload(text: str, *, source: str) -> Workload:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ProfileError(f"{source} is not YAML: {error}") from error
    try:
        return Workload.model_validate(content)
    except ValidationError as error:
        raise ProfileError(f"{source}: {_explain(error)}", hint=f"keys: {', '.join(Workload.model_fields)}") from error


def _explain(error: ValidationError) -> str:
    sentences = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"]) or "the file"
        if problem["type"] == "extra_forbidden":
            sentences.append(f"unknown key {key}")
        elif problem["type"] == "missing":
            sentences.append(f"{key} is missing")
        else:
            sentences.append(f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
    return "; ".join(sentences)
