"""A workload: who says how much to whom, and when. Read from a small YAML file, checked, frozen.

All lengths are in tokens of the engine's own tokenizer. Each user holds one conversation: the shared system prompt, an
own history, then per turn a question and an answer of fixed length, which the next turn's prompt repeats. Users take
turns in order, so that a user's conversation comes back only after everyone else's.
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
    """When requests are launched: a fixed time apart, whether or not earlier ones have been answered (open loop).

    Without `interval_s` it is chosen, before any arm is measured, such that an engine that computes every prompt is
    busy for `target_utilisation` of the time on this machine. `arms: interleaved` runs all engines at the same time,
    the launches of the arms evenly spread over the interval; a target below a third keeps them from meeting. It needs
    a machine with room for all of them. `in_turn` runs one engine after the other.
    """

    arms: Literal["interleaved", "in_turn"] = Field(
        default="in_turn",
        description="`in_turn` runs one arm's engine after the other; `interleaved` runs all at once, their launches "
        "evenly spread over the interval, and needs a machine with room for all of them.",
    )
    interval_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds between two launches of an arm; left out, it follows from `target_utilisation`.",
    )
    target_utilisation: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of the time that an engine which computes every prompt should be busy; the interval is "
        "chosen for it on this machine.",
    )


class Workload(Section):
    name: str = Field(min_length=1, description="What the result calls it.")
    description: str = Field(default="", description="One line on what it stands for.")
    seed: int = Field(default=0, ge=0, description="Seed of the random text that users say.")
    users: int = Field(ge=1, description="Conversations, which take turns in a fixed order.")
    turns: int = Field(
        ge=2, description="Requests of each user. A cache helps from the second on, which is what is measured."
    )
    system_tokens: int = Field(ge=0, description="Tokens at the start of every prompt, the same for all users.")
    history_tokens: int = Field(ge=1, description="Tokens of an own history that each user brings along.")
    question_tokens: int = Field(ge=1, description="Tokens that a user adds in each turn.")
    answer_tokens: int = Field(ge=1, description="Tokens of every answer, no more and no less.")
    history: Literal["recorded"] = Field(
        default="recorded", description="Earlier answers in a prompt are the recorded ones, in every arm."
    )
    schedule: Schedule = Field(default=Schedule(), description="When requests are launched.")
    request_timeout_s: float = Field(
        default=60.0, gt=0, allow_inf_nan=False, description="Seconds after which a request counts as failed."
    )

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


KEYS = keys(Workload)
_REQUIRED = tuple(key.path for key in KEYS if key.is_required)
_KIND = FileKind(
    "workload", KEYS, dict.fromkeys(_REQUIRED, f"a workload needs {', '.join(f'`{name}`' for name in _REQUIRED)}")
)


def shipped_workloads() -> dict[str, Path]:
    """Name to file."""
    return {path.stem: path for path in sorted(workloads_directory().glob("*.yaml"))}


def load_workload(name_or_path: str) -> Workload:
    """A shipped workload by name, or a file. UsageError if there is none, ProfileError if it is wrong."""
    shipped = shipped_workloads()
    path = shipped.get(name_or_path, Path(name_or_path))
    names = ", ".join(f"`{name}`" for name in shipped)
    if not path.is_file():
        raise UsageError(
            f"no workload is named `{name_or_path}`, and there is no such file",
            hint=f"shipped: {names}; `docs/reference/workload.md` has the keys of a file",
        )
    return _validated(read_file(path, noun="workload"), path)


def parse_workload(text: str, *, source: str) -> Workload:
    """The workload that `text` describes; `source` is what mistakes are said to be in."""
    return _validated(read_document(text, label=source, noun="workload"), Path(source))


def _validated(document: Document, path: Path) -> Workload:
    try:
        return Workload.model_validate(plain_values(document))
    except ValidationError as error:
        raise together(mistakes_in(error, document, path, _KIND)) from None
