"""Completion: one request while it is being answered, between the engine's thread and the event loop.

    engine thread:  Engine -> on_output ──┐ call_soon_threadsafe
    event loop:                           └─> _arrive -> next_pieces -> HTTP

Only `_hand_over` runs in the engine's thread, and it touches nothing but the loop. The engine sends exactly one last
output per request, also after an abort; whoever created a Completion must `close` it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvbm.embedded.engine.request import FinishReason, RequestOutput, SamplingParams
from kvbm.embedded.http.codec import TextCodec
from kvbm.embedded.http.metrics import EngineMetrics
from kvbm.embedded.http.openai import Piece, Usage
from kvbm.embedded.http.protocol import Generation
from kvbm.embedded.http.stream import TextStream

ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


class ServedEngine(Protocol):
    """What the server needs of an engine. Everything may be used from the event loop's thread, except that `stop` and
    `reset_prefix_cache` wait for the engine's. `failure` says why an engine that is not healthy is not.
    """

    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def is_healthy(self) -> bool: ...
    @property
    def failure(self) -> object: ...

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        on_output: Callable[[RequestOutput], None],
    ) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that has started, with what the server needs beside it. Token ids are below `vocabulary_size`."""

    engine: ServedEngine
    vocabulary_size: int
    codec: TextCodec
    metrics: EngineMetrics


class CompletionFailed(Exception):
    """The engine could not finish an answer that it had accepted."""


class Completion:
    """One request being answered."""

    def __init__(
        self,
        served: Served,
        request_id: str,
        prompt_token_ids: list[int],
        generation: Generation,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._engine = served.engine
        self._metrics = served.metrics
        self._loop = asyncio.get_running_loop()
        decode = partial(served.codec.decode, skip_special_tokens=generation.skip_special_tokens)
        self._text = TextStream(decode, stop=generation.stop, min_tokens=generation.min_tokens)
        self._token_count = 0
        self._outputs: list[RequestOutput] = []
        self._last: RequestOutput | None = None
        self._failure: str | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._is_answered = False
        self._created = time.monotonic()
        self._latest_token: float | None = None

    def submit(self, params: SamplingParams) -> None:
        """Hands the request to the engine. Raises what `Engine.submit` raises."""
        self._engine.submit(self.request_id, self.prompt_token_ids, params, self._hand_over)

    async def next_pieces(self) -> list[Piece]:
        """What has been generated since the last call; waits for it. Empty once the answer is complete.

        Raises CompletionFailed.
        """
        while not self._is_answered:
            await self._news.wait()
            self._news.clear()
            if self._failure is not None:
                raise CompletionFailed(self._failure)
            outputs, self._outputs = self._outputs, []
            pieces = [self._piece(output) for output in outputs if not self._is_answered]
            if pieces:
                return pieces
        return []

    async def usage(self) -> Usage:
        """Waits for the engine's last word on the request, which knows where the prompt came from."""
        await self._ended.wait()
        if self._last is None:
            raise CompletionFailed(self._failure or "the engine has dropped the request")
        return Usage.of(self._last, completion_tokens=self._token_count)

    def fail(self, message: str) -> None:
        """Ends the answer with an error, whatever the engine does. The first reason counts."""
        self._failure = self._failure or message
        self._news.set()
        self._ended.set()

    def close(self) -> None:
        """Aborts what is still running. Safe to call at any time, and once the engine has ended."""
        if self._last is None:
            self._engine.abort(self.request_id)

    def _hand_over(self, output: RequestOutput) -> None:
        """In the engine's thread. A loop that is closed has nobody left who would listen."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrive, output)

    def _arrive(self, output: RequestOutput) -> None:
        if output.new_token_ids:
            self._measure_tokens()
        if output.finish_reason is not None:
            self._last = output
            self._ended.set()
            self._metrics.request_ended(output, seconds=time.monotonic() - self._created)
        self._outputs.append(output)
        self._news.set()

    def _measure_tokens(self) -> None:
        now = time.monotonic()
        if self._latest_token is None:
            self._metrics.first_token(now - self._created)
        else:
            self._metrics.next_token(now - self._latest_token)
        self._latest_token = now

    def _piece(self, output: RequestOutput) -> Piece:
        if output.finish_reason is not None and output.finish_reason not in ENDED_BY_ITSELF:
            raise CompletionFailed(output.error or "the engine has dropped the request")
        piece = Piece()
        for index, token_id in enumerate(output.new_token_ids):
            is_end_token = output.finish_reason is FinishReason.STOP and index == len(output.new_token_ids) - 1
            self._add_token(piece, output, index, text_of=None if is_end_token else token_id)
            if self._text.found_stop is not None:
                break
        self._end(piece, output)
        return piece

    def _add_token(self, piece: Piece, output: RequestOutput, index: int, *, text_of: int | None) -> None:
        """The token that ends an answer counts, but is not part of its text."""
        self._token_count += 1
        piece.token_ids.append(output.new_token_ids[index])
        piece.offsets.append(self._text.characters)
        if output.logprobs is not None:
            piece.logprobs.append(output.logprobs[index])
        if text_of is not None:
            piece.text += self._text.add(text_of)

    def _end(self, piece: Piece, output: RequestOutput) -> None:
        """Sets how the answer ended, if it did."""
        if output.finish_reason is not None and self._text.found_stop is None:
            piece.text += self._text.finish()
        if self._text.found_stop is not None:
            piece.finish_reason, piece.stop_reason = FinishReason.STOP.value, self._text.found_stop
            self.close()
        elif output.finish_reason is not None:
            piece.finish_reason = output.finish_reason.value
        self._is_answered = piece.finish_reason is not None
