"""Writing an answer: in one piece, or as a stream of server-sent events, each sent as soon as its tokens are there."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from kvbm.embedded.http.completion import Completion, CompletionFailed
from kvbm.embedded.http.openai import DONE, AnswerFormat, Json, Piece, error_body, event, token_counts
from kvbm.embedded.http.protocol import Generation


async def whole(completion: Completion, pieces: list[Piece], answer: AnswerFormat) -> Json:
    whole = Piece()
    while pieces:
        for piece in pieces:
            whole.append(piece)
        pieces = await completion.next_pieces()
    return answer.whole(whole, await completion.usage())


async def stream(
    request: web.Request,
    completion: Completion,
    pieces: list[Piece],
    answer: AnswerFormat,
    generation: Generation,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """One event per piece, each written as soon as it is there. A client that has gone away ends the handler."""
    response = web.StreamResponse(
        headers={**headers, "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    try:
        await response.prepare(request)
        await _write_events(response, completion, pieces, answer, generation)
        await response.write_eof()
    except ConnectionResetError:
        if request.transport is not None:
            request.transport.abort()
    return response


async def _write_events(
    response: web.StreamResponse,
    completion: Completion,
    pieces: list[Piece],
    answer: AnswerFormat,
    generation: Generation,
) -> None:
    usage: Json = {"usage": None} if generation.include_usage else {}
    is_first, token_count = True, 0
    try:
        while pieces:
            events = []
            for piece in pieces:
                chunk = answer.chunk(piece, is_first=is_first)
                token_count += len(piece.token_ids)
                if generation.continuous_usage:
                    usage = {"usage": token_counts(len(completion.prompt_token_ids), token_count)}
                events.append(event({**chunk, **usage}))
                is_first = False
            await response.write(b"".join(events))
            pieces = await completion.next_pieces()
        last = event(answer.usage_chunk(await completion.usage())) if generation.include_usage else b""
        await response.write(last + DONE)
    except CompletionFailed as error:
        await response.write(event(error_body(str(error), status=500, code="engine_failed")) + DONE)
