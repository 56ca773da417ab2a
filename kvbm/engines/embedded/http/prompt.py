"""Prompt preparation: turns the body of a request into prompt tokens and sampling parameters for the engine.

It makes all checks that need a loaded engine: model name, vocabulary and maximum request length.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbm.engines.embedded.engine.request import SamplingParams
from kvbm.engines.embedded.http.completion import Served
from kvbm.engines.embedded.http.openai_requests import AnswerBody, Conversation, Prompt
from kvbm.engines.embedded.http.request_fields import RequestError, wrong
from kvbm.engines.embedded.http.text_codec import TextCodec

if TYPE_CHECKING:
    from kvbm.engines.embedded.engine.engine import Engine

MAX_CHARACTERS_PER_TOKEN = 128  # far more than any text has on average
LONG_TEXT_CHARACTERS = 16_384  # above, chat template and tokenizer run in a separate thread
CHARACTERS_PER_MESSAGE = 64  # what a chat template adds


async def prepare(served: Served, body: AnswerBody) -> tuple[list[int], SamplingParams]:
    """Return prompt token ids and sampling parameters. Raises RequestError if the engine cannot serve the request."""
    check_model(served.engine, body.model)
    sampling = body.sampling
    if sampling.stop and not served.codec.has_text:
        raise RequestError("`stop` requires a tokenizer, and the model has none", param="stop")
    token_ids = await _token_ids(served, body.prompt, adds_special_tokens=body.add_special_tokens)
    max_tokens = _max_tokens(served.engine, len(token_ids), body)
    if sampling.min_tokens > max_tokens:
        raise wrong("min_tokens", sampling.min_tokens, f"at most `max_tokens`, which is {max_tokens}")
    return token_ids, replace(sampling, max_tokens=max_tokens)


def check_model(engine: Engine, name: str | None) -> None:
    if name is not None and name != engine.model_name:
        error = wrong("model", name, f'"{engine.model_name}", the only model of this server')
        raise RequestError(error.message, param="model", code="model_not_found", status=404)


def _check_token_ids(served: Served, token_ids: list[int]) -> None:
    size = served.vocabulary_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
        index = next(index for index, token_id in enumerate(token_ids) if not 0 <= token_id < size)
        error = wrong(f"prompt[{index}]", token_ids[index], f"a token id from 0 to {size - 1}")
        raise RequestError(error.message, param="prompt")


async def _token_ids(served: Served, prompt: Prompt, *, adds_special_tokens: bool) -> list[int]:
    """Return the prompt's tokens, validated except for their number."""
    if isinstance(prompt, list):
        _check_token_ids(served, prompt)
        return prompt
    most = served.engine.max_model_len
    token_ids = await encode(served.codec, prompt, adds_special_tokens=adds_special_tokens, max_tokens=most)
    if not token_ids:
        raise RequestError("the prompt has no tokens: it must have at least one", param="prompt")
    return token_ids


async def encode(
    codec: TextCodec, prompt: str | Conversation, *, adds_special_tokens: bool, max_tokens: int
) -> list[int]:
    """Tokenize a prompt, a long one in a separate thread. Raises RequestError if it is far too long."""

    def run() -> list[int]:
        text = prompt if isinstance(prompt, str) else codec.render(prompt)
        if len(text) > max_tokens * MAX_CHARACTERS_PER_TOKEN:
            raise RequestError(
                f"the prompt has {len(text)} characters: this is above the limit of {max_tokens} tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        return codec.encode(text, add_special_tokens=adds_special_tokens)

    return await asyncio.to_thread(run) if _characters(prompt) > LONG_TEXT_CHARACTERS else run()


def _characters(prompt: str | Conversation) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"]) + CHARACTERS_PER_MESSAGE for message in prompt.contents)


def _max_tokens(engine: Engine, prompt_tokens: int, body: AnswerBody) -> int:
    """Return how many tokens may be generated: the client's limit, or the default within the remaining length."""
    room = engine.max_model_len - prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens: with at least one generated token it must fit into "
            f"{engine.max_model_len} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    requested = body.token_limit
    if requested is None:
        return room if body.default_max_tokens is None else min(room, body.default_max_tokens)
    if requested > room:
        raise RequestError(
            f"`max_tokens` is {requested}: it must be at most {room}, because the prompt uses {prompt_tokens} of "
            f"{engine.max_model_len} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return requested
