"""Requests of clients as the engines get them: which fields pass, and as bytes, so that the proxy handles no values.

Pure functions, fast enough for the event loop: an image of 20 MiB takes 0.1 s, a prompt of a million tokens 0.2 s.

Clients are not trusted: only CLIENT_PARAMS of a client's `kv_transfer_params` pass. The others name the host and the
blocks that an engine reads.

A prefill engine does not get OF_ANSWER, so it cannot refuse them. A request with an unusual value there is computed by
a decode engine alone, which knows what is valid: a request that it refuses then costs no prefill.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from kvbm.engines.embedded.http.request_fields import RequestError
from kvbm.engines.vllm.tickets import RELEASE, TICKET
from kvbm.text.outside import shown_json
from kvbm.text.reading import has_more_values

MAX_VALUES = 1_200_000  # a prompt of a million token ids
CLIENT_PARAMS = ("max_load_tokens", "max_offload_tokens")
ENGINE_PARAMS = ("do_remote_prefill", "do_remote_decode", "tp_size", "pp_size", "dcp_size", "transfer_mode")
ENGINE_PREFIX = "remote_"
PARAMS = ("kv_transfer_params", "ec_transfer_params")
MAX_LIMIT = 2**62
MAX_COUNT = 2**31
COUNTS = ("min_tokens", "max_tokens", "max_completion_tokens")
STREAM_FLAGS = ("include_usage", "continuous_usage_stats")
OF_ANSWER = ("stream", "stream_options", *COUNTS)  # not for prefill
_ASK_FOR_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


NO_OBJECT = "the request is not a JSON object"


@dataclass(frozen=True, slots=True)
class EngineRequests:
    """Bodies for the engines. `prefill` is None if a decode engine computes the request alone.

    `limits` are the client's `kv_transfer_params`, which `rest` lacks. `ticket` names the blocks of the prompt for the
    prefill engine, see `kvbm/engines/vllm/tickets.py`.
    """

    ticket: str
    prefill: bytes | None
    rest: bytes
    limits: Mapping[str, int]

    def decode(self, blocks: Mapping[str, Any]) -> bytes:
        """Return the body for a decode engine, with the address of its blocks as the prefill engine returned it."""
        address = {
            name: value for name, value in blocks.items() if name in ENGINE_PARAMS or name.startswith(ENGINE_PREFIX)
        }
        params = {**self.limits, **address}
        return _with(self.rest, {PARAMS[0]: params} if params else {})


def engine_requests(content: bytes) -> EngineRequests:
    """Return what the engines get for the body of a client. Raises RequestError."""
    if has_more_values(content, MAX_VALUES):
        raise RequestError(f"the body has more than {MAX_VALUES} commas and brackets", status=413)
    try:
        body = from_json(content, allow_inf_nan=False)
        if not isinstance(body, dict):
            raise RequestError(NO_OBJECT)
        request, limits = client_request(body)
        of_answer = {name: request.pop(name) for name in OF_ANSWER if name in request}
        shared = json.dumps(request, allow_nan=False).encode()  # once for both: it takes longer than all else
    except ValueError:  # also of `dumps`, for 1e999
        raise RequestError(NO_OBJECT) from None
    ticket, is_prefilled = uuid.uuid4().hex, is_one_answer(request) and is_usual(of_answer, request)
    prefill = _with(shared, prefill_fields(limits, ticket)) if is_prefilled else None
    return EngineRequests(ticket, prefill, _with(shared, of_answer), limits)


def client_request(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what a client may send to an engine, and its limits. Raises RequestError.

    vLLM merges `vllm_xargs` into the same arguments as `kv_transfer_params`.
    """
    request = {name: value for name, value in body.items() if name not in PARAMS}
    given, others = body.get(PARAMS[0]) or {}, body.get("vllm_xargs")
    if not isinstance(given, dict):
        raise RequestError(f"`{PARAMS[0]}` is not an object")
    limits = {name: _limit(name, given[name]) for name in CLIENT_PARAMS if given.get(name) is not None}
    if isinstance(others, dict):
        request["vllm_xargs"] = {name: value for name, value in others.items() if name not in PARAMS}
    return request, limits


def prefill_fields(limits: Mapping[str, int], ticket: str) -> dict[str, Any]:
    """Return the fields that request one token, which is discarded, and the address of its blocks."""
    return {"max_tokens": 1, PARAMS[0]: {**limits, **_ASK_FOR_BLOCKS, TICKET: ticket}}


def release_request(ticket: str) -> bytes:
    """Return the completion request that makes a prefill engine free the blocks of a ticket."""
    return json.dumps({"prompt": [0], "max_tokens": 1, PARAMS[0]: {RELEASE: ticket}}).encode()


def is_one_answer(request: Mapping[str, Any]) -> bool:
    """Whether a request has one prompt and one answer, so that one address of blocks is sufficient."""
    prompt = request.get("prompt")
    several_prompts = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(item, int) for item in prompt)
    several_answers = any(request.get(name) not in (None, 1) for name in ("n", "best_of"))
    return not several_prompts and not several_answers and not request.get("use_beam_search")


def is_usual(of_answer: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Whether every engine accepts these fields of the answer."""
    given = {name: value for name, value in of_answer.items() if value is not None}
    is_streamed, options = given.get("stream", False), given.get("stream_options", {})
    return (
        all(_is_count(given[name], least=int(name != "min_tokens")) for name in COUNTS if name in given)
        and isinstance(is_streamed, bool)
        and isinstance(options, dict)
        and all(options.get(name) in (None, True, False) for name in STREAM_FLAGS)
        and (is_streamed or not options)
        and not (is_streamed and request.get("prompt_logprobs") is not None)
    )


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_COUNT


def _with(body: bytes, more: Mapping[str, Any]) -> bytes:
    """Return a JSON object with more fields, which it does not have yet."""
    added = json.dumps(more).encode()
    if b"{}" in (body, added):
        return added if body == b"{}" else body
    return b"%b, %b" % (body[:-1], added[1:])


def _limit(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_LIMIT:
        return value
    raise RequestError(f"`{PARAMS[0]}.{name}` is {shown_json(value)}: it must be a number of tokens")
