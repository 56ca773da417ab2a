"""A logits processor with which a request goes on with given tokens, whatever it would choose itself.

    EngineArgs(logits_processors=["followed_tokens:FollowedTokens"])
    SamplingParams(logprobs=2, extra_args={"follow": [17, 4, 99]})

vLLM reports the log-probabilities from before, so that they can be compared with those of another engine to the end of
an answer, also where it has hesitated between two tokens.
"""

from __future__ import annotations

import torch
from model_runner import IS_V2
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor


class Follow:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, said: list[int], logits: torch.Tensor) -> torch.Tensor:
        return self.chosen(len(said), logits)

    def chosen(self, said: int, logits: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(logits, float("-inf"))
        chosen[self._tokens[said]] = 0.0
        return chosen


def follow_of(params: SamplingParams) -> Follow | None:
    tokens = (params.extra_args or {}).get("follow")
    return None if tokens is None else Follow(tokens)


class FollowedTokensInV1(AdapterLogitsProcessor):
    """Requests without such tokens are not changed."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return follow_of(params)


class FollowedTokensInV2(LogitsProcessor):
    """The same for a batch whose rows belong to places of requests."""

    def __init__(self, vllm_config, req_states) -> None:
        self._prompt_len = req_states.prompt_len.np
        self._follows: dict[int, Follow | None] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._follows[req_idx] = follow_of(sampling_params)
        return self._follows[req_idx] is not None

    def apply(self, logits: torch.Tensor, ctx) -> torch.Tensor:
        found = logits.clone()  # log-probabilities are those of `logits`
        for row, (place, position) in enumerate(zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)):
            follow, said = self._follows.get(place), position + 1 - int(self._prompt_len[place])
            if follow is not None and said >= 0:  # a part of a prompt samples nothing
                found[row] = follow.chosen(said, logits[row])
        return found


FollowedTokens = FollowedTokensInV2 if IS_V2 else FollowedTokensInV1
