"""TTFT with a shared tier that is slower than computing, compared with an engine without kvbm: at most 15 % worse.

    python bench/shared/engine_slow_store.py --output bench/results/NAME-shared-slow.json

The embedded engine runs prompts of 4000 tokens. The store is moto's S3 server behind a proxy that limits its speed. An
engine writes all prompts at full speed and stops. The speed of the store is then the bytes that a hit reads per second
of its TTFT; the proxy makes that SLOWER times as slow. An engine with that store and an engine without kvbm alternate
on each prompt:

    restarted   the store is slow from the start; the first request has no measurement of it
    sudden      the store becomes slow during operation, after hits at full speed
    silent      the store accepts connections and never answers

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

SLOWER = 50
PER_CASE, FAST = 5, 3
BLOCKS = PROMPT_TOKENS // 16
WRITE_S = 20.0


def sections(url: str) -> dict[str, object]:
    shared = {"url": url, "drain_s": WRITE_S}
    return {"tiers": {"host": {"blocks": 4 * BLOCKS}, "shared": shared}, "offload": {"to_shared": "always"}}


def run(proxy: FaultProxy, url: str, model: str) -> Mapping[str, object]:
    order = random.Random(1)
    cases = ("fast", "restarted", "sudden", "silent")
    prompts = {case: [random_prompt((case, number)) for number in range(PER_CASE)] for case in cases}
    fast = prompts["fast"][:FAST]
    result: dict[str, object] = {}
    with Embedded.started(None, model=model) as plain:
        plain.warm_up()
        with Embedded.started(sections(url), model=model) as engine:
            for case in cases:
                for prompt in prompts[case]:
                    engine.ask(prompt)
        with Embedded.started(sections(url), model=model) as engine:
            wait_until_known(engine)
            engine.ask(fast[-1])
            hits_s = [engine.ask(prompt).ttft_s for prompt in fast[:-1]]
            fetched = engine.counters.shared_fetched_blocks
            assert fetched >= 0.9 * FAST * BLOCKS, f"only {fetched} blocks came from the store"
            block_bytes = engine.counters.onboard_bytes / engine.counters.onboard_blocks
        speed = BLOCKS * block_bytes / statistics.median(hits_s) / SLOWER
        result |= {"hit_at_full_speed_ms": round(1000 * statistics.median(hits_s), 1), "slow_mb_per_s": speed / 1e6}
        say(f"a hit at full speed: {result['hit_at_full_speed_ms']} ms; slow: {speed / 1e6:.2f} MB/s")
        proxy.bytes_per_s, proxy.fault = speed, "slow"
        with Embedded.started(sections(url), model=model) as engine:
            wait_until_known(engine)
            say("restarted")
            result["restarted"] = measured(engine, compare(engine, plain, prompts["restarted"], order))
        for case, fault in (("sudden", "slow"), ("silent", "hang")):
            proxy.fault = None
            with Embedded.started(sections(url), model=model) as engine:
                wait_until_known(engine)
                for prompt in fast:
                    engine.ask(prompt)
                proxy.fault = fault
                say(case)
                result[case] = measured(engine, compare(engine, plain, prompts[case], order))
                proxy.fault = None
    return result


def measured(engine: Embedded, pairs: list) -> dict[str, object]:
    row = {**summary(pairs), "probes": engine.counters.shared_probes}
    del row["tokens_from_disk"]
    say(str(row))
    return row


def wait_until_known(engine: Embedded) -> None:
    """Wait for the listing of the store."""
    shared = engine.engine.connector.leader._shared if hasattr(engine.engine, "connector") else None
    if shared is None:
        time.sleep(3.0)
        return
    time.sleep(3.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic:tiny")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvbm-slow-") as directory, running("moto", Path(directory)) as server:
        with FaultProxy(server.port) as proxy:
            os.environ.update(server.through(proxy.port))
            result = run(proxy, f"{server.url}/slow", options.model)
    result_facts = {"command": " ".join(["python", *sys.argv]), **facts(("torch", "kvbm-cli")), "model": options.model}
    options.output.write_text(json.dumps({**result_facts, "slower": SLOWER, "aim": AIM, **result}, indent=1) + "\n")
    worst = max(result[case]["median"] for case in ("restarted", "sudden", "silent"))
    say(f"worst median: {worst} (at most {AIM})")
    return 0 if worst <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
