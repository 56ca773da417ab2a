"""Workload: the conversations of a benchmark and their timing, read from a YAML file, checked and frozen.

All lengths are in tokens of the engine's tokenizer. Each user has one conversation: the shared system prompt, a history
of its own, then per turn a question and an answer of fixed length, which the next prompt repeats. Users take turns in a
fixed order, so a conversation continues only after every other user has had a turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from kvbm.config.document import Document, plain_values, read_document, read_file, together
from kvbm.config.mistakes import FileKind, mistakes_in
from kvbm.config.schema import keys
from kvbm.config.values import Section
from kvbm.errors import UsageError
from kvbm_cli.package_data import workloads_directory


class Schedule(Section):
    """When requests are sent: at a fixed interval, whether or not earlier ones were answered (open loop).

    Without `interval_s`, kvbm chooses the interval before it measures any arm, so that an engine that computes every
    prompt is busy for `target_utilisation` of the time on this machine. `arms: interleaved` runs all engines in
    parallel and spreads the requests of the arms evenly over the interval; a target below a third keeps them from
    overlapping. The machine must have room for all of them. `in_turn` runs one engine after the other.
    """

    arms: Literal["interleaved", "in_turn"] = Field(
        default="in_turn",
        description="`in_turn` runs the engine of one arm after the other. `interleaved` runs all in parallel, with "
        "their requests spread evenly over the interval; the machine must have room for all of them.",
    )
    interval_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds between two requests of an arm; by default it follows from `target_utilisation`.",
    )
    target_utilisation: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of the time that an engine which computes every prompt is busy; kvbm chooses the interval "
        "for it on this machine.",
    )


class Workload(Section):
    name: str = Field(min_length=1, description="Name of the workload in the results.")
    description: str = Field(default="", description="One line about the workload.")
    seed: int = Field(default=0, ge=0, description="Seed of the random text of the questions.")
    users: int = Field(ge=1, description="Number of users, each with one conversation, in a fixed order.")
    turns: int = Field(
        ge=2, description="Requests of each user; measured from the second, because a cache cannot help the first."
    )
    system_tokens: int = Field(ge=0, description="Tokens of the system prompt, which is the same for all users.")
    history_tokens: int = Field(ge=1, description="Tokens of the history with which each user starts.")
    question_tokens: int = Field(ge=1, description="Tokens of the question in each turn.")
    answer_tokens: int = Field(ge=1, description="Tokens of every answer, exactly.")
    history: Literal["recorded"] = Field(
        default="recorded", description="A prompt repeats the recorded answers, the same in every arm."
    )
    schedule: Schedule = Field(default=Schedule(), description="When requests are sent.")
    request_timeout_s: float = Field(
        default=60.0, gt=0, allow_inf_nan=False, description="Seconds after which a request counts as failed."
    )

    def prompt_tokens(self, turn: int) -> int:
        """Prompt length of a turn, counted from 1."""
        earlier = (turn - 1) * (self.question_tokens + self.answer_tokens)
        return self.system_tokens + self.history_tokens + earlier + self.question_tokens

    @property
    def conversation_tokens(self) -> int:
        """Tokens of one user's conversation after the last answer."""
        return self.prompt_tokens(self.turns) + self.answer_tokens

    @property
    def working_set_tokens(self) -> int:
        """Tokens that a cache must hold so that no prefix is computed twice; the system prompt counts once."""
        return self.system_tokens + self.users * (self.conversation_tokens - self.system_tokens)

    @property
    def request_count(self) -> int:
        return self.users * self.turns


KEYS = keys(Workload)
_REQUIRED = tuple(key.path for key in KEYS if key.is_required)
_KIND = FileKind(
    "workload", KEYS, dict.fromkeys(_REQUIRED, f"a workload requires {', '.join(f'`{name}`' for name in _REQUIRED)}")
)


def shipped_workloads() -> dict[str, Path]:
    """Shipped workloads: name to file."""
    return {path.stem: path for path in sorted(workloads_directory().glob("*.yaml"))}


def load_workload(name_or_path: str) -> Workload:
    """Loads a workload by name or path. UsageError if it does not exist, ProfileError if it is invalid."""
    shipped = shipped_workloads()
    path = shipped.get(name_or_path, Path(name_or_path))
    names = ", ".join(f"`{name}`" for name in shipped)
    if not path.is_file():
        raise UsageError(
            f"no workload and no file is named `{name_or_path}`",
            hint=f"shipped workloads: {names}; docs/reference/workload.md describes the file format",
        )
    return _validated(read_file(path, noun="workload"), path)


def parse_workload(text: str, *, source: str) -> Workload:
    """Parses a workload; `source` is the file name in error messages."""
    return _validated(read_document(text, label=source, noun="workload"), Path(source))


def _validated(document: Document, path: Path) -> Workload:
    try:
        return Workload.model_validate(plain_values(document))
    except ValidationError as error:
        raise together(mistakes_in(error, document, path, _KIND)) from None
