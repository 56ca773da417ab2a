"""Completion: one request in progress, between the engine thread and the event loop.

    engine thread:  Engine -> on_output ──┐ call_soon_threadsafe
    event loop:                           └─> _arrive -> next_part -> HTTP

Only `_hand_over` runs in the engine thread, and it uses only the event loop. The engine sends exactly one last output
per request, also after an abort. The creator of a Completion must `close` it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvbm.engines.embedded.engine.request import FinishReason, RequestOutput, SamplingParams
from kvbm.engines.embedded.http.metrics import EngineMetrics
from kvbm.engines.embedded.http.openai_requests import AnswerBody
from kvbm.engines.embedded.http.openai_responses import AnswerPart, Usage
from kvbm.engines.embedded.http.text_codec import TextCodec
from kvbm.engines.embedded.http.text_stream import TextStream

if TYPE_CHECKING:
    from kvbm.engines.embedded.engine.engine import Engine

ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Served:
    """A started engine with its text codec and metrics. Token ids are below `vocabulary_size`. Except `stop`, which
    blocks until the engine thread has ended, its methods may be called on the event loop."""

    engine: Engine
    vocabulary_size: int
    codec: TextCodec
    metrics: EngineMetrics


class CompletionFailed(Exception):
    """The engine could not finish an accepted request."""


class Completion:
    """One request in progress. Collects the outputs of the engine and returns them as parts of an answer."""

    def __init__(
        self, served: Served, request_id: str, body: AnswerBody, prompt_token_ids: list[int], params: SamplingParams
    ) -> None:
        self.prompt_tokens = len(prompt_token_ids)
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._engine = served.engine
        self._metrics = served.metrics
        self._loop = asyncio.get_running_loop()
        decode = partial(served.codec.decode, skip_special_tokens=body.skip_special_tokens)
        self._text = TextStream(decode, stop=params.stop, min_tokens=params.min_tokens)
        self._token_count = 0
        self._is_answered = False
        self._news: asyncio.Queue[RequestOutput | CompletionFailed] = asyncio.Queue()
        self._last: RequestOutput | None = None
        self._created = time.monotonic()
        self._latest_token: float | None = None

    def submit(self) -> None:
        """Submit the request to the engine. Raises what `Engine.submit` raises."""
        self._engine.submit(self._request_id, self._prompt_token_ids, self._params, self._hand_over)

    async def next_part(self) -> AnswerPart | None:
        """Wait for new output and return it; None once the answer is complete. Raises CompletionFailed."""
        return None if self._is_answered else self._part(await self._next())

    async def usage(self) -> Usage:
        """Wait for the last output of the request, which has the sources of its prompt tokens. Raises
        CompletionFailed."""
        while self._last is None:
            await self._next()
        return Usage.of(self._last, completion_tokens=self._token_count)

    def fail(self, message: str) -> None:
        """End the answer with an error, independently of the engine."""
        self._news.put_nowait(CompletionFailed(message))

    def close(self) -> None:
        """Abort the request if it is still running. Safe to call at any time, also after the engine has stopped."""
        if self._last is None:
            self._engine.abort(self._request_id)

    async def _next(self) -> RequestOutput:
        news = await self._news.get()
        if isinstance(news, CompletionFailed):
            raise news
        return news

    def _hand_over(self, output: RequestOutput) -> None:
        """Hand an output to the event loop. Runs in the engine thread. Outputs that arrive after the loop is closed are
        dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrive, output)

    def _arrive(self, output: RequestOutput) -> None:
        if output.new_token_ids:
            self._measure_tokens()
        if output.finish_reason is not None:
            self._last = output
            self._metrics.request_ended(output, seconds=time.monotonic() - self._created)
        self._news.put_nowait(output)

    def _measure_tokens(self) -> None:
        now = time.monotonic()
        if self._latest_token is None:
            self._metrics.first_token.observe(now - self._created)
        else:
            self._metrics.next_token.observe(now - self._latest_token)
        self._latest_token = now

    def _part(self, output: RequestOutput) -> AnswerPart:
        if output.finish_reason is not None and output.finish_reason not in ENDED_BY_ITSELF:
            raise CompletionFailed(output.error or "the engine dropped the request")
        part = AnswerPart(token_ids=output.new_token_ids, logprobs=output.logprobs or [])
        for token_id in output.new_token_ids:
            self._token_count += 1
            part.offsets.append(self._text.characters)
            if output.finish_reason is not FinishReason.STOP:  # the end token counts, but is not part of the text
                part.text += self._text.add(token_id)
        if output.finish_reason is not None and self._text.found_stop is None:
            part.text += self._text.finish()
        if self._text.found_stop is not None:
            part.finish_reason, part.stop_reason = FinishReason.STOP.value, self._text.found_stop
            self.close()
        elif output.finish_reason is not None:
            part.finish_reason = output.finish_reason.value
        self._is_answered = part.finish_reason is not None
        return part
