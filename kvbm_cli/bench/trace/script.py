"""From a trace to the Script of a workload: random content with the trace's sharing, its lengths and its times.

    input_length with hash_ids   content per hash id and length, drawn from the seed and the id: equal ids, equal tokens
    input_length alone           content that no other line shares
    text_input                   the text, in pieces that requests share
    messages, payload            a fixed body; its pieces only decide the phase

Times count from the first launch of the trace. A later turn of a session waits for the answer to the previous turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbm.errors import ProfileError
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import CHARACTERS_PER_TOKEN, Placement, Sessions, TraceFormat, TraceRequest
from kvbm_cli.bench.workload.plan import CHAT, COMPLETIONS
from kvbm_cli.bench.workload.script import AnswerOf, Content, Part, Prefixes, Script, ScriptedRequest, Writer

PIECE_TOKENS = 16
PIECE_CHARACTERS = PIECE_TOKENS * CHARACTERS_PER_TOKEN
DEFAULT_WARMUP_TOKENS = 256
STREAMED: Mapping[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
RESERVED = ("model", "prompt", "messages", "stream", "stream_options")


def trace_script(
    path: Path,
    form: TraceFormat,
    writer: Writer,
    *,
    seed: int,
    length_scale: float = 1.0,
) -> Script:
    """Return the requests as a script. `length_scale` multiplies the tokens of blocks and answers.

    ProfileError for a wrong line.
    """
    contents = _Contents(writer, seed, length_scale)
    reader = TraceReader(path, form)
    builder = _Builder(path, contents, Sessions(path, reader.form), reader.form.block_tokens)
    return builder.script(reader)


@dataclass(slots=True)
class _Contents:
    """Writes content and keeps each piece as one object, so that equal prefixes are the same objects."""

    writer: Writer
    seed: int
    length_scale: float
    pieces: dict[object, Content] = field(default_factory=dict)

    def scaled(self, token_count: int) -> int:
        return max(1, round(token_count * self.length_scale))

    def unique(self, name: str, token_count: int) -> Content:
        return self.writer.content(random.Random(f"{self.seed}/{name}"), self.scaled(token_count))

    def blocks(self, hash_ids: Sequence[int], token_count: int, block_tokens: int) -> Iterator[Content]:
        """One content per id; the last block has what remains of `token_count`."""
        left = token_count
        for one in hash_ids:
            length = min(left, block_tokens)
            left -= length
            if (one, length) not in self.pieces:
                self.pieces[one, length] = self.unique(f"block {one}", length)
            yield self.pieces[one, length]

    def text(self, text: str) -> Iterator[Content]:
        content = self.writer.encoded(text)
        return self.cut(content, PIECE_CHARACTERS if isinstance(content, str) else PIECE_TOKENS)

    def cut(self, content: Content, length: int) -> Iterator[Content]:
        for start in range(0, len(content), length):
            piece = content[start : start + length]
            yield self.pieces.setdefault(piece, piece)


@dataclass(frozen=True, slots=True)
class _Builder:
    path: Path
    contents: _Contents
    sessions: Sessions
    block_tokens: int

    def script(self, requests: Iterable[TraceRequest]) -> Script:
        """Return the requests in the order of their launches; ties keep the order of the file."""
        lines = [(request, self.sessions.place(request)) for request in requests]
        self._require_one_history([request for request, _ in lines])
        lines.sort(key=lambda line: line[1].launch_ms or 0.0)
        index_of = {placed.index: index for index, (_, placed) in enumerate(lines)}
        first_ms = lines[0][1].launch_ms or 0.0
        histories: dict[int, tuple[Part, ...]] = {}
        scripted = []
        prompts = Prefixes()
        for index, (request, placed) in enumerate(lines):
            after = () if placed.previous is None else (index_of[placed.previous],)
            one = self._scripted(request, placed, histories.get(placed.session, ()), after, first_ms)
            if self.sessions.repeats_answers(request):
                histories[placed.session] = (*one.parts, AnswerOf(index, one.answer_tokens or 0))
            prompts.add(one.parts)
            scripted.append(one)
        warmup = self.contents.unique("warm-up", lines[0][0].input_tokens or DEFAULT_WARMUP_TOKENS)
        return Script.of(scripted, warmup=warmup, working_set_tokens=prompts.token_count)

    def _require_one_history(self, requests: Sequence[TraceRequest]) -> None:
        """Answers are recorded for prompts of parts, so the history of a session cannot be mixed with fixed bodies."""
        fixed = next((one for one in requests if one.messages is not None or one.payload is not None), None)
        joined = next((one for one in requests if self.sessions.repeats_answers(one)), None)
        if fixed is not None and joined is not None:
            raise ProfileError(
                f"{self.path}:{max(fixed.line, joined.line)}: a workload cannot mix sessions that repeat answers "
                f"(line {joined.line}) with `messages` or `payload` (line {fixed.line})",
                hint="split the trace into two files",
            )

    def _scripted(
        self,
        request: TraceRequest,
        placed: Placement,
        history: tuple[Part, ...],
        after: tuple[int, ...],
        first_ms: float,
    ) -> ScriptedRequest:
        answer_tokens = None if request.output_tokens is None else self.contents.scaled(request.output_tokens)
        is_chat = request.messages is not None or "messages" in (request.payload or {})
        return ScriptedRequest(
            session=placed.session,
            turn=placed.turn,
            parts=(*history, *self._parts(request)),
            answer_tokens=answer_tokens,
            after=after,
            delay_s=(request.delay_ms or 0.0) / 1000,
            at_s=None if request.timestamp_ms is None else round((request.timestamp_ms - first_ms) / 1000, 6),
            path=CHAT if is_chat else COMPLETIONS,
            body=_body(request, answer_tokens),
            extra=tuple(self._extra(request).items()),
            has_system=False,
        )

    def _parts(self, request: TraceRequest) -> Iterator[Content]:
        if request.text is not None:
            return self.contents.text(request.text)
        if request.input_tokens is None:
            return self._body_parts(request)
        if request.hash_ids is None:
            return iter([self.contents.unique(f"line {request.line}", request.input_tokens)])
        return self.contents.blocks(request.hash_ids, request.input_tokens, self.block_tokens)

    def _body_parts(self, request: TraceRequest) -> Iterator[Content]:
        """Yield the text of a fixed body in pieces; each message begins a new one."""
        for text in request.texts():
            yield from self.contents.cut(text, PIECE_CHARACTERS)

    def _extra(self, request: TraceRequest) -> Mapping[str, Any]:
        extra = request.extra or {}
        for name in RESERVED:
            if name in extra:
                raise ProfileError(
                    f"{self.path}:{request.line}: `extra` must not set `{name}`, which `kvbm bench` sets itself"
                )
        return extra


def _body(request: TraceRequest, answer_tokens: int | None) -> tuple[tuple[str, object], ...] | None:
    """Return the body of a line with messages or a payload, without the model and `extra`. None for other lines."""
    limit = {} if answer_tokens is None else {"max_tokens": answer_tokens}
    if request.messages is not None:
        tools = {"tools": list(request.tools)} if request.tools else {}
        return tuple({"messages": list(request.messages), **tools, "temperature": 0.0, **limit, **STREAMED}.items())
    if request.payload is None:
        return None
    payload = {name: value for name, value in request.payload.items() if name != "model"}
    has_limit = "max_tokens" in payload or "max_completion_tokens" in payload
    return tuple({**payload, **({} if has_limit else limit), **STREAMED}.items())
