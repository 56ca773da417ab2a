"""The sizes and texts of LMBenchmark's scenarios.

Each multi-round scenario is a shell script of LMBenchmark that starts one program with fixed arguments. Two scripts
pass the number of words in the text of a number, which is always 1, instead of the number. Their presets exist
twice: `documented` has the numbers that the scripts name, `as-shipped` has those that the program receives.

The bytes of its requests are texts, the joined prompt of completions mode, and the JSON body. The keys of a body have
the order of the `openai` client (3.54), which LMBenchmark uses. Text is not escaped to ASCII, and there are no spaces
between keys and values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvbm.errors import UsageError

Sizes = Literal["documented", "as-shipped", "custom"]

WARM_UP_QPS = 2.0
WARM_UP_ROUNDS = 2
PAUSE_AFTER_RUN_S = 10.0
Message = dict[str, str]
COMPLETIONS_PATH = "/completions"
CHAT_PATH = "/chat/completions"
ENGINE_WARM_UP_REQUESTS = 10
ENGINE_WARM_UP_ANSWER_TOKENS = 100


@dataclass(frozen=True, slots=True)
class LmbenchmarkParameters:
    """One run of the multi-round program. Lengths of prompts are in words, of answers in tokens (an upper bound).

    The warm-up run has `warm_up_users` users, and none if that is 0. Ids of users start at `first_user_id + 1`.
    `output_name` is the file name, with {key} and {qps}.
    """

    name: str
    sizes: Sizes
    users: int
    rounds: int
    system_words: int
    history_words: int
    answer_tokens: int
    qps: float
    output_name: str
    warm_up_users: int
    duration_s: float = 100.0
    first_user_id: int = 1
    strict_concurrent_users: bool = False
    is_chat: bool = False

    def __post_init__(self) -> None:
        for key in ("users", "rounds", "answer_tokens"):
            _require(self, key, getattr(self, key) >= 1, "at least 1")
        for key in ("system_words", "history_words", "warm_up_users", "first_user_id"):
            _require(self, key, getattr(self, key) >= 0, "0 or more")
        for key in ("qps", "duration_s"):
            value = getattr(self, key)
            _require(self, key, math.isfinite(value) and value > 0, "a finite number above 0")

    @property
    def words(self) -> tuple[int, int]:
        return self.system_words, self.history_words

    # The order of these operations decides which virtual users retire at once; see `schedule`.
    @property
    def gap_s(self) -> float:
        """The shortest time between two requests of one user."""
        return self.users / self.qps

    @property
    def session_s(self) -> float:
        """The intended length of a session."""
        return self.gap_s * (self.rounds - 1)

    @property
    def gap_between_users_s(self) -> float:
        """The time between the arrivals of two users."""
        return self.session_s / self.users

    @property
    def ramp_up_s(self) -> float:
        return self.users * self.gap_between_users_s

    def warm_up(self) -> LmbenchmarkParameters | None:
        """Return the run that the scripts make before each rate: a new user every 0.5 s, two rounds each."""
        if self.warm_up_users < 2:
            return None
        return replace(
            self,
            users=1,
            rounds=WARM_UP_ROUNDS,
            qps=WARM_UP_QPS,
            duration_s=float(self.warm_up_users // 2),
            warm_up_users=0,
            output_name="warmup.csv",
            strict_concurrent_users=False,
        )

    def scaled(self, factor: float) -> LmbenchmarkParameters:
        """Prompts with `factor` times the words, for small models. The result is not the preset's size."""
        if not (math.isfinite(factor) and factor > 0):
            raise UsageError(f"the factor of words is {factor}; it must be a finite number above 0")
        return replace(
            self,
            sizes="custom",
            system_words=round(self.system_words * factor),
            history_words=round(self.history_words * factor),
        )

    def output_file(self, key: str) -> str:
        return self.output_name.format(key=key, qps=f"{self.qps:g}")


def _require(parameters: LmbenchmarkParameters, key: str, is_right: bool, right: str) -> None:
    if not is_right:
        raise UsageError(f"{parameters.name}: {key} is {getattr(parameters, key)}; it must be {right}")


