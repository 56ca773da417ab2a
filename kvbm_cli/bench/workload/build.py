"""Writes the script of a workload: one function per kind, random content from the workload's seed.

The order of the requests is the order of their launches. Every script ends with a warm-up prompt of its own, about as
long as the first prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate

from kvbm_cli.bench.workload.agents import agent_requests
from kvbm_cli.bench.workload.content import Content, Writer
from kvbm_cli.bench.workload.script import AnswerOf, Part, Script, ScriptedRequest
from kvbm_cli.workload.schema import AgenticCoding, Conversations, Rag, SharedPrefix, Unique, Workload


def build_script(workload: Workload, writer: Writer, *, seed: int) -> Script:
    """Return the script of a workload of any kind but `trace` and `lmbenchmark`, which have modules of their own."""
    generator = random.Random(seed)
    requests = list(BUILDERS[type(workload)](workload, writer, generator))
    warmup = writer.content(generator, requests[0].prompt_token_count)
    return Script.of(requests, warmup=warmup, working_set_tokens=workload.working_set_tokens)


def conversations(workload: Conversations, writer: Writer, generator: random.Random) -> Iterator[ScriptedRequest]:
    """Yield the first turn of every user, then the second of every user, and so on.

    With `rounds_of_users` above 1, place p of P places starts with a user who has (P - p) / P of the turns left, so
    that a user joins about every `turns` / P launches.
    """
    system = writer.content(generator, workload.system_tokens)
    places = [_Place(workload, writer, generator, system, number) for number in range(workload.users)]
    index = 0
    for _ in range(workload.turns * workload.rounds_of_users):
        for place in places:
            yield place.next_request(index)
            index += 1


class _Place:
    """One of `users` places: a user's conversation, then the next user's."""

    def __init__(
        self, workload: Conversations, writer: Writer, generator: random.Random, system: Content, number: int
    ) -> None:
        self._workload, self._writer, self._generator, self._system = workload, writer, generator, system
        self._number, self._users, self._turn, self._previous = number, 0, 0, -1
        self._left = workload.turns
        if workload.rounds_of_users > 1:
            self._left = max(1, workload.turns * (workload.users - number) // workload.users)
        self._parts: list[Part] = []

    def next_request(self, index: int) -> ScriptedRequest:
        workload = self._workload
        if self._turn == 0:
            self._parts = [self._system, self._content(workload.history_tokens)]
        elif workload.history == "recorded":
            self._parts.append(AnswerOf(self._previous, workload.answer_tokens))
        else:
            self._parts.append(self._content(workload.answer_tokens))
        self._parts.append(self._content(workload.question_tokens))
        self._turn += 1
        session = self._number + self._users * workload.users
        after = (self._previous,) if self._turn > 1 else ()
        request = ScriptedRequest(session, self._turn, tuple(self._parts), workload.answer_tokens, after)
        self._previous = index
        if self._turn == self._left:
            self._users, self._turn, self._left = self._users + 1, 0, workload.turns
        return request

    def _content(self, count: int) -> Content:
        return self._writer.content(self._generator, count)


def shared_prefix(workload: SharedPrefix, writer: Writer, generator: random.Random) -> Iterator[ScriptedRequest]:
    prefixes = [writer.content(generator, workload.prefix_tokens) for _ in range(workload.groups)]
    previous: list[list[int]] = [[] for _ in range(workload.groups)]
    for index in range(workload.groups * workload.requests_per_group):
        group = index % workload.groups if workload.popularity == "equal" else _zipf(generator, workload.groups, 1)[0]
        parts = (prefixes[group], writer.content(generator, workload.question_tokens))
        after = tuple(previous[group][-1:])
        previous[group].append(index)
        yield ScriptedRequest(group, len(previous[group]), parts, workload.answer_tokens, after)


def unique(workload: Unique, writer: Writer, generator: random.Random) -> Iterator[ScriptedRequest]:
    for number in range(workload.requests):
        prompt = writer.content(generator, workload.prompt_tokens)
        yield ScriptedRequest(number, 1, (prompt,), workload.answer_tokens)


def rag(workload: Rag, writer: Writer, generator: random.Random) -> Iterator[ScriptedRequest]:
    system = writer.content(generator, workload.system_tokens)
    documents = [writer.content(generator, workload.document_tokens) for _ in range(workload.documents)]
    for number in range(workload.requests):
        chosen = _zipf(generator, workload.documents, workload.documents_per_request)
        if workload.order == "sorted":
            chosen.sort()
        question = writer.content(generator, workload.question_tokens)
        parts = (system, *(documents[one] for one in chosen), question)
        yield ScriptedRequest(number, 1, parts, workload.answer_tokens)


def _zipf(generator: random.Random, count: int, draws: int) -> list[int]:
    """Different numbers below `count`; the weight of number n is 1 / (n + 1)."""
    weights = list(accumulate(1 / (number + 1) for number in range(count)))
    chosen: list[int] = []
    while len(chosen) < draws:
        one = generator.choices(range(count), cum_weights=weights)[0]
        if one not in chosen:
            chosen.append(one)
    return chosen


BUILDERS: dict[type[Workload], Callable[..., Iterator[ScriptedRequest]]] = {
    Conversations: conversations,
    SharedPrefix: shared_prefix,
    Unique: unique,
    Rag: rag,
    AgenticCoding: agent_requests,
}
