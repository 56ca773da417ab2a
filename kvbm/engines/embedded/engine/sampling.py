"""Sampling: chooses tokens from logits.

A sampled token depends only on its logits, its request's seed and its position. The random number is a hash of seed and
position, so batching, preemption and recomputation do not change the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from kvbm.engines.embedded.engine.request import Request, SamplingParams, TokenLogprobs


def sample(
    logits: torch.Tensor, requests: list[Request], stop_token_ids: Iterable[int]
) -> list[tuple[int, TokenLogprobs | None]]:
    """Choose the next token of each request; logits is [len(requests), vocabulary], float32."""
    chosen = _without_early_stops(logits, requests, list(stop_token_ids))
    greedy: list[int] = chosen.argmax(dim=-1).tolist()
    results: list[tuple[int, TokenLogprobs | None]] = []
    for row, request in enumerate(requests):
        token_id = greedy[row]
        if request.params.temperature > 0.0:
            token_id = _draw(chosen[row], request.params, uniform(request.sampling_seed, request.num_tokens))
        top_count = request.params.logprobs
        results.append((token_id, None if top_count is None else _logprobs(logits[row], token_id, top_count)))
    return results


def uniform(seed: int, position: int) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on the arguments."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _without_early_stops(logits: torch.Tensor, requests: list[Request], stop_token_ids: list[int]) -> torch.Tensor:
    early = [row for row, request in enumerate(requests) if len(request.output_token_ids) < request.params.min_tokens]
    if not early or not stop_token_ids:
        return logits
    masked = logits.clone()
    for row in early:
        masked[row, stop_token_ids] = -torch.inf
    return masked


def _draw(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """Invert the cumulative distribution after temperature, top-k and top-p. Sorts only for top-k and top-p."""
    scaled = logits.double() / params.temperature
    if params.top_k == 0 and params.top_p >= 1.0:
        return _invert(scaled.softmax(dim=-1), number)
    ordered, token_ids = scaled.topk(min(params.top_k or len(scaled), len(scaled)))
    weights = ordered.softmax(dim=-1)
    if params.top_p < 1.0:
        before = weights.cumsum(dim=-1) - weights
        weights = weights[before < params.top_p]
    return int(token_ids[_invert(weights, number)])


def _invert(weights: torch.Tensor, number: float) -> int:
    cumulative = weights.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    return min(index, len(weights) - 1)


def _logprobs(logits: torch.Tensor, token_id: int, top_count: int) -> TokenLogprobs:
    everything = logits.log_softmax(dim=-1)
    values, token_ids = everything.topk(min(top_count, len(everything)))
    top = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(everything[token_id]), top)
