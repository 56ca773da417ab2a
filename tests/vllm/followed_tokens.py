"""A logits processor with which a request goes on with given tokens, whatever it would choose itself.

    EngineArgs(logits_processors=["followed_tokens:FollowedTokens"])
    SamplingParams(logprobs=2, extra_args={"follow": [17, 4, 99]})

vLLM reports the log-probabilities from before, so that they can be compared with those of another engine to the end of
an answer, also where it has hesitated between two tokens.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class FollowedTokens(AdapterLogitsProcessor):
    """Requests without such tokens are not changed."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        tokens = (params.extra_args or {}).get("follow")
        return None if tokens is None else Follow(tokens)


class Follow:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, said: list[int], logits: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(logits, float("-inf"))
        chosen[self._tokens[len(said)]] = 0.0
        return chosen
