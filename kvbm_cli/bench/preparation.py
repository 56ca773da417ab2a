"""Preparation: makes the plan of every cell, with one engine that no arm uses.

The engine's tokenizer counts the tokens, or the model's own in this process. The engine's greedy answers become the
history of every arm (`history: recorded`), and its cold prompts determine the interval. It has no kvbm and a G1 that
holds everything. Without a profile, the first server does this, and is emptied afterwards. A server that cannot be
emptied would answer the recorded prompts from its cache, so its history is random text, and the interval is measured
with prompts of another seed.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbm.errors import EngineError
from kvbm_cli.bench.arms import RECORDING
from kvbm_cli.bench.cells import Cell, known_launches, script_of, timed_launches
from kvbm_cli.bench.engines import RunningEngine
from kvbm_cli.bench.load.control import Control
from kvbm_cli.bench.load.request import open_session, send
from kvbm_cli.bench.result.results import RequestRecord, percentile
from kvbm_cli.bench.workload.plan import (
    COMPLETIONS,
    Dialect,
    Launches,
    Plan,
    PlannedRequest,
    RecordedAnswer,
    roles_of,
    unplanned,
)
from kvbm_cli.bench.workload.script import (
    AnswerOf,
    Content,
    Part,
    Phase,
    Script,
    TextWriter,
    TokenWriter,
    Writer,
    random_text,
    with_canned_answers,
)

SMALLEST_INTERVAL_S = 0.05
CALIBRATION_REQUESTS = 5
CALIBRATION_SEED = 2**40 + 17
PROBE_TIMEOUT_S = 60.0
PROBE_TEXT = "Blocks of a prompt are kept in host memory, and brought back when it comes again. " * 24
PROBE_CHARACTERS = 1000
FEATURES = ("has_token_ids", "has_chat_logprobs", "has_ignore_eos", "has_usage")  # that not every server has
PROBE_TOKENS = 2

OnRecord = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What all servers of the arms have in common. `can_reset`: each can empty its cache between two runs."""

    dialect: Dialect
    writer: Writer
    can_reset: bool


def capabilities_of(engines: Sequence[RunningEngine], *, seed: int, path: str = COMPLETIONS) -> Capabilities:
    """Take them from the traits of engines that kvbm launches; probe all engines if one is a server by URL.

    `path` is the endpoint; only COMPLETIONS takes token ids. EngineError if the models differ.
    """
    models = {engine.model for engine in engines}
    if len(models) > 1:
        raise EngineError(
            f"the servers serve different models: {', '.join(sorted(models))}",
            hint="start them with one `--served-model-name`",
        )
    controls = [engine.control() for engine in engines]
    dialect = Dialect(models.pop(), path=path)
    if all(engine.traits is not None for engine in engines):
        return _of_kind(engines[0], dialect, seed=seed)
    can_reset = all(map(Control.try_reset, controls))
    tokens = [control.try_tokenize(PROBE_TEXT) if path == COMPLETIONS else None for control in controls]
    if tokens[0] and all(one == tokens[0] for one in tokens):
        found = _common_dialect(engines, dialect, tuple(tokens[0]))
        if found is not None:
            return Capabilities(found, TokenWriter(controls[0].tokenize, seed=seed), can_reset)
    found = _common_dialect(engines, replace(dialect, has_token_ids=False), PROBE_TEXT)
    if found is None:
        *_, fewest = _ever_fewer(replace(dialect, has_token_ids=False))
        errors = [record.error for record in (_probe(one, fewest, PROBE_TEXT) for one in engines) if not record.is_ok]
        raise EngineError(
            f"a server refused a plain request to {path}: {errors[0] if errors else 'it answers only now'}",
            hint="send a request with `curl` to each server",
        )
    return Capabilities(found, TextWriter(_characters_per_token(engines[0], found)), can_reset)


