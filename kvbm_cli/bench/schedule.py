"""The requests of a run, byte for byte, and their launch times: fixed before the first arm, and equal for all arms.

`Script` holds the users' tokens: random text from the workload's seed, counted with the engine's own tokenizer.
`Plan` adds the recorded answers and the launch times. Prompts are sent as token ids, so their length is exact. An
answer that a later prompt repeats has the same token ids that the engine generated, so reuse of generated KV is tested.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_cli.profile.workload import Workload

Tokenize = Callable[[str], list[int]]
LETTERS = string.ascii_letters + string.digits


def random_text(generator: random.Random, characters: int) -> str:
    """Words of random letters and digits, about 6 bits per character, so that users share no prefix."""
    words: list[str] = []
    length = 0
    while length < characters:
        word = "".join(generator.choices(LETTERS, k=generator.randint(3, 9)))
        words.append(word)
        length += len(word) + 1
    return " ".join(words)


def random_tokens(generator: random.Random, count: int, tokenize: Tokenize) -> tuple[int, ...]:
    """Exactly `count` tokens of random text. The text is doubled until it has enough tokens."""
    if count == 0:
        return ()
    characters = count + 16
    while len(tokens := tokenize(random_text(generator, characters))) < count:
        characters *= 2
    return tuple(tokens[:count])


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """An answer of the recording. `logprobs` has one value per token, or none if the engine sends none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class UserScript:
    """The history and the questions of one user."""

    history: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Script:
    """All tokens of the users. `warmup` is a prompt that no measured request contains."""

    system: tuple[int, ...]
    conversations: tuple[UserScript, ...]
    warmup: tuple[int, ...]

    @classmethod
    def write(cls, workload: Workload, tokenize: Tokenize) -> Script:
        generator = random.Random(workload.seed)
        system = random_tokens(generator, workload.system_tokens, tokenize)
        conversations = []
        for _ in range(workload.users):
            history = random_tokens(generator, workload.history_tokens, tokenize)
            questions = [random_tokens(generator, workload.question_tokens, tokenize) for _ in range(workload.turns)]
            conversations.append(UserScript(history, tuple(questions)))
        warmup = random_tokens(generator, workload.prompt_tokens(1), tokenize)
        return cls(system, tuple(conversations), warmup)

    def prompt(self, user: int, turn: int, answers: Sequence[RecordedAnswer]) -> list[int]:
        """Tokens of a user's prompt in turn 1, 2, ...; `answers` are the answers to the user's earlier turns."""
        conversation = self.conversations[user]
        tokens = [*self.system, *conversation.history]
        for question, answer in zip(conversation.questions[: turn - 1], answers, strict=False):
            tokens += [*question, *answer.token_ids]
        return [*tokens, *conversation.questions[turn - 1]]


def request_body(model: str, prompt: Sequence[int], *, answer_tokens: int) -> bytes:
    """The encoded body of a greedy, streamed completion of exactly `answer_tokens` tokens."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "min_tokens": answer_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "logprobs": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return json.dumps(body, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, sent once per arm. `intended_s` counts from the arm's start; `answer` is the recorded one."""

    index: int
    user: int
    turn: int
    intended_s: float
    prompt_tokens: int
    answer: RecordedAnswer
    body: bytes

    @property
    def key(self) -> tuple[int, int]:
        return self.user, self.turn


@dataclass(frozen=True, slots=True)
class Plan:
    """All requests of an arm with their launch times."""

    workload: Workload
    script: Script
    interval_s: float
    requests: tuple[PlannedRequest, ...]

    @classmethod
    def make(
        cls,
        workload: Workload,
        script: Script,
        *,
        model: str,
        answers: Sequence[Sequence[RecordedAnswer]],
        interval_s: float,
    ) -> Plan:
        """Plan the first turn of every user, then the second, and so on. `answers[user][turn - 1]` is recorded."""
        requests: list[PlannedRequest] = []
        for turn in range(1, workload.turns + 1):
            for user in range(workload.users):
                prompt = script.prompt(user, turn, answers[user])
                request = PlannedRequest(
                    index=len(requests),
                    user=user,
                    turn=turn,
                    intended_s=round(len(requests) * interval_s, 6),
                    prompt_tokens=len(prompt),
                    answer=answers[user][turn - 1],
                    body=request_body(model, prompt, answer_tokens=workload.answer_tokens),
                )
                requests.append(request)
        return cls(workload, script, interval_s, tuple(requests))

    @property
    def duration_s(self) -> float:
        """Time from the first launch to one interval after the last."""
        return len(self.requests) * self.interval_s

    @property
    def digest(self) -> str:
        """Hash of all bodies and launch times: two runs with equal digests sent equal requests."""
        total = hashlib.sha256()
        for request in self.requests:
            total.update(f"{request.intended_s:.6f} {len(request.body)}\n".encode())
            total.update(request.body)
        return total.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Everything needed to repeat the run. A prompt is system, history, then question and answer per turn."""
        return {
            "digest": self.digest,
            "workload": self.workload.model_dump(),
            "interval_s": self.interval_s,
            "duration_s": self.duration_s,
            "system": list(self.script.system),
            "users": [
                {
                    "history": list(conversation.history),
                    "questions": [list(question) for question in conversation.questions],
                    "answers": [list(request.answer.token_ids) for request in self.requests if request.user == user],
                }
                for user, conversation in enumerate(self.script.conversations)
            ],
            "requests": [
                {
                    "index": request.index,
                    "user": request.user,
                    "turn": request.turn,
                    "intended_s": request.intended_s,
                    "prompt_tokens": request.prompt_tokens,
                    "body_sha256": hashlib.sha256(request.body).hexdigest(),
                }
                for request in self.requests
            ],
        }
