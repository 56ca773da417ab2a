"""TTFT with a shared tier that is slower than computing, compared with an engine without kvbm: at most 15 % worse.

    python bench/shared/engine_slow_store.py --output bench/results/NAME-shared-slow.json

The embedded engine runs prompts of 4000 tokens. The store is moto's S3 server behind a proxy that limits its speed. An
engine writes all prompts at full speed and stops. Then loading a prompt takes SLOWER times as long as computing it. An
engine with that store and an engine without kvbm alternate on each prompt:

    restarted   the store is slow from the start; the first request has no measurement of it
    sudden      the store becomes slow during operation, after requests at full speed
    silent      the store accepts connections and never answers, after requests at full speed

The ratio compares the two TTFTs of one prompt; `first` is the ratio of the first request, which pays for the
measurement. Outputs are compared by token and by log-probability. Exits with 1 if a median misses the target.
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
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [
    *(str(REPOSITORY / "bench" / name) for name in ("vllm", "disk")),
    str(REPOSITORY / "tests" / "shared"),
]

from engine_slow_disk import AIM, compare, summary  # noqa: E402
from engine_ttft import PROMPT_TOKENS, Embedded, random_prompt, say  # noqa: E402
from facts import facts  # noqa: E402
from fault_proxy import FaultProxy  # noqa: E402
from servers import running  # noqa: E402

SLOWER = 10
PER_CASE, FAST = 5, 3
BLOCKS = PROMPT_TOKENS // 16
LISTED_S = 5.0  # in which a new engine learns what is in the store


def sections(url: str, *, prompts: int = 4) -> dict[str, object]:
    tiers = {"host": {"blocks": prompts * BLOCKS}, "shared": {"url": url}}
    return {"tiers": tiers, "offload": {"to_shared": "always"}}


def run(proxy: FaultProxy, url: str, model: str) -> Mapping[str, object]:
    order = random.Random(1)
    cases = ("fast", "restarted", "sudden", "silent")
    prompts = {case: [random_prompt((case, number)) for number in range(PER_CASE)] for case in cases}
    fast = prompts["fast"][:FAST]
    result: dict[str, object] = {}
    with Embedded.started(None, model=model) as plain:
        plain.warm_up()
        with Embedded.started(sections(url, prompts=len(cases) * PER_CASE + 2), model=model) as engine:
            for case in cases:
                for prompt in prompts[case]:
                    engine.ask(prompt)
            wait_for_writes(engine)
            block_bytes = engine.counters.shared.offload_bytes / engine.counters.shared.offload_blocks
        compute_s = statistics.median(plain.ask(prompt).ttft_s for prompt in fast)
        speed = BLOCKS * block_bytes / compute_s / SLOWER
        result |= {"computed_ms": round(1000 * compute_s, 1), "slow_mb_per_s": round(speed / 1e6, 3)}
        say(f"computing a prompt: {result['computed_ms']} ms; the slow store: {speed / 1e6:.2f} MB/s")
        proxy.bytes_per_s, proxy.fault = speed, "slow"
        with Embedded.started(sections(url), model=model) as engine:
            time.sleep(LISTED_S)
            say("restarted")
            result["restarted"] = measured(engine, compare(engine, plain, prompts["restarted"], order))
        for case, fault in (("sudden", "slow"), ("silent", "hang")):
            proxy.fault = None
            with Embedded.started(sections(url), model=model) as engine:
                time.sleep(LISTED_S)
                for prompt in fast:
                    engine.ask(prompt)
                proxy.fault = fault
                say(case)
                result[case] = measured(engine, compare(engine, plain, prompts[case], order))
                proxy.fault = None
    return result


def measured(engine: Embedded, pairs: list) -> dict[str, object]:
    row = {
        **summary(pairs),
        "probes": engine.counters.shared.probes,
        "blocks_from_the_store": engine.counters.shared.fetched_blocks,
    }
    del row["tokens_from_disk"]
    say(str(row))
    return row


def wait_for_writes(engine: Embedded) -> None:
    """Wait until the number of written blocks has not changed for two seconds."""
    written, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 2.0:
        if engine.counters.shared.offload_blocks != written:
            written, since_s = engine.counters.shared.offload_blocks, time.monotonic()
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvbm-slow-") as directory,
        running("moto", Path(directory)) as server,
        FaultProxy(server.port) as proxy,
    ):
        os.environ.update(server.through(proxy.port))
        result = run(proxy, f"{server.url}/slow", options.model)
    result_facts = {"command": " ".join(["python", *sys.argv]), **facts(("torch", "kvbm-cli")), "model": options.model}
    options.output.write_text(json.dumps({**result_facts, "slower": SLOWER, "aim": AIM, **result}, indent=1) + "\n")
    worst = max(result[case]["median"] for case in ("restarted", "sudden", "silent"))
    say(f"worst median: {worst} (at most {AIM})")
    return 0 if worst <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
