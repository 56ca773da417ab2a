"""Requests of every kind at once, on engines with different settings, compared with an engine without a cache.

A seed chooses prompts with shared beginnings, sampling, adapters, salts, priorities, stop conditions and grammars.
Meanwhile other clients disconnect and the caches are reset. Then the same requests are repeated with an empty G1.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from pairs import MAX_MODEL_LEN, NO_CACHE, Moved, adapters_of, assert_cache_was_used, pair_of
from traffic import CONCURRENCY, TOLERANCE, assert_equal, tokens
from vllm_server import BLOCK_TOKENS, Answer, VllmServer, answer_of

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1200)]
REQUESTS = 32  # in each of two rounds
GUESS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
GUESSES = ("--speculative-config", json.dumps(GUESS))
PRIORITIES = ("--scheduling-policy", "priority")
DOCUMENTS = [tokens(Random(f"document {number}"), 1400) for number in range(3)]
LENGTHS = (1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS, 700, 900, 1100, 1300, 1400)
GRAMMARS = ({"choice": ["yes", "no"]}, {"regex": "[a-d]{6,20}"})
FEATURES = ("none", "none", "choices", "prompt_logprobs", "text", "grammar", "tokens")


@dataclass(frozen=True, slots=True)
class Variant:
    """Arguments of the tested engine, its G1 in blocks, and features that vLLM itself has not with these arguments."""

    arguments: tuple[str, ...]
    blocks: int = 32
    without: tuple[str, ...] = ()
    has_adapters: bool = False

    @property
    def has_priorities(self) -> bool:
        return set(PRIORITIES) <= set(self.arguments)


VARIANTS = {
    "overlap": Variant(("--async-scheduling", "--max-num-batched-tokens", "512")),
    "priorities": Variant(("--no-async-scheduling", *PRIORITIES), blocks=20),
    # vLLM on a CPU ends when it samples with top_k and guessed tokens, and guesses only without overlap
    "guesses": Variant(("--no-async-scheduling", *GUESSES, "--max-num-batched-tokens", "256"), without=("choices",)),
    "guesses and priorities": Variant(
        ("--no-async-scheduling", *GUESSES, *PRIORITIES), blocks=20, without=("choices",)
    ),
    "no chunks": Variant(("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048")),
    # with `--enable-lora`, vLLM on a CPU ends when it computes prompt_logprobs in a batch; in a batch of adapters and
    # the base model, it applies an adapter to the base model too
    "adapters": Variant(("--max-num-batched-tokens", "512"), without=("prompt_logprobs",), has_adapters=True),
}


@dataclass(frozen=True, eq=False)
class Asked:
    """A request. Equal requests are different keys."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer. `end` has its text and why it ended."""

    answer: Answer
    end: tuple[object, ...]
    prompt_logprobs: tuple[float, ...]


def requests(source: Random, variant: Variant) -> list[Asked]:
    """Some of them several times in a row, so that equal prompts arrive together."""
    features = [feature for feature in FEATURES if feature not in variant.without]
    models = ("a", "b") if variant.has_adapters else (None,)
    found: list[Asked] = []
    while len(found) < REQUESTS:
        one = request(source, source.choice(features), source.choice(models))
        found += [replace(one) for _ in range(source.choice((1, 1, 1, 3)))]
    return found


def request(source: Random, feature: str, model: str | None) -> Asked:
    prompt = source.choice(DOCUMENTS)[: source.choice(LENGTHS)]
    prompt += tokens(source, source.choice((0, source.randrange(1, 200))))
    fields: dict[str, Any] = {
        "none": {},
        "choices": {"n": source.randrange(2, 4), "temperature": 1, "top_k": 1},  # n > 1 requires sampling
        "prompt_logprobs": {"prompt_logprobs": 0},
        "text": {"stop": source.sample("abcdefghijkl", 3), "ignore_eos": False},
        "grammar": {"structured_outputs": source.choice(GRAMMARS), "ignore_eos": False},
        "tokens": {"stop_token_ids": source.sample(range(3, 4096), 400)},
    }[feature]
    if source.random() < 0.3:
        fields["cache_salt"] = source.choice(("one", "other"))
    if model is not None:
        fields["model"] = model
    return Asked(prompt, source.choice((1, 2, 10, 33, 140)), source.randrange(3), fields)


