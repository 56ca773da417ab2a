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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, count

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
    content = partial(writer.content, generator)
    places = [_conversations_at(place, workload, content, system, images) for place in range(workload.users)]
    for _ in range(workload.turns * workload.rounds_of_users):
        yield from map(next, places)


def _conversations_at(
    place: int, workload: Conversations, content: Callable[[int], Content], system: Content, images: Sequence[Image]
) -> Iterator[ScriptedRequest]:
    """Yield the requests of one user after the other. All places launch in turn, so every `users`th launch is here."""
    turns, index = workload.turns, place
    if workload.rounds_of_users > 1:
        turns = max(1, workload.turns * (workload.users - place) // workload.users)
    for user in count(place, workload.users):
        image = [images[user % len(images)]] if images else []
        parts: list[Part] = [system, *image, content(workload.history_tokens)]
        for turn in range(1, turns + 1):
            previous = index - workload.users
            if turn > 1 and workload.history == "recorded":
                parts.append(AnswerOf(previous, workload.answer_tokens))
            elif turn > 1:
                parts.append(content(workload.answer_tokens))
            parts.append(content(workload.question_tokens))
            after = (previous,) if turn > 1 else ()
            yield ScriptedRequest(user, turn, tuple(parts), workload.answer_tokens, after)
            index += workload.users
        turns = workload.turns


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


def _zipf(generator: random.Random, total: int, draws: int) -> list[int]:
    """Different numbers below `total`; the weight of number n is 1 / (n + 1)."""
    weights = list(accumulate(1 / (number + 1) for number in range(total)))
    chosen: list[int] = []
    while len(chosen) < draws:
        one = generator.choices(range(total), cum_weights=weights)[0]
        if one not in chosen:
            chosen.append(one)
    return chosen


class _Office:
    """Writes the requests of all agents, and the content that they share."""

    def __init__(self, workload: AgenticCoding, writer: Writer, generator: random.Random) -> None:
        self._workload, self._generator = workload, generator
        self._content = partial(writer.content, generator)
        self._system = self._content(workload.system_tokens)

    def agent(self, session: int) -> Generator[ScriptedRequest, int, None]:
        """Yield the requests of an agent and of its subagents. Takes the index of each."""
        workload, turns = self._workload, count(1)
        parts = self._context(workload.task_tokens)
        after: tuple[int, ...] = ()
        for step in range(1, workload.steps + 1):
            after = ((yield self._request(session, next(turns), parts, after)),)
            self._grow(parts)
            if workload.subagent_every and step % workload.subagent_every == 0 and step < workload.steps:
                own = self._context(workload.task_tokens // SUMMARY_SHARE + 1)
                for _ in range(workload.subagent_steps):
                    after = ((yield self._request(session, next(turns), own, after)),)
                    self._grow(own)
                self._append(parts, workload.answer_tokens)  # the report

    def _context(self, task_tokens: int) -> list[Part]:
        return [self._system, self._content(task_tokens)]

    def _request(self, session: int, turn: int, parts: Sequence[Part], after: tuple[int, ...]) -> ScriptedRequest:
        delay_s = self._workload.tool_s if after else 0.0
        return ScriptedRequest(session, turn, tuple(parts), self._workload.answer_tokens, after, delay_s)

    def _grow(self, parts: list[Part]) -> None:
        """Append the answer and what a tool returns. Answers are random text: what matters is their length."""
        self._append(parts, self._workload.answer_tokens)
        factor: float = LENGTH_FACTOR ** self._generator.uniform(-1, 1)
        self._append(parts, max(1, round(self._workload.tool_result_tokens * factor)))

    def _append(self, parts: list[Part], token_count: int) -> None:
        """Append content; a context at its limit is replaced by the system prompt, a summary and the new content."""
        limit = self._workload.context_tokens - self._workload.answer_tokens
        if sum(map(length_of, parts)) + token_count > limit:
            summary = min(self._workload.task_tokens, self._workload.context_tokens // SUMMARY_SHARE)
            parts[:] = self._context(summary)
            token_count = min(token_count, limit - sum(map(length_of, parts)))
        parts.append(self._content(token_count))


def agent_requests(workload: AgenticCoding, writer: Writer, generator: random.Random) -> Iterator[ScriptedRequest]:
    """One request of every agent in turn, until all have ended."""
    office = _Office(workload, writer, generator)
    agents = [office.agent(session) for session in range(workload.agents)]
    due = [(agent, next(agent)) for agent in agents]
    index = 0
    while due:
        following = []
        for agent, request in due:
            yield request
            with suppress(StopIteration):
                following.append((agent, agent.send(index)))
            index += 1
        due = following


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