def _of_kind(engine: RunningEngine, dialect: Dialect, *, seed: int) -> Capabilities:
    """Return what an engine can by its traits. Every run has a process of its own, so its cache is empty at the start.

    Without a tokenizer, prompts are text.
    """
    assert engine.traits is not None
    tokenize = engine.tokenizer() if dialect.path == COMPLETIONS else None
    if tokenize is not None:
        dialect = replace(dialect, token_id_fields=engine.traits.token_id_fields)
        return Capabilities(dialect, TokenWriter(tokenize, seed=seed), can_reset=True)
    has_logprobs = "logprobs" in engine.traits.token_id_fields
    dialect = replace(dialect, has_token_ids=False, has_chat_logprobs=has_logprobs)
    return Capabilities(dialect, TextWriter(_characters_per_token(engine, dialect)), can_reset=True)


def _common_dialect(
    engines: Sequence[RunningEngine], dialect: Dialect, prompt: tuple[int, ...] | str
) -> Dialect | None:
    """Return the first dialect, of those with ever fewer features, that all servers accept; `None` if there is none."""
    for tried in _ever_fewer(dialect):
        records = [_probe(engine, tried, prompt) for engine in engines]
        if all(record.is_ok and (not tried.has_token_ids or record.token_ids) for record in records):
            return tried
    return None


def _ever_fewer(dialect: Dialect) -> Iterator[Dialect]:
    """Yield the dialect, and then those that lack one more of FEATURES each, as far as that changes a request."""
    yield dialect
    for feature in FEATURES:
        change: dict[str, Any] = {feature: False}
        fewer = replace(dialect, **change)
        if fewer.fields(PROBE_TOKENS) != dialect.fields(PROBE_TOKENS):
            yield fewer
        dialect = fewer


def _probe(engine: RunningEngine, dialect: Dialect, prompt: tuple[int, ...] | str) -> RequestRecord:
    return asyncio.run(_send_all(engine, [unplanned(dialect, (prompt,), PROBE_TOKENS)], PROBE_TIMEOUT_S))[0]


def _characters_per_token(engine: RunningEngine, dialect: Dialect) -> float:
    """Measured on one prompt of the text that prompts have; 4 if the server does not count tokens."""
    text = random_text(random.Random(0), PROBE_CHARACTERS)
    record = _probe(engine, dialect, text)
    return len(text) / record.prompt_tokens if record.prompt_tokens else 4.0


async def _send_all(engine: RunningEngine, requests: Sequence[PlannedRequest], timeout_s: float) -> list[RequestRecord]:
    """One after the other."""
    target = engine.target(RECORDING, RECORDING, RECORDING, 0)
    async with open_session() as session:
        return [await send(session, target, request, timeout_s=timeout_s) for request in requests]


def warm_up(engine: RunningEngine, plan: Plan) -> None:
    """Send one long prompt unmeasured: the first one of a process pays for memory and threads."""
    record = asyncio.run(_send_all(engine, [plan.warmup], plan.request_timeout_s))[0]
    if record.error is not None:
        raise EngineError(f"the warm-up request failed: {record.error}")


def send_all(engine: RunningEngine, plan: Plan) -> None:
    """Send all requests of a plan unmeasured, one after the other."""
    for record in asyncio.run(_send_all(engine, plan.requests, plan.request_timeout_s)):
        if record.error is not None:
            raise EngineError(f"a request that fills the shared tier failed: {record.error}")


