"""TTFT with a disk slowed down 50 times, compared with an engine without kvbm: at most 15 % worse.

    python bench/disk/engine_slow_disk.py --output bench/results/NAME-disk-slow.json

The embedded engine runs prompts of 4000 tokens. An engine writes each of them to disk once, and stops. The disk's speed
is the bytes that a hit reads per second of its TTFT. A disk process that sleeps then slows the disk down 50 times. An
engine with that disk and an engine without kvbm alternate on each prompt:

    restarted   the disk is slow from the start; the first request has no measurement of it
    unknown     the same, without the file in which the last engine saved its compute speed
    sudden      the disk becomes slow during operation, after hits at full speed

The ratio compares the two TTFTs of one prompt; `first` is the ratio of the first request. Outputs are compared by
token and by log-probability. Exits with 1 if the ratio misses the target.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAULTS = HERE.parents[1] / "tests/embedded/disk_faults"
sys.path[:0] = [str(HERE.parent / "vllm"), str(HERE)]

from engine_ttft import PROMPT_TOKENS, TOLERANCE, Arm, Embedded, Sample, random_prompt, say  # noqa: E402
from facts import facts  # noqa: E402

SLOWER = 50
AIM = 1.15
PER_CASE = 5
FAST = 3
BLOCKS = PROMPT_TOKENS // 16


def sections(directory: Path) -> dict[str, object]:
    disk = {"directory": str(directory), "blocks": 30 * BLOCKS}
    return {"tiers": {"host": {"blocks": 4 * BLOCKS}, "disk": disk}, "offload": {"to_disk": "always"}}


class Disk:
    """Set the speed of the disk, in the file that its process reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        os.environ |= {"PYTHONPATH": str(FAULTS), "KVBM_TEST_DISK_FAULTS": str(path)}
        self.limit(None)

    def limit(self, bytes_per_s: float | None) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({} if bytes_per_s is None else {"bytes_per_s": bytes_per_s}))
        os.replace(new, self._path)


def compare(tested: Arm, plain: Arm, prompts: Sequence[list[int]], order: random.Random) -> list[tuple[Sample, Sample]]:
    """TTFT with and without kvbm, per prompt."""
    pairs = []
    for prompt in prompts:
        samples = {arm: arms.ask(prompt) for arm, arms in order.sample([("tested", tested), ("plain", plain)], 2)}
        pairs.append((samples["tested"], samples["plain"]))
        with_kvbm, without = pairs[-1]
        assert with_kvbm.tokens == without.tokens, "another output"
        differences = zip(with_kvbm.log_probabilities, without.log_probabilities, strict=True)
        assert max(abs(one - other) for one, other in differences) < TOLERANCE, "another output"
        say(f"  {1000 * with_kvbm.ttft_s:.0f} ms, without {1000 * without.ttft_s:.0f}, from {dict(with_kvbm.found)}")
    return pairs


def summary(pairs: Sequence[tuple[Sample, Sample]]) -> dict[str, object]:
    ratios = [tested.ttft_s / plain.ttft_s for tested, plain in pairs]
    return {
        "first": round(ratios[0], 3),
        "median": round(statistics.median(ratios), 3),
        "worst": round(max(ratios), 3),
        "with_kvbm_ms": [round(1000 * tested.ttft_s, 1) for tested, _ in pairs],
        "without_ms": [round(1000 * plain.ttft_s, 1) for _, plain in pairs],
        "tokens_from_disk": [tested.found["disk"] for tested, _ in pairs],
    }


def run(directory: Path, model: str) -> Mapping[str, object]:
    disk, order = Disk(directory / "faults"), random.Random(1)
    cache = directory / "cache"
    fast, restarted, unknown, sudden = (
        [random_prompt((case, number)) for number in range(count)]
        for case, count in (("fast", FAST), ("restarted", PER_CASE), ("unknown", 1), ("sudden", PER_CASE))
    )
    result: dict[str, object] = {}
    with Embedded.started(None, model=model) as plain:
        plain.warm_up()
        with Embedded.started(sections(cache), model=model) as engine:
            for prompt in (*fast, *restarted, *unknown, *sudden):
                engine.ask(prompt)
            time.sleep(2.0)
        with Embedded.started(sections(cache), model=model) as engine:
            engine.ask(fast[-1])
            hits_s = [engine.ask(prompt).ttft_s for prompt in fast[:-1]]
            block_bytes = engine.counters.onboard_bytes / engine.counters.onboard_blocks
        speed = BLOCKS * block_bytes / statistics.median(hits_s) / SLOWER
        result |= {"hit_at_full_speed_ms": round(1000 * statistics.median(hits_s), 1), "slow_mb_per_s": speed / 1e6}
        say(f"a hit at full speed: {result['hit_at_full_speed_ms']} ms; slow: {speed / 1e6:.2f} MB/s")
        disk.limit(speed)
        with Embedded.started(sections(cache), model=model) as engine:
            say("restarted")
            result["restarted"] = summary(compare(engine, plain, restarted, order))
            say(str(result["restarted"]))
        for path in cache.glob("*/rates.json"):
            path.unlink()
        with Embedded.started(sections(cache), model=model) as engine:
            say("unknown")
            result["unknown"] = summary(compare(engine, plain, unknown, order))
        disk.limit(None)
        with Embedded.started(sections(cache), model=model) as engine:
            for prompt in fast:
                engine.ask(prompt)
            disk.limit(speed)
            say("sudden")
            result["sudden"] = summary(compare(engine, plain, sudden, order))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvbm-slow-", dir=options.directory) as directory:
        result = run(Path(directory), options.model)
    result_facts = {"command": " ".join(["python", *sys.argv]), **facts(("torch", "kvbm-cli")), "model": options.model}
    options.output.write_text(json.dumps({**result_facts, "slower": SLOWER, "aim": AIM, **result}, indent=1) + "\n")
    worst = max(result[case]["median"] for case in ("restarted", "unknown", "sudden"))
    say(f"worst median: {worst} (at most {AIM})")
    return 0 if worst <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
