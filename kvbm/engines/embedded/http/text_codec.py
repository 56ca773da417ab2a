"""TextCodec: a Hugging Face tokenizer for the server. Invalid input from a client always becomes a RequestError.

It runs on the event loop; long texts are encoded in a separate thread, because encoding can take milliseconds.
Without a tokenizer in the model directory, the server accepts and returns token ids only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.engines.embedded.http.openai_requests import Conversation
from kvbm.engines.embedded.http.request_fields import RequestError
from kvbm.engines.embedded.http.text_stream import REPLACEMENT
from kvbm.text.outside import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TextCodec:
    """Encodes text to token ids, decodes token ids, and renders chat templates."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes_of_letters: dict[str, int] = {}
        if tokenizer is not None:
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            tokenizer.encode("")  # sets the options of the Rust tokenizer: no truncation, no padding
            self._bytes_of_letters = {letter: byte for byte, letter in bytes_to_unicode().items()}

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._require("prompt").encode(
            text, add_special_tokens=add_special_tokens, verbose=False
        )
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text, with U+FFFD for incomplete characters; an empty text without a tokenizer."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token, or None if they are unknown."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        piece = None if self._backend is None else self._backend.id_to_token(token_id)
        if piece is None:
            return None
        if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        values = [self._bytes_of_letters.get(letter) for letter in piece]
        return None if None in values else bytes(value for value in values if value is not None)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def render(self, conversation: Conversation) -> str:
        """Render the prompt with the model's chat template. Raises RequestError if the template fails."""
        from jinja2.exceptions import TemplateError

        tokenizer = self._require("messages")
        if not tokenizer.chat_template:
            raise RequestError("the model has no chat template: use /v1/completions", param="messages")
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters
        for name in conversation.chat_template_kwargs:
            if name in reserved or name == "messages":
                raise RequestError(
                    f"`chat_template_kwargs.{shown(name)}` is reserved: a request cannot set it",
                    param="chat_template_kwargs",
                )
        try:
            text = tokenizer.apply_chat_template(
                conversation.contents,
                tokenize=False,
                add_generation_prompt=conversation.add_generation_prompt,
                **conversation.chat_template_kwargs,
            )
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            raise RequestError(
                f"the model's chat template rejects the messages: {shown(error)}", param="messages"
            ) from error
        return str(text)

    def _require(self, param: str) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer: send token ids as `prompt` to /v1/completions", param=param)
        return self._tokenizer
