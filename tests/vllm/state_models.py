"""The models with states of the tests, an engine of one with the connector, and the right answers.

The right answers are those of an engine that has neither connector nor prefix caching. Both engines run one after the
other in a process of engine_process.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_process import FOLLOWED_TOKENS, EngineProcess
from pairs import Faults
from traffic import TOLERANCE, Comparison, Conversation, Request, assert_equal, compare, own_noise, take_turns_in_groups
from vllm_server import FAULTY_CONNECTOR, Answer

BLOCK = 64
COMMON = {"block_size": BLOCK, "max_model_len": 768, "max_num_seqs": 8}
# vLLM's Mamba-2 kernels for CPUs fail if a step computes tokens of a request before and after the end of a block. With
# this limit, a prompt longer than a block starts only when no other request runs.
_MAMBA2 = {"dtype": "float32", "max_num_batched_tokens": BLOCK}
MODELS: dict[str, dict[str, Any]] = {
    "vllm-qwen3-next": {"dtype": "bfloat16"},
    "vllm-granite4": _MAMBA2,
    "vllm-falcon-h1": _MAMBA2,  # the group with attention is the first
    "vllm-nemotron-h": _MAMBA2,
    "vllm-mamba2": _MAMBA2,  # no attention
}
# Blocks of G1 and of host memory with which both forget all the time.
SMALL = {
    "vllm-qwen3-next": (36, 90),
    "vllm-granite4": (36, 90),
    "vllm-falcon-h1": (20, 55),
    "vllm-nemotron-h": (28, 75),
    "vllm-mamba2": (9, 22),
}


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """An engine with the connector, and the right answers."""

    engine: EngineProcess
    faults: Faults
    truth: dict[Request, Answer]
    preset: str
    noise: float  # see `noise_of`

    @property
    def is_exact(self) -> bool:
        return MODELS[self.preset]["dtype"] != "bfloat16"

    @property
    def tolerance(self) -> float:
        """By how much log-probabilities may differ. In another batch or other steps, sums are rounded differently."""
        return TOLERANCE if self.is_exact else 2 * self.noise

    def check(self, requests: Sequence[Request], concurrency: int = 4) -> dict[str, float]:
        """The answers must be right. Returns by how much the counters grew."""
        before = self.engine.totals()
        comparison = self.assert_equal(self.answer(requests, concurrency))
        self.engine.rest()
        moved = {name: value - before.get(name, 0) for name, value in self.engine.totals().items()}
        print(comparison, {name: value for name, value in moved.items() if value})
        return moved

    def answer(self, requests: Sequence[Request], concurrency: int = 4) -> dict[Request, Answer]:
        """Where log-probabilities are less exact, ties are frequent, and how frequent depends on the processor. There,
        an answer goes on with the right tokens, so that all of it can be compared."""
        follow = None if self.is_exact else [self.truth[request].tokens for request in requests]
        return dict(zip(requests, self.engine.answer(requests, concurrency, follow), strict=True))

    def assert_equal(self, answers: dict[Request, Answer]) -> Comparison:
        if self.is_exact:
            return assert_equal(answers, {request: self.truth[request] for request in answers})
        comparison = self.compare(answers)
        assert not comparison.wrong, f"{comparison}\n" + "\n".join(comparison.wrong)
        assert comparison.tokens == sum(request.max_tokens for request in answers), comparison
        return comparison

    def compare(self, answers: dict[Request, Answer]) -> Comparison:
        expected = {request: self.truth[request] for request in answers}
        return compare(answers, expected, self.tolerance, has_followed=not self.is_exact)


def right_answers(
    engine: EngineProcess, preset: str, talks: Sequence[Conversation], others: Sequence[Request] = ()
) -> dict[Request, Answer]:
    """The turns of the conversations, then the other requests. The engine is left for `noise_of`."""
    engine.start(
        preset,
        num_gpu_blocks_override=200,
        enable_prefix_caching=False,
        logits_processors=[FOLLOWED_TOKENS],
        **COMMON,
        **MODELS[preset],
    )
    truth = take_turns_in_groups(engine.answer, talks)
    truth |= zip(others, engine.answer(others), strict=True)
    return truth


def noise_of(engine: EngineProcess, preset: str, truth: dict[Request, Answer], requests: Sequence[Request]) -> float:
    """Return by how much the engine of `right_answers` differs from itself. In float32 `TOLERANCE` is enough."""
    is_exact = MODELS[preset]["dtype"] != "bfloat16"
    return 0.0 if is_exact else own_noise(engine.answer, {request: truth[request] for request in requests})


def start_tested(
    engine: EngineProcess, preset: str, *, blocks: int, cache: dict[str, Any], **arguments: object
) -> None:
    """Starts the engine with the connector. `blocks`: the size of G1. `cache` configures the connector."""
    engine.start(
        preset,
        connector=FAULTY_CONNECTOR,
        cache=cache,
        num_gpu_blocks_override=blocks,
        enable_prefix_caching=True,
        logits_processors=[FOLLOWED_TOKENS],
        **COMMON,
        **MODELS[preset],
        **arguments,
    )
