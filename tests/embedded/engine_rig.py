"""An embedded engine that the test steps by hand, without its thread."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field

import torch
from pool_check import check_pool

from kvbm.engines.embedded.engine.config import EngineConfig
from kvbm.engines.embedded.engine.engine import Engine
from kvbm.engines.embedded.engine.request import RequestOutput, SamplingParams

PAUSE_S = 0.0002

_ids = itertools.count()


def prompts_of(lengths: list[int], *, seed: int = 0, vocabulary: int = 199) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(vocabulary) for _ in range(length)] for length in lengths]


@dataclass
class Result:
    """What a client has received."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    def __call__(self, output: RequestOutput) -> None:
        assert not self.is_finished, f"{output} after the last output"
        self.outputs.append(output)
        self.token_ids += output.new_token_ids

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def is_finished(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None


class EngineRig:
    """`config` goes to EngineConfig. Use as a context manager."""

    def __init__(self, model: str, *, connector=None, **config) -> None:
        self.engine = Engine(EngineConfig(model=str(model), **config), connector=connector)
        self.core = self.engine.core
        self.connector = connector
        self.step_count = 0

    def __enter__(self) -> EngineRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def add(self, prompt: list[int], *, request_id: str | None = None, **params) -> Result:
        result = Result()
        settings = SamplingParams(**({"ignore_eos": True} | params))
        name = request_id or f"request-{next(_ids)}"
        self.core.add(self.engine.new_request(name, prompt, settings, result, seed=settings.seed or 0))
        return result

    def step(self) -> bool:
        self.step_count += 1
        with torch.inference_mode():
            return self.core.step()

    def run(self, limit: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            if not self.step():
                time.sleep(PAUSE_S)  # a real connector's threads are at work
        raise AssertionError(f"still at work after {limit} steps")

    def generate(self, prompts: list[list[int]], **params) -> list[Result]:
        results = [self.add(prompt, **params) for prompt in prompts]
        self.run()
        self.check_idle()
        return results

    def check_idle(self) -> None:
        """No request, no reference to any block."""
        check_pool(self.engine.blocks)
        assert self.engine.blocks.used_count == 0, self.engine.blocks.used_count

    def lose_g1(self) -> None:
        """Forget every prefix and spoil every byte. Blocks will be given out in another order than before."""
        self.engine.blocks.reset()
        self.engine.pool.storages[0].fill_(0x4E)
        first = self.engine.blocks.allocate(3)
        assert first is not None
        taken = self.engine.blocks.allocate(self.engine.blocks.available_count)
        assert taken is not None
        self.engine.blocks.release([*first, *random.Random(0).sample(taken, len(taken))])
