"""Conversations that several users hold at once, and the comparison of what two servers said in them.

Users come in groups that share the beginning of their prompts; every prompt has an end of its own; every turn repeats
all that was said before, the answers included. In each round every conversation takes one turn, `CONCURRENCY` at a
time, so that by the next round a small G1 has forgotten it. Later turns repeat the answers of the *reference*, so that
each request is compared by itself and one difference is not counted again in all that follows it.

Tokens must be equal, and log-probabilities within `TOLERANCE`: greedy tokens often survive a wrong block, their
log-probabilities do not. Equal computation in another batch or in other chunks rounds differently. Where the reference
itself hesitates between two tokens by less than that, either is right, and what follows is not compared; `compare` says
how often that was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from model_runner import IS_V2
from vllm_server import BLOCK_TOKENS, Answer, VllmServer

TOLERANCE = 2e-4
CONCURRENCY = 8
VOCABULARY = range(3, 4096)  # without the special tokens
SHARED_TOKENS = (0, 256, 384, 450)
ANSWER_TOKENS = (3, 12) if IS_V2 else (6, 34)  # a step with interpreted kernels takes many times as long


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: token ids, and how many to generate."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """What its user says in each turn, and how much is answered."""

    said: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]


def conversations(count: int, turns: int, seed: int = 1, block_tokens: int = BLOCK_TOKENS) -> list[Conversation]:
    """With blocks of another size, everything is that much shorter or longer."""
    scale = block_tokens / BLOCK_TOKENS
    return [_conversation(random.Random(f"{seed} {number}"), number, turns, scale) for number in range(count)]


def _conversation(source: random.Random, number: int, turns: int, scale: float) -> Conversation:
    def length(shortest: int, longest: int) -> int:
        return round(source.randrange(shortest, longest) * scale)

    shared = round(SHARED_TOKENS[number % len(SHARED_TOKENS)] * scale)
    beginning = tokens(random.Random(f"shared {shared}"), shared)
    first = beginning + tokens(source, length(60, 420))
    rest = (tokens(source, length(20, 160)) for _ in range(turns - 1))
    return Conversation((first, *rest), tuple(length(*ANSWER_TOKENS) for _ in range(turns)))


def tokens(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.choices(VOCABULARY, k=count))


Ask = Callable[[Request], Answer]


def hold(ask: Ask, talks: Sequence[Conversation], concurrency: int = CONCURRENCY) -> dict[Request, Answer]:
    """Hold the conversations; each turn builds on the answers that were given before."""
    with ThreadPoolExecutor(concurrency) as pool:
        return take_turns(lambda requests: list(pool.map(ask, requests)), talks)


def take_turns(
    ask_all: Callable[[Sequence[Request]], Sequence[Answer]], talks: Sequence[Conversation]
) -> dict[Request, Answer]:
    """`hold`, for a function that answers the requests of a turn together."""
    said: dict[Request, Answer] = {}
    history: list[tuple[int, ...]] = [()] * len(talks)
    for turn in range(len(talks[0].said)):
        requests = [
            Request(history[index] + talk.said[turn], talk.max_tokens[turn]) for index, talk in enumerate(talks)
        ]
        answers = ask_all(requests)
        history = [request.prompt + answer.tokens for request, answer in zip(requests, answers, strict=True)]
        said |= zip(requests, answers, strict=True)
    return said


def take_turns_in_groups(
    ask_all: Callable[[Sequence[Request]], Sequence[Answer]], talks: Sequence[Conversation], size: int = 5
) -> dict[Request, Answer]:
    """`take_turns` for `size` conversations at a time: so many fit into host memory, all do not."""
    said: dict[Request, Answer] = {}
    for first in range(0, len(talks), size):
        said |= take_turns(ask_all, talks[first : first + size])
    return said


def repeat(ask: Ask, requests: Sequence[Request], concurrency: int = CONCURRENCY) -> dict[Request, Answer]:
    """Ask the same again, in the same order."""
    with ThreadPoolExecutor(concurrency) as pool:
        return dict(zip(requests, pool.map(ask, requests), strict=True))


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two runs compare. `worst` is the largest difference of log-probabilities where tokens agree."""

    requests: int
    tokens: int
    ties: int
    worst: float
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.tokens} tokens, {self.ties} ties, worst difference {self.worst:.1e}, "
            f"{len(self.wrong)} wrong"
        )


def total(comparisons: Sequence[Comparison]) -> Comparison:
    return Comparison(
        sum(one.requests for one in comparisons),
        sum(one.tokens for one in comparisons),
        sum(one.ties for one in comparisons),
        max(one.worst for one in comparisons),
        tuple(text for one in comparisons for text in one.wrong),
    )


def compare(
    answers: dict[Request, Answer],
    expected: dict[Request, Answer],
    tolerance: float = TOLERANCE,
    *,
    has_followed: bool = False,
) -> Comparison:
    """With `has_followed`, the answers went on with the expected tokens after a tie, so nothing is left out."""
    assert answers.keys() == expected.keys(), "not the same requests"
    compared, ties, worst, wrong = 0, 0, 0.0, []
    for index, (request, answer) in enumerate(answers.items()):
        wanted = expected[request]
        for position, token in enumerate(answer.tokens):
            if token != wanted.tokens[position]:
                if wanted.margins[position] >= tolerance:
                    wrong.append(f"request {index} ({len(request.prompt)} tokens): token {position} differs")
                    break
                ties += 1
                if not has_followed:
                    break
            difference = abs(answer.logprobs[position] - wanted.logprobs[position])
            compared, worst = compared + 1, max(worst, difference)
            if difference > tolerance:
                wrong.append(
                    f"request {index} ({len(request.prompt)} tokens, {answer.cached} cached): "
                    f"log-probability {position} is off by {difference:.1e}"
                )
                break
    return Comparison(len(answers), compared, ties, worst, tuple(wrong))


def assert_equal(
    answers: dict[Request, Answer], expected: dict[Request, Answer], tolerance: float = TOLERANCE
) -> Comparison:
    comparison = compare(answers, expected, tolerance)
    assert not comparison.wrong, f"{comparison}\n" + "\n".join(comparison.wrong)
    assert comparison.ties <= 1 + len(expected) // 50, f"too many ties to believe: {comparison}"
    return comparison


def own_noise(ask_all: Callable[..., Sequence[Answer]], truth: dict[Request, Answer]) -> float:
    """Return by how much log-probabilities of an engine without cache differ from its own `truth`. It computes the
    beginning of each answer again as a part of the prompt, in one step, as after a preemption. In bfloat16, how much
    this changes depends on the CPU. `ask_all` is `SteppedEngine.answer` of an engine with FOLLOWED_TOKENS."""
    worst = TOLERANCE
    for share in (1 / 3, 2 / 3):
        starts = [round(request.max_tokens * share) for request in truth]
        rests = [answer.tokens[start:] for answer, start in zip(truth.values(), starts, strict=True)]
        begun = [
            Request(request.prompt + answer.tokens[:start], len(rest))
            for (request, answer), start, rest in zip(truth.items(), starts, rests, strict=True)
        ]
        for answer, wanted, start in zip(ask_all(begun, 4, rests), truth.values(), starts, strict=True):
            pairs = zip(answer.logprobs, wanted.logprobs[start:], strict=True)
            worst = max(worst, *(abs(one - other) for one, other in pairs))
    return worst


def asker(server: VllmServer, **fields: object) -> Ask:
    return lambda request: server.ask(request.prompt, request.max_tokens, **fields)
