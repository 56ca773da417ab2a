"""Response writer: sends an answer as one JSON body, or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from kvbm.embedded.http.completion import Completion, CompletionFailed
from kvbm.embedded.http.openai_requests import Generation
from kvbm.embedded.http.openai_responses import DONE, AnswerFormat, AnswerPart, Json, error_body, event, token_counts


async def whole_body(completion: Completion, parts: list[AnswerPart], answer: AnswerFormat) -> Json:
    """Wait for the complete answer. Raises CompletionFailed."""
    whole = AnswerPart()
    while parts:
        for part in parts:
            whole.append(part)
        parts = await completion.next_parts()
    return answer.whole(whole, await completion.usage())


async def stream_response(
    request: web.Request,
    completion: Completion,
    parts: list[AnswerPart],
    answer: AnswerFormat,
    generation: Generation,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Write each part as an event as soon as it arrives. The handler ends when the client disconnects."""
    response = web.StreamResponse(
        headers={**headers, "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    try:
        await response.prepare(request)
        await _write_events(response, completion, parts, answer, generation)
        await response.write_eof()
    except ConnectionResetError:
        if request.transport is not None:
            request.transport.abort()
    return response


async def _write_events(
    response: web.StreamResponse,
    completion: Completion,
    parts: list[AnswerPart],
    answer: AnswerFormat,
    generation: Generation,
) -> None:
    usage: Json = {"usage": None} if generation.include_usage else {}
    is_first, token_count = True, 0
    try:
        while parts:
            events = []
            for part in parts:
                chunk = answer.chunk(part, is_first=is_first)
                token_count += len(part.token_ids)
                if generation.continuous_usage:
                    usage = {"usage": token_counts(len(completion.prompt_token_ids), token_count)}
                events.append(event({**chunk, **usage}))
                is_first = False
            await response.write(b"".join(events))
            parts = await completion.next_parts()
        last = event(answer.usage_chunk(await completion.usage())) if generation.include_usage else b""
        await response.write(last + DONE)
    except CompletionFailed as error:
        await response.write(event(error_body(str(error), status=500, code="engine_failed")) + DONE)
