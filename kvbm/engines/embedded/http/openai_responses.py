"""OpenAI response bodies: whole answers, stream chunks and errors, with vLLM's extensions.

An `AnswerPart` is a part of an answer; a whole answer is one part. Every answer is the only choice of its request. The
two formats differ in where the text is placed.
vLLM's extensions are `token_ids`, `prompt_token_ids` (requested by `return_token_ids`) and `stop_reason`. kvbm's own is
`cached_tokens_by_tier`, which splits the cached prompt tokens into device (G1), host (G2) and disk (G3).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvbm.engines.embedded.engine.request import RequestOutput, TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer. `offsets` are the positions of its tokens in the text of the answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None

    def append(self, other: AnswerPart) -> None:
        self.text += other.text
        self.token_ids += other.token_ids
        self.offsets += other.offsets
        self.logprobs += other.logprobs
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `device_tokens`, `host_tokens`, `disk_tokens`, `shared_tokens`: prompt tokens from
    G1, G2, G3, G4."""

    prompt_tokens: int
    completion_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int = 0
    shared_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput, *, completion_tokens: int) -> Usage:
        """Compute the usage from a request's last output. A cache hit counts at most the prompt's tokens."""
        prompt_tokens = output.num_prompt_tokens
        device_tokens = min(output.num_cached_tokens, prompt_tokens)
        external_tokens = min(output.num_external_tokens, prompt_tokens - device_tokens)
        disk_tokens = min(output.num_disk_tokens, external_tokens)
        shared_tokens = min(output.num_shared_tokens, external_tokens - disk_tokens)
        host_tokens = external_tokens - disk_tokens - shared_tokens
        return cls(prompt_tokens, completion_tokens, device_tokens, host_tokens, disk_tokens, shared_tokens)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.device_tokens - self.external_tokens

    @property
    def external_tokens(self) -> int:
        return self.host_tokens + self.disk_tokens + self.shared_tokens

    def to_json(self) -> Json:
        details = {
            "cached_tokens": self.device_tokens + self.external_tokens,
            "cached_tokens_by_tier": {
                "device": self.device_tokens,
                "host": self.host_tokens,
                "disk": self.disk_tokens,
                "shared": self.shared_tokens,
            },
        }
        return {**token_counts(self.prompt_tokens, self.completion_tokens), "prompt_tokens_details": details}


def token_counts(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the part of the usage that is known before an answer has ended."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class AnswerFormat(ABC):
    """Response format of one endpoint, with the fields that all bodies of one answer share. `prompt_token_ids` is None
    unless the client requested token ids.
    """

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    has_prompt_in_choice: ClassVar[bool]

    answer_id: str
    model: str
    created_unix_s: int
    wants_logprobs: bool
    prompt_token_ids: list[int] | None
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes | None]

    def whole(self, part: AnswerPart, usage: Usage) -> Json:
        body = self._body(self.whole_kind, [self._choice(part, is_whole=True, is_first=True)])
        return {**body, **({} if self.has_prompt_in_choice else self._prompt()), "usage": usage.to_json()}

    def opening(self) -> Json | None:
        """Return the chunk that precedes the first part, None without one."""
        return None

    def chunk(self, part: AnswerPart, *, is_first: bool) -> Json:
        return self._body(self.chunk_kind, [self._choice(part, is_whole=False, is_first=is_first)])

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._body(self.chunk_kind, []), "usage": usage.to_json()}

    @abstractmethod
    def _content(self, part: AnswerPart, *, is_whole: bool) -> Json: ...

    @abstractmethod
    def _logprobs(self, part: AnswerPart) -> Json: ...

    def _body(self, kind: str, choices: list[Json]) -> Json:
        about = {"id": self.answer_id, "object": kind, "created": self.created_unix_s, "model": self.model}
        return {**about, "choices": choices}

    def _prompt(self) -> Json:
        return {} if self.prompt_token_ids is None else {"prompt_token_ids": self.prompt_token_ids}

    def _choice(self, part: AnswerPart, *, is_whole: bool, is_first: bool) -> Json:
        logprobs = self._logprobs(part) if self.wants_logprobs else None
        choice = {"index": 0, **self._content(part, is_whole=is_whole), "logprobs": logprobs}
        choice |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if self.prompt_token_ids is not None:
            choice["token_ids"] = part.token_ids
        return {**choice, **(self._prompt() if is_first and self.has_prompt_in_choice else {})}


class CompletionFormat(AnswerFormat):
    """/v1/completions. `top_logprobs` contains the requested alternatives and always the chosen token."""

    whole_kind = chunk_kind = "text_completion"
    has_prompt_in_choice = True

    def _content(self, part: AnswerPart, *, is_whole: bool) -> Json:
        return {"text": part.text}

    def _logprobs(self, part: AnswerPart) -> Json:
        return {
            "text_offset": part.offsets,
            "token_logprobs": [_json_logprob(token.logprob) for token in part.logprobs],
            "tokens": [self._name(token.token_id) for token in part.logprobs],
            "top_logprobs": [
                {
                    self._name(token_id): _json_logprob(logprob)
                    for token_id, logprob in (*token.top, (token.token_id, token.logprob))
                }
                for token in part.logprobs
            ],
        }

    def _name(self, token_id: int) -> str:
        """Return the token's text, or its bytes if the token is not a whole character."""
        raw = self.token_bytes(token_id)
        text = self.token_text(token_id)
        if raw is None or "�" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatFormat(AnswerFormat):
    """/v1/chat/completions. The opening chunk has the role and no text."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    has_prompt_in_choice = False

    def opening(self) -> Json:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._body(self.chunk_kind, [choice]), **self._prompt()}

    def _content(self, part: AnswerPart, *, is_whole: bool) -> Json:
        if is_whole:
            return {"message": {"role": "assistant", "content": part.text, "refusal": None}}
        return {"delta": {"content": part.text}}

    def _logprobs(self, part: AnswerPart) -> Json:
        content = [
            {
                **self._token(token.token_id, token.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in token.top],
            }
            for token in part.logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self.token_bytes(token_id)
        return {
            "token": self.token_text(token_id),
            "logprob": _json_logprob(logprob),
            "bytes": None if raw is None else list(raw),
        }


def error_body(message: str, *, status: int, param: str | None = None, code: str | int | None = None) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_body(name: str, *, created_unix_s: int, max_model_len: int) -> Json:
    about = {"id": name, "object": "model", "created": created_unix_s, "owned_by": "kvbm"}
    return {**about, "root": name, "parent": None, "max_model_len": max_model_len}


def event(body: Json) -> bytes:
    """Encode a server-sent event. JSON escapes every line break, so one `data:` line is enough."""
    return b"data: %s\n\n" % dumps(body)


def dumps(value: object) -> bytes:
    """Encode as compact ASCII JSON. Raises ValueError for NaN, which is not JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _json_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB
