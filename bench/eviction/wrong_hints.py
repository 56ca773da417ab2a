"""Hits of adaptive eviction with wrong and with right hints, on a trace, with the product's own store and quota.

    python bench/eviction/wrong_hints.py mooncake-conversation.jsonl.gz \\
        --output bench/results/NAME-wrong-hints-conversation.json
    python bench/eviction/wrong_hints.py weka.jsonl.gz --shares 0.02 --requests 12000 \\
        --output bench/results/NAME-wrong-hints-agents.json

The traces are those of `hit_rates.py`; `--requests` takes only the first requests. Each kind of client sends hints with
all or half of the requests. `right` knows the future: it retains what comes back within the longest time of a hint, and
demotes the rest. Exits with 1 if wrong hints cost more than 5 % of the hits that there are without hints, or if a
tenant had more retained than its quota.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "vllm"), str(ROOT / "bench" / "eviction")]

from facts import facts  # noqa: E402
from hit_rates import Workload, read  # noqa: E402

from kvbm.core.policies.chain_use import ChainUse  # noqa: E402
from kvbm.core.shadow_caches import ADAPTIVE, SimulatedCache  # noqa: E402
from kvbm.leader.hints import LONGEST_S, TOTAL_SHARE, Hint, Hints  # noqa: E402
from kvbm_cli.bench.trace.hit_rates import name_of  # noqa: E402

LEAST = 0.95
TENANTS, SESSIONS = 10_000, 60
SHARES = (0.01, 0.05, 0.2)  # of the different blocks of the trace

Said = tuple[bytes, Hint] | None  # tenant and hint of a request
Client = Callable[[random.Random, int], Said]
Request = tuple[float, int, list[bytes]]  # when, its session (negative if it does not come back), its chain


def randomly(choice: random.Random, session: int) -> Said:
    if choice.random() < 0.5:
        return None
    return b"", Hint(
        choice.choice(["", "a", f"session {session}"]),
        choice.choice([0.0, 5.0, 100.0, LONGEST_S]),
        releases=choice.random() < 0.2,
        ends=(f"session {choice.randrange(SESSIONS)}",) if choice.random() < 0.2 else (),
    )


def contradictory(choice: random.Random, session: int) -> Said:
    if choice.random() < 0.5:
        return b"", Hint(f"session {session}", LONGEST_S, ends=(f"session {session}",))
    return b"", Hint(f"session {session}", demotes=True)


WRONG: dict[str, Client | None] = {
    "none": None,
    "random": randomly,
    "all retain for ever": lambda choice, session: (b"", Hint("", LONGEST_S)),
    "what never comes back is retained": lambda choice, session: (b"", Hint("", LONGEST_S)) if session < 0 else None,
    "what comes back is demoted": lambda choice, session: (b"", Hint("", demotes=True)) if session >= 0 else None,
    "contradictory": contradictory,
    "10,000 tenants": lambda choice, session: (b"%d" % choice.randrange(TENANTS), Hint("", LONGEST_S)),
}


def right(choice: random.Random, session: int) -> Said:
    return b"", Hint("", LONGEST_S) if session >= 0 else Hint(demotes=True)


class HintedCache(SimulatedCache):
    """A cache whose clients send hints. `largest` is the largest part of the quotas that was in use."""

    def __init__(self, capacity_blocks: int, client: Client | None) -> None:
        super().__init__(capacity_blocks, ADAPTIVE)
        self._client, self._choice, self._now_s = client, random.Random(9), 0.0
        self.hints = Hints(self.store, lambda: self._now_s)
        self.largest = 0.0

    def serve(self, at_s: float, session: int, chain: Sequence[bytes]) -> None:
        self._now_s = at_s
        said = None if self._client is None else self._client(self._choice, session)
        if said is None:
            self.use(at_s, chain, asked=len(chain))
            return
        tenant, hint = said
        meant, arrive = self.hints.arrive(hint, tenant, chain), self.store.arrive

        def arrive_hinted(hashes: Sequence[bytes], now_s: float) -> ChainUse | None:
            return arrive(hashes, now_s, meant)

        vars(self.store)["arrive"] = arrive_hinted
        self.use(at_s, chain, asked=len(chain))
        del vars(self.store)["arrive"]
        self.hints.finish(hint, tenant, chain)
        self.largest = max(self.largest, self.hints.retentions.held(tenant) / max(1, self.hints.quota(tenant)))


def hits(capacity_blocks: int, requests: Iterable[Request], client: Client | None) -> HintedCache:
    cache = HintedCache(capacity_blocks, client)
    for at_s, session, chain in requests:
        cache.serve(at_s, session, chain)
    return cache


def requests_of(workload: Workload) -> Iterator[Request]:
    """Yield the requests of a trace. A request comes back if a later one begins with all of its blocks but the last,
    which may be partial."""
    tree, uses = workload
    paths = [[*reversed(tree.path(one.use.prompt))] for one in uses]
    last_use: dict[int, float] = {}
    for one, path in zip(uses, paths, strict=True):
        last_use.update(dict.fromkeys(path, one.at_s))
    for one, path in zip(uses, paths, strict=True):
        known = path[max(0, len(path) - 2)]
        comes_back = one.at_s < last_use[known] <= one.at_s + LONGEST_S
        session = path[min(1, len(path) - 1)]
        yield one.at_s, session if comes_back else -session, [name_of(node) for node in path]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--output", type=Path, help="JSON file of the result; keeps the other capacities that it has")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the different blocks of the trace")
    parser.add_argument("--requests", type=int, help="number of requests, from the first one on")
    options = parser.parse_args()
    tree, uses = read(options.trace)
    requests, blocks = list(requests_of((tree, uses[: options.requests]))), len(tree) - 1
    points: dict[int, dict[str, Any]] = {}
    problems = []
    if options.output and options.output.exists():
        points = {one["capacity_blocks"]: one for one in json.loads(options.output.read_text())["points"]}
    for share in options.shares:
        capacity = round(share * blocks)
        rows: dict[str, HintedCache] = {}
        for name, client in {**WRONG, "right": right}.items():
            rows[name] = hits(capacity, requests, client)
            part = rows[name].hit_blocks / rows["none"].hit_blocks
            print(f"{capacity:>8} blocks  {name:<36}{part:7.3f}", flush=True)
            if name in WRONG and part < LEAST:
                problems.append(f"{capacity} blocks, {name}: {part:.3f} of the hits")
            if rows[name].largest > 1 or rows[name].hints.retentions.total > TOTAL_SHARE * capacity:
                problems.append(f"{capacity} blocks, {name}: above the quota")
        found = {name: round(one.hit_blocks / rows["none"].hit_blocks, 4) for name, one in rows.items()}
        points[capacity] = {"capacity_blocks": capacity, "hits": rows["none"].hit_blocks, "hits_compared": found}
    if options.output:
        measured = {"trace": options.trace.name, "requests": len(requests), "points": [*points.values()]}
        report = {"benchmark": "wrong_hints", **facts(()), **measured}
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
