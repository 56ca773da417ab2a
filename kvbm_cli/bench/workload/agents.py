"""Requests of coding agents: contexts that grow by tool results, subagents, and summaries at the context's limit.

    agent       system | task | answer | tool result | answer | tool result | ... | report of a subagent | ...
    subagent    system | its own task | answer | tool result | ...

A session is an agent with its subagents. The turn counts its requests. A request waits for the previous one of its
agent; the step after a subagent waits for the subagent's last request.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbm_cli.bench.workload.content import Content, Writer
from kvbm_cli.bench.workload.script import Part, ScriptedRequest, length_of
from kvbm_cli.workload.schema import AgenticCoding

SUMMARY_SHARE = 4  # a summary is a fourth of the longest context at most
LENGTH_FACTOR = 2.0  # a tool result is half to twice the median


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