LONG = LmbenchmarkParameters(  # long_input_short_output_run.sh
    name="lmbenchmark-long",
    sizes="documented",
    users=15,
    rounds=20,
    system_words=1000,
    history_words=20000,
    answer_tokens=100,
    qps=0.1,
    output_name="{key}_output_{qps}.csv",
    warm_up_users=20,
)
SHORT = LmbenchmarkParameters(  # short_input_short_output.sh
    name="lmbenchmark-short",
    sizes="documented",
    users=320,
    rounds=20,
    system_words=0,
    history_words=256,
    answer_tokens=20,
    qps=15.0,
    output_name="{key}_qps{qps}.csv",
    warm_up_users=400,
)
LONG_LONG = LmbenchmarkParameters(  # long_input_long_output.sh
    name="lmbenchmark-long-long",
    sizes="documented",
    users=320,
    rounds=20,
    system_words=0,
    history_words=2000,
    answer_tokens=1000,
    qps=0.7,
    output_name="{key}_qps{qps}.csv",
    warm_up_users=750,
)
PRESETS: dict[tuple[str, Sizes], LmbenchmarkParameters] = {
    (preset.name, preset.sizes): preset
    for preset in (
        LONG,
        replace(LONG, sizes="as-shipped"),  # this script passes its numbers as they are
        SHORT,
        replace(SHORT, sizes="as-shipped", system_words=1, history_words=1),
        LONG_LONG,
        replace(LONG_LONG, sizes="as-shipped", system_words=1, history_words=1),
    )
}


def preset(name: str, *, sizes: Sizes = "documented") -> LmbenchmarkParameters:
    """Return the preset of that name. Raises UsageError."""
    found = PRESETS.get((name, sizes))
    if found is None:
        known = ", ".join(f"{name} ({sizes})" for name, sizes in PRESETS)
        raise UsageError(f"there is no preset {name} ({sizes}); the presets are {known}")
    return found


@dataclass(frozen=True, slots=True)
class ShareGptParameters:
    """One run of the ShareGPT program: requests at a constant rate from a prepared file (see `sharegpt`).

    `pause_s` is the time between the warm-up and the main run.
    """

    run_file: str
    warm_up_file: str | None = None
    qps: float = 1.34
    duration_s: float | None = None
    pause_s: float = PAUSE_AFTER_RUN_S
    is_chat: bool = False
    name: str = "lmbenchmark-sharegpt"
    output_name: str = "{key}_output_{qps}.csv"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.qps) and self.qps > 0):
            raise UsageError(f"{self.name}: qps is {self.qps}; it must be a finite number above 0")

    def output_file(self, key: str) -> str:
        return self.output_name.format(key=key, qps=f"{self.qps:g}")


@dataclass(frozen=True, slots=True)
class AgenticParameters:
    """One run of the agentic program: one trace file per user. LMBenchmark's example has the same intervals."""

    trace_files: tuple[str, ...]
    request_interval_s: float = 3.0
    new_user_interval_s: float = 5.0
    name: str = "lmbenchmark-agentic"
    output_name: str = "agentic.csv"

    def __post_init__(self) -> None:
        if not self.trace_files:
            raise UsageError(f"{self.name}: it requires at least one trace file")
        for key in ("request_interval_s", "new_user_interval_s"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                raise UsageError(f"{self.name}: {key} is {getattr(self, key)}; it must be 0 or more")

    def output_file(self, key: str) -> str:
        """LMBenchmark has one name for all runs."""
        return self.output_name


FaithfulParameters = LmbenchmarkParameters | ShareGptParameters | AgenticParameters


def opening(user: int, *, system_words: int, history_words: int) -> str:
    """Return the start of a user's first message. LMBenchmark has no spaces after the full stops."""
    return (
        f"Hi, here's some system prompt: {_words(system_words)}."
        f"For user {user}, here are some other context: {_words(history_words)}."
    )


def question(number: int) -> str:
    return f"Here's question #{number}: can you tell me a new long story with a happy ending?"


def engine_warm_up(position: int) -> str:
    """Return the text of one of the requests that every run of the multi-round program sends at its start."""
    return f"WARMUP: Hi, I'm user {position}. Here are some text: {'hi ' * 100}."


def joined(messages: Sequence[Message], *, ends_with_assistant: bool = True) -> str:
    """Return the prompt of completions mode. The ShareGPT program leaves out the last line."""
    lines = [f"{message['role'].upper()}: {message['content']}" for message in messages]
    return "\n".join([*lines, "ASSISTANT:"] if ends_with_assistant else lines)


def completions_body(model: str, prompt: str, max_tokens: int, *, temperature: float = 0.0) -> bytes:
    return _body(model, "prompt", prompt, max_tokens, temperature)


def chat_body(model: str, messages: Sequence[Message], max_tokens: int, *, temperature: float = 0.0) -> bytes:
    return _body(model, "messages", list(messages), max_tokens, temperature)


def _words(count: int) -> str:
    return " ".join(["hi"] * count)


def _body(model: str, key: str, value: object, max_tokens: int, temperature: float) -> bytes:
    body = {
        "model": model,
        "stream": True,
        key: value,
        "max_tokens": max_tokens,
        "stream_options": {"include_usage": True},
        "temperature": temperature,
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")