def ask(server: VllmServer, asked: Asked, has_priorities: bool = False) -> list[Choice]:
    priority = {"priority": asked.priority} if has_priorities else {}
    body = server.completion(asked.prompt, asked.max_tokens, **asked.fields, **priority)
    return [choice_of(choice, body) for choice in body["choices"]]


def choice_of(choice: dict[str, Any], body: dict[str, Any]) -> Choice:
    entries = (choice.get("prompt_logprobs") or [None])[1:]
    logprobs = tuple(next(iter(entry.values()))["logprob"] for entry in entries)
    end = (choice["text"], choice["finish_reason"], choice.get("stop_reason"))
    return Choice(answer_of(choice, body), end, logprobs)


def ask_all(server: VllmServer, asked: list[Asked], has_priorities: bool = False) -> dict[Asked, list[Choice]]:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return dict(zip(asked, pool.map(lambda one: ask(server, one, has_priorities), asked), strict=True))


@contextmanager
def disturbed(server: VllmServer, source: Random) -> Iterator[None]:
    """Clients that disconnect, and resets of G1 and of everything."""
    stopped = threading.Event()

    def disturb() -> None:
        while not stopped.wait(0.2):
            server.leave(source.choice(DOCUMENTS)[: source.choice(LENGTHS)], after_s=source.uniform(0.05, 0.6))
            server.reset_prefix_cache(external=source.random() < 0.03)

    with ThreadPoolExecutor(1) as pool:
        disturbance = pool.submit(disturb)
        try:
            yield
        finally:
            stopped.set()
        disturbance.result()


def assert_same(found: dict[Asked, list[Choice]], expected: dict[Asked, list[Choice]]) -> None:
    for index, (asked, choices) in enumerate(expected.items()):
        place = f"request {index}, {len(asked.prompt)} tokens, {asked.fields}"
        for choice, wanted in zip(found[asked], choices, strict=True):
            common = min(len(choice.answer.tokens), len(wanted.answer.tokens))
            if choice.answer.tokens[:common] == wanted.answer.tokens[:common]:
                assert choice.end == wanted.end, place
            pairs = zip(choice.prompt_logprobs, wanted.prompt_logprobs, strict=True)
            assert max((abs(one - other) for one, other in pairs), default=0.0) < TOLERANCE, place
    for number in range(3):
        comparison = assert_equal(choices_of(found, number), choices_of(expected, number))
        print(f"choice {number}: {comparison}")


def choices_of(answers: dict[Asked, list[Choice]], number: int) -> dict[Asked, Answer]:
    return {asked: choices[number].answer for asked, choices in answers.items() if len(choices) > number}


@pytest.fixture(scope="module")
def without_adapters() -> Iterator[VllmServer]:
    with VllmServer(materialise("vllm-25m"), NO_CACHE, max_model_len=MAX_MODEL_LEN, wait=False) as server:
        yield server


@pytest.mark.parametrize("name", VARIANTS)
def test_requests_of_every_kind_are_answered_as_without_a_cache(name, request):
    variant = VARIANTS[name]
    asked = requests(Random(name), variant)
    adapters = adapters_of("ab") if variant.has_adapters else ()
    reference = request.getfixturevalue("plain" if variant.has_adapters else "without_adapters")
    options = {"tested_arguments": variant.arguments, "reference": reference}
    with pair_of("vllm-25m", *adapters, blocks=variant.blocks, **options) as pair:
        truth = ask_all(pair.reference, asked)
        before = pair.tested.metrics()
        for _ in range(2):
            with disturbed(pair.tested, Random(name)):
                assert_same(ask_all(pair.tested, asked, variant.has_priorities), truth)
            pair.forget_g1()
        moved = Moved(before, pair.tested.metrics())
        print(moved)
        assert_cache_was_used(moved, at_least_blocks=20)
        assert pair.tested.metrics()["kvbm_disabled"] == 0
