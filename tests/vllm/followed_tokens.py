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
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState


class FollowedTokensOfV1(AdapterLogitsProcessor):
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
        return only(self._tokens[len(said)], logits)


class FollowedTokensOfV2(LogitsProcessor):
    """The same for model runner V2, which shows the rows of a step instead of the tokens of a request."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._prompt_len = req_states.prompt_len.np
        self._follow: dict[int, list[int] | None] = {}  # by place of the request

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._follow[req_idx] = (sampling_params.extra_args or {}).get("follow")
        return self._follow[req_idx] is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        for row, (place, position) in enumerate(zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)):
            tokens, said = self._follow[place], position + 1 - int(self._prompt_len[place])
            if tokens is not None and said >= 0:  # below: the prompt has not ended
                logits[row] = only(tokens[said], logits[row])
        return logits


FollowedTokens = FollowedTokensOfV2 if IS_V2 else FollowedTokensOfV1


def only(token: int, logits: torch.Tensor) -> torch.Tensor:
    chosen = torch.full_like(logits, float("-inf"))
    chosen[token] = 0.0
    return chosen
