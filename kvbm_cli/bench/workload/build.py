"""Writes the script of a workload: one function per kind, random content from the workload's seed.

`schema.py` has the keys of each kind, and KINDS. Kinds that a file describes, `trace` and `lmbenchmark`, are written in
`../cells.py`. The shipped workloads are in bench/workloads.

The order of the requests is the order of their launches. Every script ends with a warm-up prompt of its own, about as
long as the first prompt.

Coding agents have contexts that grow by tool results, subagents, and summaries at the context's limit:

    agent       system | task | answer | tool result | answer | tool result | ... | report of a subagent | ...
    subagent    system | its own task | answer | tool result | ...

A session is an agent with its subagents. The turn counts its requests. A request waits for the previous one of its
agent; the step after a subagent waits for the subagent's last request.

`with_hints` adds hints for kvbm to requests (docs/reference/hints.md), as an agent would send them: it knows whether
its context continues. A request whose prompt a later one of its session continues retains its blocks for about twice
the time until then, and LEAST_S more. The last request of a context demotes them. Each context has a session of its
own, so that the end of a subagent does not end its agent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from kvbm_cli.bench.workload.files import image_of
from kvbm_cli.bench.workload.schema import AgenticCoding, Conversations, Rag, SharedPrefix, Unique, Workload
from kvbm_cli.bench.workload.script import AnswerOf, Content, Image, Part, Script, ScriptedRequest, Writer, length_of

SUMMARY_SHARE = 4  # a summary is a fourth of the longest context at most
LEAST_S = 30.0
HINT_FIELD = "kv_transfer_params"
LENGTH_FACTOR = 2.0  # a tool result is half to twice the median


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
    images = [image_of(one) for one in workload.images]
    places = [_Place(workload, writer, generator, system, images, number) for number in range(workload.users)]
    index = 0
    for _ in range(workload.turns * workload.rounds_of_users):
        for place in places:
            yield place.next_request(index)
            index += 1


class _Place:
    """One of `users` places: a user's conversation, then the next user's."""

    def __init__(
        self,
        workload: Conversations,
        writer: Writer,
        generator: random.Random,
        system: Content,
        images: Sequence[Image],
        number: int,
    ) -> None:
        self._images = images
        self._workload, self._writer, self._generator, self._system = workload, writer, generator, system
        self._number, self._users, self._turn, self._previous = number, 0, 0, -1
        self._left = workload.turns
        if workload.rounds_of_users > 1:
            self._left = max(1, workload.turns * (workload.users - number) // workload.users)
        self._parts: list[Part] = []

    def next_request(self, index: int) -> ScriptedRequest:
        workload = self._workload
        if self._turn == 0:
            user = self._number + self._users * workload.users
            image = [self._images[user % len(self._images)]] if self._images else []
            self._parts = [self._system, *image, self._content(workload.history_tokens)]
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


@dataclass(slots=True)
class _Context:
    """The context of an agent or a subagent. Answers in it are random text: what matters is their length."""

    parts: list[Part]
    steps_left: int
    previous: int | None = None

    @property
    def token_count(self) -> int:
        return sum(map(length_of, self.parts))


@dataclass(slots=True)
class _Agent:
    session: int
    own: _Context
    turn: int = 0
    step: int = 0
    subagent: _Context | None = field(default=None)

    @property
    def active(self) -> _Context:
        return self.subagent or self.own


class _Office:
    """All agents, and the content that they share."""

    def __init__(self, workload: AgenticCoding, writer: Writer, generator: random.Random) -> None:
        self._workload, self._writer, self._generator = workload, writer, generator
        self._system = self._content(workload.system_tokens)
        self.agents = [
            _Agent(number, self._context(workload.task_tokens, workload.steps)) for number in range(workload.agents)
        ]

    def next_request(self, agent: _Agent, index: int) -> ScriptedRequest:
        context = agent.active
        agent.turn += 1
        after = () if context.previous is None else (context.previous,)
        request = ScriptedRequest(
            session=agent.session,
            turn=agent.turn,
            parts=tuple(context.parts),
            answer_tokens=self._workload.answer_tokens,
            after=after,
            delay_s=self._workload.tool_s if after else 0.0,
        )
        context.previous = index
        context.steps_left -= 1
        self._grow(agent, context)
        return request

    def _grow(self, agent: _Agent, context: _Context) -> None:
        """Append the answer and what follows it; start or end a subagent."""
        workload = self._workload
        self._append(context, workload.answer_tokens)
        self._append(context, self._tool_result_tokens())
        if context is agent.subagent:
            if context.steps_left == 0:
                agent.subagent = None
                agent.own.previous = context.previous
                self._append(agent.own, workload.answer_tokens)
            return
        agent.step += 1
        if workload.subagent_every and agent.step % workload.subagent_every == 0 and context.steps_left:
            agent.subagent = self._context(workload.task_tokens // SUMMARY_SHARE + 1, workload.subagent_steps)
            agent.subagent.previous = context.previous

    def _append(self, context: _Context, count: int) -> None:
        """Append content; a context at its limit is replaced by the system prompt, a summary and the new content."""
        limit = self._workload.context_tokens - self._workload.answer_tokens
        if context.token_count + count > limit:
            summary = min(self._workload.task_tokens, self._workload.context_tokens // SUMMARY_SHARE)
            context.parts = [self._system, self._content(summary)]
            count = min(count, limit - context.token_count)
        context.parts.append(self._content(count))

    def _tool_result_tokens(self) -> int:
        factor: float = LENGTH_FACTOR ** self._generator.uniform(-1, 1)
        return max(1, round(self._workload.tool_result_tokens * factor))

    def _context(self, task_tokens: int, steps: int) -> _Context:
        return _Context([self._system, self._content(task_tokens)], steps)

    def _content(self, count: int) -> Content:
        return self._writer.content(self._generator, count)


def agent_requests(workload: AgenticCoding, writer: Writer, generator: random.Random) -> Iterator[ScriptedRequest]:
    """One request of every agent in turn, until all have ended."""
    office = _Office(workload, writer, generator)
    index = 0
    while any(agent.active.steps_left for agent in office.agents):
        for agent in office.agents:
            if agent.active.steps_left:
                yield office.next_request(agent, index)
                index += 1


BUILDERS: dict[type[Workload], Callable[..., Iterator[ScriptedRequest]]] = {
    Conversations: conversations,
    SharedPrefix: shared_prefix,
    Unique: unique,
    Rag: rag,
    AgenticCoding: agent_requests,
}


def with_hints(script: Script) -> Script:
    """Return the same script with hints. A request that has the field already keeps it."""
    requests = script.requests
    successor = _successors(requests)
    root = list(range(len(requests)))
    for index, later in sorted(successor.items()):
        root[later] = root[index]
    hinted = (
        _hinted(one, f"context-{root[index]}", None if index not in successor else requests[successor[index]])
        for index, one in enumerate(requests)
    )
    return replace(script, requests=tuple(hinted))


def _successors(requests: Sequence[ScriptedRequest]) -> dict[int, int]:
    """Return for each request the next one of its session that begins with its prompt, if there is one."""
    sessions: dict[int, list[int]] = {}
    for index, one in enumerate(requests):
        sessions.setdefault(one.session, []).append(index)
    found: dict[int, int] = {}
    for indices in sessions.values():
        for at, index in enumerate(indices):
            parts = requests[index].parts
            later = (other for other in indices[at + 1 :] if requests[other].parts[: len(parts)] == parts)
            if (other := next(later, None)) is not None:
                found[index] = other
    return found


def _hinted(request: ScriptedRequest, session: str, later: ScriptedRequest | None) -> ScriptedRequest:
    if any(name == HINT_FIELD for name, _ in request.extra):
        return request
    hint: dict[str, object] = {"session": session}
    if later is None:
        hint["demote"] = True
    else:
        at_s, later_s = request.at_s, later.at_s
        pause_s = later.delay_s if at_s is None or later_s is None else later_s - at_s
        hint["retain_s"] = round(LEAST_S + 2 * pause_s, 1)
    return replace(request, extra=(*request.extra, (HINT_FIELD, {"kvbm": hint})))
