"""Completion: the answer to one HTTP request in progress, between the engine thread and the event loop.

    engine thread:  Engine -> on_output ──┐ call_soon_threadsafe
    event loop:                           └─> _arrive -> next_part -> HTTP

There is one choice for each prompt of the request, times `n`. Every choice is a request of its own in the engine.
Prompt tokens count once per prompt, as in the OpenAI API.

    prompts  A, B with n = 2      choices  0: A   1: A   2: B   3: B

Only `_hand_over` runs in the engine thread, and it uses only the event loop. The engine sends exactly one last output
per choice, also after an abort. The creator of a Completion must `close` it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
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
    """Collects the outputs of the engine for the choices and returns them as parts of an answer. `prepared` has the
    prompt and the parameters of each choice."""

    def __init__(
        self, served: Served, request_id: str, body: AnswerBody, prepared: Sequence[tuple[list[int], SamplingParams]]
    ) -> None:
        self._engine = served.engine
        self._loop = asyncio.get_running_loop()
        self._per_prompt = body.n
        self._choices = [
            _Choice(served, f"{request_id}-{index}", body, index, *choice) for index, choice in enumerate(prepared)
        ]
        self._news: asyncio.Queue[tuple[_Choice, RequestOutput] | CompletionFailed] = asyncio.Queue()

    def submit(self) -> None:
        """Submit the choices to the engine. Raises what `Engine.submit` raises."""
        for choice in self._choices:
            on_output = partial(self._hand_over, choice)
            self._engine.submit(choice.request_id, choice.prompt_token_ids, choice.params, on_output)

    async def next_part(self) -> AnswerPart | None:
        """Wait for new output of any choice and return it; None once all answers are complete.

        Raises CompletionFailed as soon as one choice has failed.
        """
        while not all(choice.is_answered for choice in self._choices):
            choice, output = await self._next()
            if not choice.is_answered:
                part = choice.part(output)
                if choice.is_answered:
                    self._abort(choice)  # after a stop string, which the engine does not see
                return part
        return None

    def prompt_tokens(self, index: int) -> int:
        return len(self._choices[index].prompt_token_ids)

    async def usage(self) -> Usage:
        """Wait for the last output of every choice, which has the sources of its prompt tokens. Raises
        CompletionFailed."""
        while any(choice.last is None for choice in self._choices):
            await self._next()
        usages = [choice.usage() for choice in self._choices]
        return Usage.sum(usages[:: self._per_prompt], completion_tokens=sum(each.completion_tokens for each in usages))

    def fail(self, message: str) -> None:
        """End the answer with an error, independently of the engine."""
        self._news.put_nowait(CompletionFailed(message))

    def close(self) -> None:
        """Abort choices that are still running. Safe to call at any time, also after the engine has stopped."""
        for choice in self._choices:
            self._abort(choice)

    def _abort(self, choice: _Choice) -> None:
        if choice.last is None:
            self._engine.abort(choice.request_id)

    async def _next(self) -> tuple[_Choice, RequestOutput]:
        news = await self._news.get()
        if isinstance(news, CompletionFailed):
            raise news
        return news

    def _hand_over(self, choice: _Choice, output: RequestOutput) -> None:
        """Hand an output to the event loop. Runs in the engine thread. Outputs that arrive after the loop is closed are
        dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrive, choice, output)

    def _arrive(self, choice: _Choice, output: RequestOutput) -> None:
        choice.note(output)
        self._news.put_nowait((choice, output))


class _Choice:
    """One request of the engine, and the text of its answer."""

    def __init__(
        self,
        served: Served,
        request_id: str,
        body: AnswerBody,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.is_answered = False
        self.last: RequestOutput | None = None
        self._index = index
        self._metrics = served.metrics
        decode = partial(served.codec.decode, skip_special_tokens=body.skip_special_tokens)
        self._text = TextStream(decode, stop=params.stop, min_tokens=params.min_tokens)
        self._token_count = 0
        self._created = time.monotonic()
        self._latest_token: float | None = None

    def note(self, output: RequestOutput) -> None:
        """Note an output at the time when it arrives."""
        now = time.monotonic()
        if output.new_token_ids:
            if self._latest_token is None:
                self._metrics.first_token.observe(now - self._created)
            else:
                self._metrics.next_token.observe(now - self._latest_token)
            self._latest_token = now
        if output.finish_reason is not None:
            self.last = output
            self._metrics.request_ended(output, seconds=now - self._created)

    def usage(self) -> Usage:
        assert self.last is not None, f"{self.request_id} has not ended"
        return Usage.of(self.last, completion_tokens=self._token_count)

    def part(self, output: RequestOutput) -> AnswerPart:
        """Return an output as a part of the answer. Raises CompletionFailed."""
        if output.finish_reason is not None and output.finish_reason not in ENDED_BY_ITSELF:
            raise CompletionFailed(output.error or "the engine dropped the request")
        part = AnswerPart(index=self._index)
        for index, token_id in enumerate(output.new_token_ids):
            is_end_token = output.finish_reason is FinishReason.STOP and index == len(output.new_token_ids) - 1
            self._add_token(part, output, index, text_of=None if is_end_token else token_id)
            if self._text.found_stop is not None:
                break
        self._end(part, output)
        return part

    def _add_token(self, part: AnswerPart, output: RequestOutput, index: int, *, text_of: int | None) -> None:
        """Add one token. The token that ends an answer counts, but is not part of its text."""
        self._token_count += 1
        part.token_ids.append(output.new_token_ids[index])
        part.offsets.append(self._text.characters)
        if output.logprobs is not None:
            part.logprobs.append(output.logprobs[index])
        if text_of is not None:
            part.text += self._text.add(text_of)

    def _end(self, part: AnswerPart, output: RequestOutput) -> None:
        if output.finish_reason is not None and self._text.found_stop is None:
            part.text += self._text.finish()
        if self._text.found_stop is not None:
            part.finish_reason, part.stop_reason = FinishReason.STOP.value, self._text.found_stop
        elif output.finish_reason is not None:
            part.finish_reason = output.finish_reason.value
        self.is_answered = part.finish_reason is not None
