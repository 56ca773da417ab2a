"""The workload of `kvbm bench`: users, turns, lengths and launch times. Read from a YAML file, validated, immutable.

All lengths are in tokens of the engine's own tokenizer. Each user has one conversation: the shared system prompt, the
user's own history, then per turn a question and an answer of fixed length. The prompt of the next turn repeats them.
Users take turns in order, so a user's next turn comes after one turn of every other user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from kvbm.config.document import Document, plain_values, read_document, read_file, together
from kvbm.config.files import is_missing, reason_not_readable
from kvbm.config.keys import keys
from kvbm.config.mistakes import FileKind, mistakes_in
from kvbm.config.values import Section
from kvbm.errors import UsageError
from kvbm.types import MAX_SECONDS
from kvbm_cli.package_data import workloads_directory


class Schedule(Section):
    """Launch times: a fixed interval, whether or not earlier requests have ended (open loop).

    With a target below one third, most requests end before the next interleaved arm launches one.
    """

    arms: Literal["interleaved", "in_turn"] = Field(
        default="in_turn",
        description="`in_turn` runs the engine of one arm after the other. `interleaved` runs all engines at the same "
        "time, with their launches evenly spread over the interval; the machine must have room for all of them.",
    )
    interval_s: float | None = Field(
        default=None,
        gt=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="Seconds between two launches of an arm; by default computed from `target_utilisation`.",
    )
    target_utilisation: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of the time that an engine which computes every prompt is busy; without `interval_s` it "
        "determines the interval on this machine.",
    )


class Workload(Section):
    name: str = Field(min_length=1, description="Name of the workload in the result.")
    description: str = Field(default="", description="One line that describes the workload.")
    seed: int = Field(default=0, ge=0, description="Seed of the random text of the users.")
    users: int = Field(
        ge=1, description="Number of users, each with one conversation; they take turns in a fixed order."
    )
    turns: int = Field(
        ge=2, description="Requests per user. The result covers turns 2 and later, which a cache can speed up."
    )
    system_tokens: int = Field(ge=0, description="Tokens of the system prompt, which is the same for all users.")
    history_tokens: int = Field(ge=1, description="Tokens of each user's own history.")
    question_tokens: int = Field(ge=1, description="Tokens of the user's question in each turn.")
    answer_tokens: int = Field(ge=1, description="Exact number of tokens of every answer.")
    history: Literal["recorded"] = Field(
        default="recorded", description="Source of the earlier answers in a prompt: the recording, in every arm."
    )
    schedule: Schedule = Field(default=Schedule(), description="Launch times of the requests.")
    request_timeout_s: float = Field(
        default=60.0, gt=0, le=MAX_SECONDS, allow_inf_nan=False, description="Timeout of a request in seconds."
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
    """Paths of the shipped workloads by name."""
    return {path.stem: path for path in sorted(workloads_directory().glob("*.yaml"))}


def load_workload(name_or_path: str) -> Workload:
    """Load a shipped workload by name, or a file. UsageError if it does not exist, ProfileError if it is invalid."""
    shipped = shipped_workloads()
    path = shipped.get(name_or_path, Path(name_or_path))
    names = ", ".join(f"`{name}`" for name in shipped)
    if is_missing(path):
        raise UsageError(
            f"no workload and no file is named `{name_or_path}`",
            hint=f"shipped workloads: {names}; docs/reference/workload.md describes the file format",
        )
    if (reason := reason_not_readable(path)) is not None:
        raise UsageError(f"cannot read the workload `{name_or_path}`: {reason}", hint=f"shipped workloads: {names}")
    return _validated(read_file(path, noun="workload"), path)


def parse_workload(text: str, *, source: str) -> Workload:
    """Parse a workload; error messages name `source` as the file."""
    return _validated(read_document(text, label=source, noun="workload"), Path(source))


def _validated(document: Document, path: Path) -> Workload:
    try:
        return Workload.model_validate(plain_values(document))
    except ValidationError as error:
        raise together(mistakes_in(error, document, path, _KIND)) from None