@dataclass(frozen=True, slots=True)
class Preparation:
    """Makes plans with a running engine."""

    engine: RunningEngine
    capabilities: Capabilities
    salt: int = field(default_factory=lambda: secrets.randbits(40))

    def plan(self, cell: Cell, script: Script, on_record: OnRecord) -> Plan:
        """Record, calibrate, and fix all launch times."""
        answers, cold = self._record(script, cell, on_record) if repeats_answers(script) else ((), ())
        launches = self._launches(cell, script, cold)
        return Plan.make(
            script,
            launches,
            self.capabilities.dialect,
            answers=answers,
            request_timeout_s=cell.workload.request_timeout_s,
        )

    def script(self, cell: Cell, *, seed: int) -> Script:
        """Return the script. A server that cannot be emptied may still hold the prompts of an earlier command with the
        same seed."""
        writer = self.capabilities.writer
        if self.capabilities.can_reset:
            return script_of(cell.workload, writer, seed=seed)
        seed += self.salt
        found = script_of(cell.workload, writer, seed=seed)
        generator = random.Random(seed)
        return with_canned_answers(found, lambda tokens: writer.content(generator, tokens))

    def _launches(self, cell: Cell, script: Script, cold: Sequence[RequestRecord]) -> Launches:
        if (known := known_launches(cell, script)) is not None:
            return known
        return timed_launches(cell, self._interval_s(cell, script, cold or self._calibrate(script, cell)))

    def _interval_s(self, cell: Cell, script: Script, cold: Sequence[RequestRecord]) -> float:
        """Return the interval at which computing every prompt takes `target_utilisation` of the time."""
        token_ms = percentile(
            [record.end_to_end_ms / (record.prompt_tokens or 1) for record in cold if record.end_to_end_ms], 75
        )
        lengths = [request.prompt_token_count for request in script.requests]
        service_s = token_ms / 1e3 * sum(lengths) / len(lengths)
        return max(SMALLEST_INTERVAL_S, round(service_s / cell.schedule.target_utilisation, 2))

    def _calibrate(self, script: Script, cell: Cell) -> Sequence[RequestRecord]:
        """Cold requests, one at a time; the engine is emptied afterwards by its next user, if it can be."""
        if not self.capabilities.can_reset:
            script = self.script(cell, seed=CALIBRATION_SEED)
        cold = [request for request in script.requests if request.phase is Phase.COLD][:CALIBRATION_REQUESTS]
        requests = [
            unplanned(self.capabilities.dialect, _contents(request.parts), request.answer_tokens) for request in cold
        ]
        records = asyncio.run(_send_all(self.engine, requests, cell.workload.request_timeout_s))
        for record in records:
            if record.error is not None:
                raise EngineError(f"a request that measures the time of a cold prompt failed: {record.error}")
        return records

    def _record(
        self, script: Script, cell: Cell, on_record: OnRecord
    ) -> tuple[tuple[RecordedAnswer, ...], tuple[RequestRecord, ...]]:
        """Return the answers to all requests, sent one at a time in order, and the records of the cold ones."""

        async def all_answers() -> list[tuple[RecordedAnswer, RequestRecord]]:
            answers: list[tuple[RecordedAnswer, RequestRecord]] = []
            target = self.engine.target(RECORDING, RECORDING, RECORDING, 0)
            async with open_session() as session:
                for one in script.requests:
                    parts = _contents(one.parts, [answer for answer, _ in answers])
                    roles = roles_of(one.parts, has_system=one.has_system)
                    request = unplanned(self.capabilities.dialect, parts, one.answer_tokens, roles)
                    timeout_s = cell.workload.request_timeout_s
                    record = await send(session, target, request, timeout_s=timeout_s)
                    if record.error is not None:
                        message = f"recording turn {one.turn} of session {one.session} failed: {record.error}"
                        raise EngineError(message)
                    answers.append((self._answer(record), record))
                    on_record(record)
            return answers

        found = asyncio.run(all_answers())
        cold = [record for one, (_, record) in zip(script.requests, found, strict=True) if one.phase is Phase.COLD]
        return tuple(answer for answer, _ in found), tuple(cold)

    def _answer(self, record: RequestRecord) -> RecordedAnswer:
        """Text is encoded if prompts are token ids: a prompt cannot have both."""
        token_ids: Content = tuple(record.token_ids) or self.capabilities.writer.encoded(record.text)
        if isinstance(token_ids, str):
            return RecordedAnswer((), tuple(record.logprobs), record.text)
        return RecordedAnswer(token_ids, tuple(record.logprobs), record.text)


def repeats_answers(script: Script) -> bool:
    """Whether a prompt holds an answer, which must be recorded first."""
    return any(isinstance(part, AnswerOf) for request in script.requests for part in request.parts)


def _contents(parts: Sequence[Part], answers: Sequence[RecordedAnswer] = ()) -> tuple[Content, ...]:
    return tuple(answers[part.request].content if isinstance(part, AnswerOf) else part for part in parts)
