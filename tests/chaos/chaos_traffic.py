"""Questions with the answers of an engine without cache, and clients that ask them and judge what they get."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path

from chaos_engine import EngineDied, EngineProcess, Hung, Said
from kvbm_engine import LOGPROB_ROUNDING, prompt

USERS = 12
ANSWER_TOKENS = 8
SHARED_TOKENS = 96
DEADLINE_S = 2.0  # that a disturbance may cost a request
LOADED_S = 2.0  # for a machine that does other things too
POLL_S = 0.05


class WrongAnswer(AssertionError):
    """Tokens or log-probabilities differ from those of an engine without cache."""


@dataclass(frozen=True)
class Question:
    """A prompt, and what an engine without cache answers."""

    prompt: list[int]
    answer: list[tuple[int, float]]

    def judge(self, said: Said) -> None:
        """Raises EngineDied or WrongAnswer."""
        if said.reason != "length":
            raise EngineDied(f"a request ended with {said.reason}: {said.error}")
        tokens, expected = [token for token, _ in said.answer], [token for token, _ in self.answer]
        if tokens != expected:
            raise WrongAnswer(f"tokens {tokens}, expected {expected}; {said.external_tokens} from the cache")
        off = max(abs(one - other) for (_, one), (_, other) in zip(said.answer, self.answer, strict=True))
        if not off < LOGPROB_ROUNDING:
            raise WrongAnswer(f"a log-probability is off by {off}; {said.external_tokens} tokens from the cache")


def questions(log: Path) -> list[Question]:
    """Two turns of each user: a system prompt that all share, an own text, and the engine's own first answer."""
    lengths, found = random.Random("lengths"), []
    with EngineProcess(log) as plain:
        for user in range(USERS):
            text = prompt(user, lengths.randrange(SHARED_TOKENS + 16, 260), shared=SHARED_TOKENS)
            for turn in range(2):
                answer = plain.submit(text, ANSWER_TOKENS).result(60).answer
                found.append(Question(text, answer))
                text = text + [token for token, _ in answer] + prompt(100 * user + turn, 24)
        plain.stop()
    return found


def ask_all(engine: EngineProcess, asked: list[Question], *, at_once: int = 2, limit_s: float = 60.0) -> int:
    """Ask and judge, `at_once` questions at a time. Returns the tokens that came from the cache."""
    tokens = 0
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        futures = [engine.submit(question.prompt, ANSWER_TOKENS) for question in some]
        if wait(futures, limit_s).not_done:
            raise Hung(f"no answer within {limit_s:g} s\n{engine.stacks()}")
        for question, future in zip(some, futures, strict=True):
            question.judge(future.result())
            tokens += future.result().external_tokens
    return tokens


@dataclass
class Load:
    """Clients that ask and judge without a pause, from `start` to `finish`.

    A request must be answered within `limit_s`; `allow` extends that, for disturbances that stop the engine itself.
    The first failure stops all clients. If `is_aborting`, clients give some requests up.
    """

    engine: EngineProcess
    asked: list[Question]
    client_count: int
    seed: object
    limit_s: float
    is_aborting: bool = False
    may_die: bool = False
    answers: int = 0
    external_tokens: int = 0
    longest_s: float = 0.0
    failure: BaseException | None = None
    _end: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> Load:
        for client in range(self.client_count):
            self._threads.append(threading.Thread(target=self._run, args=(client,), daemon=True))
            self._threads[-1].start()
        return self

    def allow(self, seconds: float) -> None:
        self.limit_s += seconds

    def run_for(self, seconds: float) -> None:
        """Let the clients ask for that long. Raises the first failure."""
        self._end.wait(seconds)
        if self.failure is not None:
            raise self.failure

    def finish(self) -> None:
        """End after the requests in flight. Raises the first failure."""
        self._end.set()
        for thread in self._threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self, client: int) -> None:
        chosen = random.Random(f"{self.seed}/{client}")
        try:
            while not self._end.is_set():
                self._ask(chosen.choice(self.asked), gives_up=self.is_aborting and chosen.random() < 0.5)
        except EngineDied as error:
            if not self.may_die:
                self._fail(error)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
        self._end.set()

    def _ask(self, question: Question, *, gives_up: bool) -> None:
        start_s = time.monotonic()
        future = self.engine.submit(question.prompt, ANSWER_TOKENS)
        if gives_up:
            time.sleep(0.01)
            self.engine.call("abort", future.request_id)
        while True:
            try:
                said = future.result(POLL_S)
                break
            except NotYet:
                if time.monotonic() - start_s > self.limit_s:
                    self._end.set()
                    raise Hung(f"no answer within {self.limit_s:.1f} s\n{self.engine.stacks()}") from None
        if not (gives_up and said.reason == "abort"):
            question.judge(said)
        with self._lock:
            self.answers += 1
            self.external_tokens += said.external_tokens
            self.longest_s = max(self.longest_s, time.monotonic() - start_s)
