"""The real embedded engine with the real block manager inside, for tests: tiny model, small G1, faults on request."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager

from faults import FaultyCopier

from kvbm.config.schema import Profile
from kvbm.engines.embedded.driver import create_connector
from kvbm.engines.embedded.engine.config import EngineConfig
from kvbm.engines.embedded.engine.engine import Engine, _Order  # only orders run between two steps
from kvbm.engines.embedded.engine.request import RequestOutput, SamplingParams

WAIT_S = 60.0
LOGPROB_ROUNDING = 1e-3  # other batches round otherwise by 1e-5; one wrong block of 200 shows as 1e-2


class Answer:
    """What one request brought, filled in by the engine thread."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.last: RequestOutput | None = None
        self.started = threading.Event()
        self.done = threading.Event()

    def __call__(self, output: RequestOutput) -> None:
        self.tokens += output.new_token_ids
        self.logprobs += [details.logprob for details in output.logprobs or ()]
        self.started.set()
        if output.finish_reason is not None:
            self.last = output
            self.done.set()

    def said(self) -> list[tuple[int, float]]:
        """Tokens with their log-probabilities."""
        return list(zip(self.tokens, self.logprobs, strict=True))

    def wait(self) -> Answer:
        assert self.done.wait(WAIT_S), "no answer"
        return self


class KvbmEngine:
    """An engine with (`host_blocks`, `disk`, `shared`: sections of a profile) or without the block manager. `copier`
    fails on request."""

    def __init__(
        self,
        *,
        host_blocks: int | None = None,
        worker_process: bool = False,
        generated: bool = True,
        disk: dict | None = None,
        shared: dict | None = None,
        offload: dict | None = None,
        onboard: dict | None = None,
        metrics: dict | None = None,
        eviction: str = "lru",
        **config,
    ):
        defaults = {"model": "synthetic:tiny", "num_blocks": 40, "max_num_batched_tokens": 128, "verify": False}
        self.connector = None
        if host_blocks is not None or disk is not None:
            profile = Profile.model_validate(
                {
                    "engine": {"model": "synthetic:tiny"},
                    "tiers": {
                        "host": host_blocks and {"blocks": host_blocks, "eviction": eviction},
                        "disk": disk,
                        "shared": shared,
                    },
                    "offload": {"generated": generated, **(offload or {})},
                    "onboard": onboard or {},
                    "transfer": {"max_concurrent": 2},
                    "metrics": metrics or {},
                }
            )
            self.connector = create_connector(profile.model_dump_json(), worker_process=worker_process)
        self.engine = Engine(EngineConfig(**(defaults | config)), connector=self.connector)
        self.engine.start()
        self._ids = iter(range(10**6))
        self.copier = None
        if self.connector is not None and not worker_process:
            worker = self.connector[1]._home  # the engine has no other way to it
            worker.copier = self.copier = FaultyCopier(worker.copier)

    @property
    def worker_process(self):
        return self.connector[1]._home._process  # whom a test stops and kills; the engine shows none

    @property
    def leader(self):
        return self.connector[0].leader

    @property
    def counters(self):
        return self.leader.counters

    def submit(self, prompt: list[int], max_tokens: int = 8, **params) -> Answer:
        answer = Answer()
        answer.request_id = f"r{next(self._ids)}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=0, **params)
        self.engine.submit(answer.request_id, prompt, sampling, answer)
        return answer

    def ask(self, prompt: list[int], max_tokens: int = 8, **params) -> Answer:
        return self.submit(prompt, max_tokens, **params).wait()

    @property
    def pool(self):
        return self.engine.blocks

    def between_steps(self, run) -> bool:
        """Run a function in the engine thread."""
        order = _Order(run)
        self.engine._orders.put(order)  # as a reset of the cache is, which is the only public order
        return order.done.result(WAIT_S)

    def forget_g1(self) -> None:
        """Empty the engine's own prefix cache, and only that."""
        self.between_steps(lambda: self.pool.reset() or True)

    def settle(self) -> None:
        """Wait until no transfer is pending: between two of the engine's steps, so that nothing is read half-way."""
        for _ in range(2000):
            if not self.between_steps(self.connector[0].has_pending_work):
                return
            threading.Event().wait(0.002)
        raise AssertionError("transfers do not end")


def assert_same(answers, expected) -> None:
    """Equal tokens, and equal log-probabilities but for rounding: greedy tokens often survive a wrong block."""
    for answer, wanted in zip(answers, expected, strict=True):
        assert [token for token, _ in answer] == [token for token, _ in wanted]
        assert max(abs(one - other) for (_, one), (_, other) in zip(answer, wanted, strict=True)) < LOGPROB_ROUNDING


@contextmanager
def running(**arguments):
    """Also require that no exception was stopped at the boundary: it would hide a bug."""
    engine = KvbmEngine(**arguments)
    try:
        yield engine
        if engine.connector is not None:
            assert engine.counters.faults == engine.connector[1].boundary.faults == 0
    finally:
        if engine.copier is not None:
            engine.copier.heal()
        engine.engine.stop()


def prompt(seed: int, length: int, *, shared: int = 0) -> list[int]:
    """Token ids that differ by seed after the first `shared` ones."""
    common, own = random.Random("shared"), random.Random(seed)
    return [common.randrange(200) for _ in range(shared)] + [own.randrange(200) for _ in range(length - shared)]
