"""The schema of workload files: one class per `kind`, all frozen. A kind is also a row of KINDS, below, and a function
in BUILDERS (`build.py`).

Lengths are in tokens of the engine's own tokenizer. `working_set_tokens` is what a cache must hold so that no prefix is
computed twice. `scaled` returns the same workload with another working set, by changing the one number that `scale_key`
names; a kind without such a number has `None`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kvbm.config.values import Seconds, Section, WrongKey
from kvbm_cli.bench.workload.slo import Slo

DEFAULT_KIND = "conversations"
LONGEST_DEFAULT_TIMEOUT_S = 60.0
NAME = re.compile(r"\w[\w .+-]*")
LONGEST_NAME_BYTES = 80
MULTI_ROUND_KEYS = frozenset(
    ("sizes", "qps", "time_s", "users", "rounds", "system_words", "history_words", "answer_tokens")
)
SCENARIO_KEYS: Mapping[str, frozenset[str]] = {
    "sharegpt": frozenset(("qps", "time_s", "file")),
    "agentic": frozenset(("users", "time_s", "file")),
}
LMBENCHMARK_KEYS = MULTI_ROUND_KEYS.union(*SCENARIO_KEYS.values())
PositiveSeconds = Annotated[Seconds, Field(gt=0)]


class Schedule(Section):
    """Launch times, and how the arms run. Without `concurrency`, a launch never waits for an answer (open loop)."""

    arms: Literal["interleaved", "in_turn"] = Field(
        default="in_turn",
        description="`in_turn` runs the engine of one arm after the other, in pairs of alternating order. "
        "`interleaved` runs all engines at the same time, with their launches evenly spread over the interval; the "
        "machine must have room for all of them.",
    )
    pairs: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="How often every arm runs; by default 3 in turn and 1 interleaved. `--pairs` sets it, too.",
    )
    interval_s: PositiveSeconds | None = Field(
        default=None,
        description="Seconds between two launches of an arm; by default computed from `target_utilisation`.",
    )
    ramp_to_s: PositiveSeconds | None = Field(
        default=None,
        description="A ramp: the rate changes linearly, from one launch per `interval_s` at the start of a run to one "
        "per `ramp_to_s` at its end. With `burstiness`, the times around it are random.",
    )
    burstiness: float | None = Field(
        default=None,
        ge=0.01,
        le=1000,
        allow_inf_nan=False,
        description="Random launches with the same mean interval: the shape of the gamma distribution of the times "
        "between them, as in other benchmarks. 1 is a Poisson process; less makes bursts. By default all times are "
        "equal. `seed` decides them, equally for all arms.",
    )
    target_utilisation: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of the time that an engine which computes every prompt is busy; without `interval_s` it "
        "determines the interval on this machine.",
    )
    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Closed loop: number of sessions in flight. The next request of a session starts when the previous "
        "one has ended, after `think_s`. `interval_s` is then ignored.",
    )
    think_s: Seconds = Field(
        default=0.0,
        ge=0,
        description="Closed loop: seconds between the end of an answer and the next request of the session.",
    )
    duration_s: PositiveSeconds | None = Field(
        default=None, description="No request is launched after this many seconds of a run; by default all are."
    )

    @model_validator(mode="after")
    def _has_a_rate_to_change(self) -> Self:
        if self.ramp_to_s is not None and (self.interval_s is None or self.concurrency is not None):
            raise WrongKey("ramp_to_s", "requires `interval_s`, and no `concurrency`")
        return self


class Workload(Section):
    """What every kind has."""

    scale_key: ClassVar[str | None] = None

    name: str = Field(
        min_length=1,
        max_length=80,
        description="Name of the workload in the result and in file names: letters, digits, spaces and `_ . + -`.",
    )
    description: str = Field(default="", description="One line that describes the workload.")
    seed: int = Field(default=0, ge=0, description="Seed of all random text and of the order of the arms.")
    schedule: Schedule = Field(default=Schedule(), description="Launch times of the requests.")
    endpoint: Literal["completions", "chat", "responses"] = Field(
        default="completions",
        description="`chat` and `responses` send text as messages of system, user and assistant to "
        "`/v1/chat/completions` or `/v1/responses`; `completions` sends token ids where it can.",
    )
    request_timeout_s: PositiveSeconds = Field(
        default=LONGEST_DEFAULT_TIMEOUT_S, description="Timeout of a request in seconds."
    )
    slo: str | None = Field(
        default=None,
        description="Limits of a good request in milliseconds, such as `ttft:500,tpot:50`; goodput counts such "
        "requests.",
    )

    @model_validator(mode="after")
    def _has_safe_name(self) -> Self:
        """Check the name. The name becomes a directory and part of an HTTP header."""
        if not NAME.fullmatch(self.name) or len(self.name.encode()) > LONGEST_NAME_BYTES:
            message = f"must be letters, digits, spaces and `_ . + -`, at most {LONGEST_NAME_BYTES} bytes in UTF-8"
            raise WrongKey("name", f"{message}, and begin with a letter or digit")
        return self

    @model_validator(mode="after")
    def _has_readable_limits(self) -> Self:
        try:
            if self.slo is not None:
                Slo.parse(self.slo)
        except ValueError as error:
            raise WrongKey("slo", str(error)) from None
        return self

    @property
    def working_set_tokens(self) -> int | None:
        return None

    @property
    def smallest_count(self) -> int:
        """Of the key that `scale_key` names."""
        return 1

    def scaled(self, working_set_tokens: int) -> Self:
        """Return the same workload with the nearest working set. The kind must have a `scale_key`."""
        assert self.scale_key is not None
        one, two = (self.with_count(count).working_set_tokens or 0 for count in (1, 2))
        return self.with_count(max(self.smallest_count, round((working_set_tokens - one) / (two - one)) + 1))

    def with_count(self, count: int) -> Self:
        """Return the same workload with another value of the key that `scale_key` names."""
        assert self.scale_key is not None
        return self.model_copy(update={self.scale_key: count})


class Conversations(Workload):
    """Users with one conversation each; a user's next turn comes after one turn of every other user.

    A conversation is the shared system prompt, the user's own history, then per turn a question and an answer. The
    prompt of the next turn repeats them.
    """

    scale_key: ClassVar[str | None] = "users"

    kind: Literal["conversations"] = Field(default="conversations", description="Users with one conversation each.")
    users: int = Field(
        ge=1, le=100_000, description="Number of users, each with one conversation; they take turns in a fixed order."
    )
    turns: int = Field(
        ge=2, le=10_000, description="Requests per user. From turn 2 on, a cache can speed up a request."
    )
    system_tokens: int = Field(ge=0, description="Tokens of the system prompt, which is the same for all users.")
    history_tokens: int = Field(ge=1, description="Tokens of each user's own history.")
    question_tokens: int = Field(ge=1, description="Tokens of the user's question in each turn.")
    answer_tokens: int = Field(ge=1, description="Exact number of tokens of every answer.")
    history: Literal["recorded", "canned"] = Field(
        default="recorded",
        description="Source of the earlier answers in a prompt, the same in every arm: the engine's own answers, "
        "recorded once, or random text, which takes no recording.",
    )
    rounds_of_users: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Users per place: when a user has finished, the next one starts. Above 1, the first users have "
        "fewer turns, so that users join and leave all the time.",
    )
    images: tuple[str, ...] = Field(
        default=(),
        strict=False,  # YAML has lists
        max_length=10_000,
        description="Images at the start of conversations, one per user, in turn: URLs, or files relative to this "
        "file, which are sent as base64. Requires the endpoint `chat` or `responses`. Lengths do not include them.",
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
        """Of the users that are active at the same time; the system prompt counts once."""
        return self.system_tokens + self.users * (self.conversation_tokens - self.system_tokens)


class SharedPrefix(Workload):
    """Groups of requests that share a prefix: templates, system prompts, or one document with many questions.

    With `question_tokens` of 0, all requests of a group are the same prompt.
    """

    scale_key: ClassVar[str | None] = "groups"

    kind: Literal["shared-prefix"] = Field(description="Groups of single requests that share a prefix.")
    groups: int = Field(ge=1, le=1_000_000, description="Number of different prefixes.")
    requests_per_group: int = Field(ge=1, le=1_000_000, description="Requests with each prefix.")
    prefix_tokens: int = Field(ge=1, description="Tokens of a prefix.")
    question_tokens: int = Field(ge=0, description="Tokens of a request's own text after the prefix.")
    answer_tokens: int = Field(ge=1, description="Exact number of tokens of every answer.")
    popularity: Literal["equal", "zipf"] = Field(
        default="equal",
        description="`equal` visits the groups in order. `zipf` draws each request's group; the n-th has a weight of "
        "1/n.",
    )

    @property
    def working_set_tokens(self) -> int:
        return self.groups * self.prefix_tokens


class Unique(Workload):
    """Requests that share nothing: what a cache costs if it never helps."""

    kind: Literal["unique"] = Field(description="Requests without a common prefix.")
    requests: int = Field(ge=1, le=1_000_000, description="Number of requests.")
    prompt_tokens: int = Field(ge=1, description="Tokens of every prompt.")
    answer_tokens: int = Field(ge=1, description="Exact number of tokens of every answer.")

    @property
    def working_set_tokens(self) -> int:
        return self.requests * (self.prompt_tokens + self.answer_tokens)


class Rag(Workload):
    """Questions about documents that a retriever puts in front of them, most relevant first."""

    scale_key: ClassVar[str | None] = "documents"

    kind: Literal["rag"] = Field(description="Questions with retrieved documents in front of them.")
    documents: int = Field(ge=1, le=1_000_000, description="Number of documents. Their popularity falls like 1/n.")
    document_tokens: int = Field(ge=1, description="Tokens of a document.")
    documents_per_request: int = Field(ge=1, le=1000, description="Different documents in a prompt.")
    system_tokens: int = Field(ge=0, description="Tokens of the system prompt, which is the same in all requests.")
    question_tokens: int = Field(ge=1, description="Tokens of the question after the documents.")
    answer_tokens: int = Field(ge=1, description="Exact number of tokens of every answer.")
    requests: int = Field(ge=1, le=1_000_000, description="Number of requests.")
    order: Literal["relevance", "sorted"] = Field(
        default="relevance",
        description="`relevance` puts documents in random order, so only equal beginnings are reused. `sorted` puts "
        "the most popular first, as a cache-aware retriever does.",
    )

    @model_validator(mode="after")
    def _has_enough_documents(self) -> Self:
        if self.documents_per_request > self.documents:
            raise WrongKey("documents_per_request", f"must be at most `documents`, {self.documents}")
        return self

    @property
    def working_set_tokens(self) -> int:
        return self.system_tokens + self.documents * self.document_tokens

    @property
    def smallest_count(self) -> int:
        return self.documents_per_request


class AgenticCoding(Workload):
    """Coding agents: long system prompt with tools, a context that grows by tool results, and subagents.

    An agent's step appends an answer (a tool call) and the tool's result to its context. Every `subagent_every` steps
    it starts a subagent with the same system prompt and a task of its own, waits for its end, and appends its report.
    When the context would exceed `context_tokens`, it is replaced by a summary, as coding agents do.
    """

    scale_key: ClassVar[str | None] = "agents"

    kind: Literal["agentic-coding"] = Field(description="Coding agents with tools, subagents and growing contexts.")
    agents: int = Field(ge=1, le=100_000, description="Number of agents that work at the same time.")
    steps: int = Field(ge=2, le=10_000, description="Requests per agent, without its subagents.")
    system_tokens: int = Field(ge=1, description="Tokens of the system prompt and the tools, equal for all agents.")
    task_tokens: int = Field(ge=1, description="Tokens of an agent's own task and of the files that it reads first.")
    tool_result_tokens: int = Field(ge=1, description="Median tokens of a tool's result, which vary by a factor of 4.")
    answer_tokens: int = Field(ge=1, description="Exact number of tokens of every answer.")
    subagent_every: int = Field(default=0, ge=0, description="Steps between two subagents; 0 for none.")
    subagent_steps: int = Field(default=3, ge=1, le=1000, description="Requests of a subagent.")
    context_tokens: int = Field(ge=1, description="Longest context; usually `max_model_len` of the engine.")
    tool_s: Seconds = Field(default=0.0, ge=0, description="Seconds that a tool takes.")
    hints: bool = Field(
        default=False, description="Whether requests have hints for kvbm: which contexts continue, and which are over."
    )

    @model_validator(mode="after")
    def _fits_the_context(self) -> Self:
        least = self.system_tokens + self.task_tokens + 2 * (self.answer_tokens + 2 * self.tool_result_tokens)
        if self.context_tokens < least:
            raise WrongKey("context_tokens", f"must be at least {least}, which the first two steps take")
        return self

    @property
    def working_set_tokens(self) -> int:
        grown = self.task_tokens + self.steps * (self.answer_tokens + self.tool_result_tokens)
        return self.system_tokens + self.agents * min(grown, self.context_tokens - self.system_tokens)


class Trace(Workload):
    """Requests of a trace file in Mooncake's format or aiperf's superset of it."""

    kind: Literal["trace"] = Field(description="Requests of a trace file.")
    file: str = Field(min_length=1, description="Path of the trace, `.jsonl` or `.jsonl.gz`, relative to this file.")
    block_tokens: int = Field(default=512, ge=1, le=65536, description="Tokens of a block that a hash id names.")
    time_scale: float = Field(
        default=1.0, ge=1e-6, le=1e6, allow_inf_nan=False, description="Factor on all times of the trace."
    )
    length_scale: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Factor on the tokens of a block and of an answer, to run a trace on a small model.",
    )
    requests: int | None = Field(
        default=None, ge=1, description="Number of requests, from the start of the file; by default all."
    )
    sessions: int | None = Field(
        default=None,
        ge=1,
        description="Number of sessions, from the start of the file, with all their turns; by default all.",
    )
    columns: Mapping[str, str] = Field(
        default={}, description="Names of fields in the file, if they differ: `{input_length: prompt_tokens}`."
    )
    turns: Literal["added", "whole"] = Field(
        default="added",
        description="`added`: a later line of a session holds what its turn adds. `whole`: it holds the whole prompt.",
    )
    hints: bool = Field(
        default=False, description="Whether requests have hints for kvbm: which contexts continue, and which are over."
    )


class Lmbenchmark(Workload):
    """A scenario of LMBenchmark. docs/reference/lmbenchmark.md lists the presets."""

    scale_key: ClassVar[str | None] = None

    kind: Literal["lmbenchmark"] = Field(description="A scenario of LMBenchmark.")
    scenario: Literal["long", "short", "long-long", "sharegpt", "agentic"] = Field(description="Name of the scenario.")
    mode: Literal["strict"] = Field(
        default="strict", description="Fixed launch times, exact lengths and random text; there is no other mode."
    )
    sizes: Literal["documented"] = Field(
        default="documented", description="The lengths that LMBenchmark's scripts name; there are no others."
    )
    qps: float | None = Field(
        default=None, gt=0, le=1e5, allow_inf_nan=False, description="Requests per second; by default the scenario's."
    )
    time_s: PositiveSeconds | None = Field(default=None, description="Seconds; by default the scenario's.")
    users: int | None = Field(default=None, ge=1, description="Users; by default the scenario's.")
    rounds: int | None = Field(default=None, ge=2, description="Rounds per user; by default the scenario's.")
    system_words: int | None = Field(default=None, ge=0, description="Tokens of the system prompt.")
    history_words: int | None = Field(default=None, ge=1, description="Tokens of a user's history.")
    answer_tokens: int | None = Field(default=None, ge=1, description="Tokens of an answer.")
    file: str | None = Field(
        default=None, description="Transcripts of `sharegpt` or trace of `agentic`, relative to this file."
    )

    @model_validator(mode="after")
    def _has_its_file(self) -> Self:
        for key in sorted(
            self.model_fields_set & LMBENCHMARK_KEYS - SCENARIO_KEYS.get(self.scenario, MULTI_ROUND_KEYS)
        ):
            raise WrongKey(key, f"does not exist in the scenario `{self.scenario}`")
        if self.file is None and self.scenario in ("sharegpt", "agentic"):
            raise WrongKey("file", f"is required for the scenario `{self.scenario}`")
        if self.schedule.ramp_to_s is not None:
            raise WrongKey("schedule", "must not have `ramp_to_s`: LMBenchmark has one rate, `qps`")
        return self


KINDS: Mapping[str, type[Workload]] = {
    "conversations": Conversations,
    "shared-prefix": SharedPrefix,
    "unique": Unique,
    "rag": Rag,
    "agentic-coding": AgenticCoding,
    "trace": Trace,
    "lmbenchmark": Lmbenchmark,
}


def as_definition(workload: Workload) -> dict[str, Any]:
    """Return the workload as plain data, for plan.json and summary.json."""
    return {"kind": DEFAULT_KIND, **workload.model_dump(mode="json")}
