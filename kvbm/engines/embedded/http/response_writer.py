"""Response writer: sends the answer to a request as one JSON body, or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from kvbm.engines.embedded.http.completion import Completion, CompletionFailed
from kvbm.engines.embedded.http.openai_requests import AnswerBody, StreamOptions
from kvbm.engines.embedded.http.openai_responses import (
    DONE,
    AnswerFormat,
    AnswerPart,
    Json,
    error_body,
    event,
    token_counts,
)


async def whole_body(completion: Completion, part: AnswerPart | None, answer: AnswerFormat) -> Json:
    """Wait for the complete answer, which begins with `part`. Raises CompletionFailed."""
    whole = AnswerPart()
    while part is not None:
        whole.append(part)
        part = await completion.next_part()
    return answer.whole(whole, await completion.usage())


async def stream_response(
    request: web.Request,
    completion: Completion,
    part: AnswerPart | None,
    answer: AnswerFormat,
    body: AnswerBody,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Write each part as an event as soon as it arrives. The handler ends when the client disconnects."""
    response = web.StreamResponse(
        headers={**headers, "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    events = _Events(completion, answer, body.usage_in_stream)
    try:
        await response.prepare(request)
        try:
            while part is not None:
                await response.write(events.of(part))
                part = await completion.next_part()
            await response.write(await events.last() + DONE)
        except CompletionFailed as error:
            await response.write(event(error_body(str(error), status=500, code="engine_failed")) + DONE)
        await response.write_eof()
    except ConnectionResetError:
        if request.transport is not None:
            request.transport.abort()
    return response


class _Events:
    """Encodes parts as events. Counts the tokens that were sent."""

    def __init__(self, completion: Completion, answer: AnswerFormat, usage: StreamOptions) -> None:
        self._completion = completion
        self._answer = answer
        self._options = usage
        self._is_first = True
        self._sent_tokens = 0

    def of(self, part: AnswerPart) -> bytes:
        is_first, self._is_first = self._is_first, False
        opening = self._answer.opening() if is_first else None
        begin = b"" if opening is None else event({**opening, **self._usage()})
        self._sent_tokens += len(part.token_ids)
        return begin + event({**self._answer.chunk(part, is_first=is_first), **self._usage()})

    async def last(self) -> bytes:
        """Return the event with the usage of the whole request, if the client requested it. Raises CompletionFailed."""
        if not self._options.include_usage:
            return b""
        return event(self._answer.usage_chunk(await self._completion.usage()))

    def _usage(self) -> Json:
        if self._options.continuous_usage_stats:
            return {"usage": token_counts(self._completion.prompt_tokens, self._sent_tokens)}
        return {"usage": None} if self._options.include_usage else {}
