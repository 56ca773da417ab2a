"""Input and output of the engine: SamplingParams, Request and RequestOutput.

The engine thread owns a Request from `Engine.submit` until its last output. Its attributes have vLLM's names, because
connectors read them. Token positions of one request:

    0 ............ num_cached_tokens ......... + num_external_tokens ......... num_computed_tokens ........ num_tokens
    found in G1    loaded by the connector      computed here                   not computed yet

`num_cached_tokens` and `num_external_tokens` describe the first admission and are not counted again after a preemption.
`num_disk_tokens` of the external tokens were on disk, `num_shared_tokens` in the shared tier.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbm import hashing


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; `top_k` 0 keeps the whole vocabulary.

    The same `seed` gives the same tokens, independently of other requests. The engine ignores `stop`, because it sees
    only tokens: the server finds stop strings and aborts. `logprobs` is the number of alternatives for each token.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a chosen token, before temperature, and of the most likely tokens, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The next token of one request; none if it is aborted or fails. The last output has a `finish_reason`, and only it
    has the counts below.

    `queue_time_s` is the time from arrival to the first forward pass, including a load; `prefill_time_s` from there to
    the first token. They are None if the request did not reach that point.
    """

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_disk_tokens: int = 0
    num_shared_tokens: int = 0
    queue_time_s: float | None = None
    prefill_time_s: float | None = None


@dataclass(eq=False, slots=True)
class Request:
    """One request inside the engine. `block_hashes` has the hash of every full block of `all_token_ids`. `block_ids` is
    its G1 block table; the first `registered_blocks` of it were added to the prefix cache. `finish_reason` is None
    unless a token ended it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    on_output: Callable[[RequestOutput], None]
    block_size: int
    hash_root: bytes
    sampling_seed: int
    max_output_tokens: int
    tenant: bytes = b""
    arrival_index: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None
    all_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_disk_tokens: int = 0
    num_shared_tokens: int = 0
    registered_blocks: int = 0
    may_register: bool = True
    was_admitted: bool = False
    failed_block_ids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)
        self._extend_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_computed_tokens

    def append(self, token_id: int) -> None:
        """Append a sampled token. The next forward pass computes its KV."""
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)
        if len(self.all_token_ids) % self.block_size == 0:
            self._extend_hashes()

    def last_output(
        self,
        reason: FinishReason,
        *,
        new_token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        started, first = self.first_scheduled_time, self.first_token_time
        return RequestOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids or [],
            logprobs=logprobs,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=len(self.output_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_external_tokens=self.num_external_tokens,
            num_disk_tokens=min(self.num_disk_tokens, self.num_external_tokens),
            num_shared_tokens=min(self.num_shared_tokens, self.num_external_tokens),
            queue_time_s=None if started is None else started - self.arrival_time,
            prefill_time_s=None if started is None or first is None else first - started,
        )

    def _extend_hashes(self) -> None:
        hashing.extend(self.block_hashes, self.all_token_ids, block_size=self.block_size, root=self.hash_root)
