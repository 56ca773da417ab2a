"""An engine without a model: it answers over HTTP as a real one would, after a time that follows from its cache.

G1 and G2 are LRU lists of block names with a capacity. A request's time to first token is a base plus a price per token
computed and per token brought from G2; requests are served one after the other. Answers follow from the prompt alone,
so that any two engines agree, unless a fault is asked for: `faults` maps the number of a request (0, 1, ... since the
last reset) to what goes wrong with it: `wrong` (the last token), `end` (of the engine), or a status such as `http_500`.
A prompt is a list of token ids, or a text, of which each byte is a token.

Used in a thread of the test, or as a program: `python mock_engine.py --port N --options JSON`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path += map(str, Path(__file__).parents[:2])  # as a program

from fake_server import Connection, Request
from openai_mock import Answer, Arrival, OpenAIMock

from kvbm_cli.bench.workload.plan import CHAT, COMPLETIONS, RESPONSES

BLOCK = 16
VOCABULARY = 256
TRTLLM_FIELDS = {
    "model", "prompt", "max_tokens", "min_tokens", "ignore_eos", "temperature", "stream", "stream_options",
    "detokenize", "logprobs",
}  # fmt: skip


@dataclass
class Options:
    """Times in milliseconds. `g2_blocks` of 0 is an engine without block manager; `is_like_vllm` one that says in the
    body whether it was reset, and not per request which tier a cached token came from.

    Without `has_token_ids`, `return_token_ids` is ignored. Without `has_ignore_eos` or `has_usage`, a request that has
    such a field is refused. `salt` changes all answers, and `resets_to_refuse` of -1 is a server that cannot be reset.
    One with `keeps_cache` says that it was reset, and was not. `is_like_trtllm` is a server of TensorRT-LLM: it refuses
    fields that it does not have, sends token ids in place of text with `detokenize: false`, reports of its cache only
    how many tokens it found, and has neither `/tokenize` nor a request that empties its cache.
    """

    g1_blocks: int = 10_000
    g2_blocks: int = 0
    base_ms: float = 2.0
    computed_token_ms: float = 0.05
    g2_token_ms: float = 0.0
    token_ms: float = 1.0
    faults: dict[int, str] = field(default_factory=dict)
    has_metrics: bool = True
    resets_to_refuse: int = 1
    keeps_cache: bool = False
    is_like_vllm: bool = False
    is_like_trtllm: bool = False
    model: str = "mock"
    has_tokenize: bool = True
    has_token_ids: bool = True
    has_chat_logprobs: bool = True
    has_ignore_eos: bool = True
    has_usage: bool = True
    refuses_all: bool = False
    salt: str = ""

    def unknown_fields(self, body: Mapping[str, object]) -> set[str]:
        if self.is_like_trtllm:
            return {*(body.keys() - TRTLLM_FIELDS), *(("logprobs",) if body.get("logprobs") else ())}
        return body.keys() & {
            *(() if self.has_chat_logprobs or "messages" not in body else ("logprobs",)),
            *(() if self.has_ignore_eos else ("ignore_eos", "min_tokens")),
            *(() if self.has_usage else ("stream_options",)),
        }


class LruTier:
    """Names of blocks, the least recently used first out."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self.added = self.evicted = 0

    def prefix(self, names: Sequence[bytes]) -> int:
        count = 0
        while count < len(names) and names[count] in self._names:
            count += 1
        return count

    def put(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self.added += name not in self._names
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._capacity:
            self._names.popitem(last=False)
            self.evicted += 1

    def clear(self) -> None:
        self._names.clear()


def block_names(tokens: Sequence[int]) -> list[bytes]:
    names, name = [], b""
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        name = hashlib.sha256(name + bytes(tokens[start : start + BLOCK])).digest()
        names.append(name)
    return names


def answer_to(prompt: Sequence[int], count: int, salt: str = "") -> list[int]:
    seed = hashlib.sha256(bytes(prompt) + salt.encode()).digest()
    return [hashlib.sha256(seed + bytes([index])).digest()[0] for index in range(count)]


class Model:
    """Cache, clock and counters of one engine."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.g1, self.g2 = LruTier(options.g1_blocks), LruTier(options.g2_blocks)
        self.tokens = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.resets_to_refuse = options.resets_to_refuse
        self.queue_s, self.served, self.number, self.free_at = 0.0, 0, 0, 0.0
        self.resets = 0

    def reset(self) -> None:
        self.g1.clear()
        self.g2.clear()
        self.number = 0
        self.resets += 1

    def admit(self, prompt: list[int], answer: list[int], now: float) -> tuple[int, int, float]:
        """Tokens from G1 and G2, and the time at which the first token is there."""
        names = block_names([*prompt, *answer])
        usable = names[: (len(prompt) - 1) // BLOCK]
        from_g1 = self.g1.prefix(usable)
        from_g2 = max(0, self.g2.prefix(usable) - from_g1)
        computed = len(prompt) - (from_g1 + from_g2) * BLOCK
        for tier in (self.g1, self.g2):
            tier.put(names)
        self.tokens["local_compute"] += computed
        self.tokens["local_cache_hit"] += from_g1 * BLOCK
        self.tokens["external_kv_transfer"] += from_g2 * BLOCK
        start = max(now, self.free_at)
        options = self.options
        first_ms = options.base_ms + computed * options.computed_token_ms + from_g2 * BLOCK * options.g2_token_ms
        first_at = start + first_ms / 1e3
        self.free_at = first_at + len(answer) * options.token_ms / 1e3
        self.queue_s += start - now
        self.served += 1
        return from_g1 * BLOCK, from_g2 * BLOCK, first_at

    def metrics(self) -> str:
        lines = ["# TYPE vllm:prompt_tokens_by_source counter"]
        lines += [f'vllm:prompt_tokens_by_source_total{{source="{name}"}} {n}' for name, n in self.tokens.items()]
        lines += ["# TYPE vllm:request_queue_time_seconds histogram"]
        lines += [f'vllm:request_queue_time_seconds_bucket{{le="+Inf"}} {self.served}']
        lines += [f"vllm:request_queue_time_seconds_sum {self.queue_s}"]
        lines += [f"vllm:request_queue_time_seconds_count {self.served}"]
        lines += ["# TYPE vllm:cache_config_info gauge"]
        lines += [f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.options.g1_blocks}"}} 1.0']
        return "\n".join([*lines, *self.kvbm_metrics()]) + "\n"

    def kvbm_metrics(self) -> list[str]:
        if not self.options.g2_blocks:
            return []
        lines = []
        counters = {
            "kvbm_onboard_blocks_h2d": self.tokens["external_kv_transfer"] // BLOCK,
            "kvbm_offload_blocks_d2h": self.g2.added,
            "kvbm_evicted_blocks": self.g2.evicted,
        }
        for name, count in counters.items():
            lines += [f"# TYPE {name} untyped", f"{name} {count}"]
        return [*lines, "# TYPE kvbm_host_blocks gauge", f'kvbm_host_blocks{{state="free"}} {self.options.g2_blocks}']


class MockEngine(OpenAIMock):
    """Serves a Model."""

    def __init__(self, options: Options, *, port: int = 0) -> None:
        super().__init__(port=port)
        self.model, self.model_name = Model(options), options.model
        self._ended = False

    @property
    def resets(self) -> int:
        return self.model.resets

    @property
    def bodies(self) -> list[dict[str, object]]:
        """Of all completions, the refused ones included."""
        return [one.json for one in self.arrivals]

    def has_ended(self) -> bool:
        return self._ended

    def control(self, request: Request, connection: Connection) -> None:
        options, path = self.model.options, request.path
        if options.is_like_trtllm and path == "/metrics":
            connection.reply(200, "[]")  # statistics of its iterations
        elif options.is_like_trtllm and path != "/health":
            connection.reply(404, {"detail": "Not Found"})
        elif path == "/tokenize" and options.has_tokenize:
            tokens = [byte % VOCABULARY for byte in request.json["prompt"].encode()]
            connection.reply(200, {"tokens": tokens, "count": len(tokens)})
        elif path == "/metrics":
            connection.reply(200, self.model.metrics() if options.has_metrics else "")
        elif path == "/reset_prefix_cache" and options.resets_to_refuse >= 0:
            connection.reply(*self._reset())
        else:
            connection.reply(200 if path == "/health" else 404, {"pid": os.getpid()})

    def _reset(self) -> tuple[int, str]:
        is_like_vllm = self.model.options.is_like_vllm
        if self.model.resets_to_refuse:
            self.model.resets_to_refuse -= 1
            return (200, '{"success": false}') if is_like_vllm else (409, "")
        if not self.model.options.keeps_cache:
            self.model.reset()
        return 200, '{"success": true}' if is_like_vllm else ""

    def answer_to(self, arrival: Arrival) -> Answer:
        model, options, body = self.model, self.model.options, arrival.json
        unknown_fields = options.unknown_fields(body)
        if options.refuses_all or unknown_fields:
            return Answer(status=400, message=f"unknown fields: {', '.join(sorted(unknown_fields))}")
        fault = options.faults.get(model.number, "")
        model.number += 1
        if fault.startswith("http_"):
            return Answer(status=int(fault.removeprefix("http_")))
        prompt = prompt_of(body, arrival.path)
        tokens = answer_to(
            prompt, body["max_output_tokens" if arrival.path == RESPONSES else "max_tokens"], options.salt
        )
        arrival.prompt_tokens, arrival.token_ids = len(prompt), tokens
        if fault == "end":
            self._ended = True
            return Answer(first_ms=0.0, cut_after=0)
        from_g1, from_g2, first_at = model.admit(prompt, tokens, time.monotonic())
        if fault == "wrong":
            arrival.token_ids = [*tokens[:-1], (tokens[-1] + 1) % VOCABULARY]
        has_tiers = not (options.is_like_vllm or options.is_like_trtllm)
        return Answer(
            first_ms=(first_at - arrival.complete_s) * 1e3,
            token_ms=options.token_ms,
            cached_tokens=from_g1 + from_g2,
            cached_by_tier={"device": from_g1, "host": from_g2} if has_tiers else None,
            sends_usage=options.has_usage,
        )

    @staticmethod
    def token_text(token: int) -> str:
        """Each token is a character of three bytes."""
        return chr(ord("€") + token)

    def choice_of(self, arrival: Arrival, tokens: list[int], *, is_last: bool) -> dict[str, Any]:
        choice = super().choice_of(arrival, tokens, is_last=is_last)
        if not self.model.options.has_token_ids:
            absent = ("token_ids",) if arrival.path == CHAT else ("token_ids", "logprobs")
            choice = {key: value for key, value in choice.items() if key not in absent}
        if not self.model.options.is_like_trtllm:
            return choice
        has_text = arrival.json.get("detokenize") is not False
        return {  # with every field that TensorRT-LLM sends, also without a value
            **choice,
            **({"token_ids": None} if has_text else {"text": "", "token_ids": tokens}),
            "logprobs": None,
            "stop_reason": None,
            "avg_decoded_tokens_per_iter": 1.0,
        }


def prompt_of(body: dict[str, Any], path: str) -> list[int]:
    given = body["prompt"] if path == COMPLETIONS else rendered(body["messages" if path == CHAT else "input"])
    return list(given.encode()) if isinstance(given, str) else given


def rendered(messages: list[dict[str, str]]) -> str:
    """As the template of a model for chats does it."""
    return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    given = parser.parse_args()
    MockEngine(Options(**given.options), port=given.port).serve_forever()


if __name__ == "__main__":
    sys.exit(main())
