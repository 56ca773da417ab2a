"""Memory and pauses of a leader that manages 16M blocks in 2 TiB of host memory on 8 ranks, with sparse segments.

    python bench/micro/memory_at_scale.py       # about 3 minutes; --blocks 262144 for a short run

The segments have their full length but no pages, so the measurement needs about 6 GiB instead of 2 TiB. The leader is
the real one. Every block passes through it as in an engine: offload, step, control words of all ranks, settle, finish.

Measured in the leader's process: private memory per block, page tables, seconds until it is ready, the longest single
call, what the garbage collector walks, and the same again while blocks are evicted. In a fresh process per kind of
pages: a real segment of 1 GiB, its prefault time (three times, because a virtual machine gets fresh memory slowly) and
its page tables. `--kernel-settings`, as root, also measures reserved and transparent huge pages; it changes
`vm.nr_hugepages` and `shmem_enabled` and restores both at the end. The section `extrapolated` computes the full size
from the samples.

The leader is measured with hashes of 16 and of 32 bytes (SHA-256, the default of vLLM). The index has each hash twice,
so the limit is 240 bytes per block with 16-byte hashes, and 272 with 32-byte hashes. Eviction is adaptive.

The limits on calls apply to CPU time of the calling thread, because other processes delay the wall clock: 100 ms for
a reset, and 10 ms for a call in a step, which three of about 160 000 calls may exceed. Exits with 1 above a limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "vllm")]

from facts import facts  # noqa: E402
from sparse_segments import sparse_segment  # noqa: E402

from kvbm.host.layout import PAGE_BYTES, BlockLayout, Piece  # noqa: E402
from kvbm.host.machine_memory import THIS_MACHINE  # noqa: E402
from kvbm.host.region import Region  # noqa: E402
from kvbm.host.segment import Segment  # noqa: E402
from kvbm.host.shared_memory import MAX_PREFAULT_THREADS  # noqa: E402
from kvbm.leader.leader import Leader  # noqa: E402
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks, LeaderSettings  # noqa: E402
from kvbm.types import SlotState  # noqa: E402

BYTES_PER_BLOCK_LIMITS = {16: 240, 32: 272}  # by the length of a hash
PROCESS_BYTES = 1 << 20  # what the process itself grows by, whatever the number of blocks
WALKED_REFERENCES_LIMIT = 10_000  # grows with the number of dicts in the index, one per 10 400 blocks
STEP_CALL_LIMIT_MS, RESET_LIMIT_MS = 10.0, 100.0
SLOW_CALLS_LIMIT = 3  # a virtual machine counts some time that it did not run as CPU time
CHAIN_BLOCKS = 512  # of one request, which one step offloads
SLOT_STRIDE = 16 << 10
SAMPLE_BYTES = 1 << 30
HUGE_PAGE_BYTES = 2 << 20
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
GIB = 1 << 30


@dataclass(slots=True)
class Calls:
    """The slowest call of each name, and how many took more CPU time than `limit_ms`."""

    limit_ms: float = math.inf
    count: int = 0
    slow_count: int = 0
    cpu_ms: dict[str, float] = field(default_factory=dict)
    wall_ms: dict[str, float] = field(default_factory=dict)
    total_cpu_s: float = 0.0

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call()
        wall_ms, cpu_ms = (time.perf_counter_ns() - wall) / 1e6, (time.thread_time_ns() - cpu) / 1e6
        self.wall_ms[name] = max(self.wall_ms.get(name, 0.0), wall_ms)
        self.cpu_ms[name] = max(self.cpu_ms.get(name, 0.0), cpu_ms)
        self.total_cpu_s += cpu_ms / 1e3
        self.count += 1
        self.slow_count += cpu_ms > self.limit_ms
        return result

    def report(self) -> dict[str, Any]:
        return {
            "calls": self.count,
            "calls_above_limit": self.slow_count,
            "longest_call_cpu_ms": {name: round(taken, 2) for name, taken in self.cpu_ms.items()},
            "longest_call_wall_ms": {name: round(taken, 2) for name, taken in self.wall_ms.items()},
            "total_cpu_s": round(self.total_cpu_s, 1),
        }


def status(*names: str) -> dict[str, int]:
    """Fields of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    found = {name: re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE) for name in names}
    return {name: int(match[1]) << 10 for name, match in found.items() if match}


def memory() -> dict[str, int]:
    gc.collect()
    return status("RssAnon", "RssShmem", "VmPTE")


def walked_references() -> int:
    """How many references a full garbage collection follows."""
    return sum(len(gc.get_referents(tracked)) for tracked in gc.get_objects())


# -- the leader --------------------------------------------------------------------------------------------------------


def random_hashes(count: int, hash_bytes: int) -> list[bytes]:
    data = os.urandom(count * hash_bytes)
    return [data[start : start + hash_bytes] for start in range(0, len(data), hash_bytes)]


def offload_chains(leader: Leader, region: Region, block_count: int, hash_bytes: int) -> Calls:
    """Offload `block_count` new blocks, one request per step; the ranks' control words are written here."""
    calls, block_ids = Calls(limit_ms=STEP_CALL_LIMIT_MS), list(range(CHAIN_BLOCKS))
    for number in range(block_count // CHAIN_BLOCKS):
        name, hashes = f"request-{number}", random_hashes(CHAIN_BLOCKS, hash_bytes)
        calls.time("match", lambda: leader.match(name, hashes, 0))  # noqa: B023
        calls.time("offload", lambda: offload(leader, name, hashes, block_ids))  # noqa: B023
        plan = calls.time("step", leader.step)
        for order in plan.offloads:
            region.write_slots(order.slots, order.generation, SlotState.READY)
        calls.time("settle", leader.settle)
        calls.time("take_events", leader.take_events)
        calls.time("finish", lambda: leader.finish(name, hashes))  # noqa: B023
    return calls


def offload(leader: Leader, name: str, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
    leader.offload(name, hashes, block_ids, computed_blocks=len(hashes), prompt_blocks=len(hashes))


def measure_leader(block_count: int, rank_count: int, hash_bytes: int) -> dict[str, Any]:
    """Fill a leader and its control words. Runs in a process of its own."""
    layout = BlockLayout.block_contiguous(block_count=1, block_bytes=SLOT_STRIDE)
    infos = [sparse_segment(rank, layout, block_count) for rank in range(rank_count)]
    references, start = walked_references(), memory()
    settings = LeaderSettings(
        EngineTraits(block_tokens=16, hash_bytes=hash_bytes),
        block_bytes=rank_count * SLOT_STRIDE,
        max_in_flight_blocks=4 * CHAIN_BLOCKS,
        host_eviction="adaptive",
    )
    ready = Calls()
    region = ready.time("map", lambda: Region.map(infos))
    callbacks = LeaderCallbacks(hold=lambda block_ids: None, release=lambda block_ids: None)
    leader = ready.time("construct", lambda: Leader(region, settings, callbacks))
    empty = memory()
    filling = offload_chains(leader, region, block_count, hash_bytes)
    full, present = memory(), leader.blocks()[next(iter(leader.blocks()))]["evictable"]
    assert present == block_count // CHAIN_BLOCKS * CHAIN_BLOCKS, f"{present} of {block_count} blocks are registered"
    collecting = Calls()
    collecting.time("collect", gc.collect)
    references = walked_references() - references
    evicting = offload_chains(leader, region, block_count // 8, hash_bytes)
    churned = memory()
    touched = touch_payload(region, min(SAMPLE_BYTES, infos[0].length // 2))
    forgetting = Calls(limit_ms=RESET_LIMIT_MS)
    forgetting.time("reset", leader.reset)
    grown = full["RssAnon"] - start["RssAnon"]
    return {
        "bytes_per_block": round(grown / block_count, 1),
        "bytes_per_block_after_evictions": round((churned["RssAnon"] - start["RssAnon"]) / block_count, 1),
        "private_bytes": {"empty": empty["RssAnon"] - start["RssAnon"], "full": grown},
        "control_word_bytes": full["RssShmem"] - start["RssShmem"],
        "page_table_bytes": {
            "mapped": empty["VmPTE"] - start["VmPTE"],
            "words_written_and_blocks_registered": full["VmPTE"] - start["VmPTE"],
        },
        "payload_sample": touched,
        "seconds_until_ready": round((ready.wall_ms["map"] + ready.wall_ms["construct"]) / 1e3, 2),
        "until_ready": ready.report(),
        "filling": filling.report(),
        "evicting": evicting.report(),
        "reset": forgetting.report(),
        "garbage_collection_ms": round(collecting.wall_ms["collect"], 1),
        "references_walked_by_the_collector": references,
    }


def touch_payload(region: Region, byte_count: int) -> dict[str, int]:
    """Write one byte of every page of one shard's first bytes."""
    before = memory()
    slots = byte_count // SLOT_STRIDE
    region.shards[0][:slots, ::PAGE_BYTES] = 1
    after = memory()
    return {"bytes": slots * SLOT_STRIDE, "page_table_bytes": after["VmPTE"] - before["VmPTE"]}


# -- a rank ------------------------------------------------------------------------------------------------------------


def measure_rank(byte_count: int) -> dict[str, Any]:
    """Create a real segment with all its pages. Runs in a process of its own."""
    piece = Piece(storage=0, offset=0, block_stride=SLOT_STRIDE, length=SLOT_STRIDE)
    slot_count = byte_count // SLOT_STRIDE
    layout = BlockLayout(pieces=(piece,), block_count=slot_count)
    wall, cpu, tables, huge_bytes = [], [], [], []
    for _ in range(3):
        before, started, cpu_started = memory(), time.perf_counter(), time.process_time()
        segment = Segment.create(rank=0, layout=layout, slot_count=slot_count)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
        tables.append(memory()["VmPTE"] - before["VmPTE"])
        huge_bytes.append(status("HugetlbPages").get("HugetlbPages", 0) + transparent_huge_bytes())
        segment.close()
    gib = segment.info.length / GIB
    return {
        "bytes": segment.info.length,
        "in_huge_pages": min(huge_bytes),
        "page_table_bytes": max(tables),
        "prefault_s_per_gib": [round(taken / gib, 3) for taken in wall],
        "prefault_cpu_s_per_gib": [round(taken / gib, 3) for taken in cpu],
        "threads": min(MAX_PREFAULT_THREADS, len(os.sched_getaffinity(0))),
    }


def transparent_huge_bytes() -> int:
    found = re.findall(r"^ShmemPmdMapped:\s+(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, found)) << 10


@contextmanager
def setting(path: Path, value: str) -> Iterator[None]:
    """Change a setting of the kernel and restore it."""
    before = path.read_text()
    before = selected[1] if (selected := re.search(r"\[(\w+)\]", before)) else before.strip()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


def measure_ranks(*, changes_settings: bool) -> dict[str, dict[str, Any]]:
    kinds: dict[str, list[tuple[Path, str]]] = {"as the machine is set": []}
    if changes_settings:
        count = THIS_MACHINE.huge_pages()[1] // HUGE_PAGE_BYTES + SAMPLE_BYTES // HUGE_PAGE_BYTES + 8
        small = [(NR_HUGEPAGES, "0"), (SHMEM_ENABLED, "never")]
        kinds = {
            "4 KiB pages": small,
            "reserved 2 MiB pages": [(NR_HUGEPAGES, str(count)), small[1]],
            "transparent 2 MiB pages": [small[0], (SHMEM_ENABLED, "advise")],
        }
    measured = {}
    for kind, changes in kinds.items():
        with ExitStack() as stack:
            for path, value in changes:
                stack.enter_context(setting(path, value))
            measured[kind] = in_process(measure_rank, SAMPLE_BYTES)
    return measured


def in_process(function: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


# -- the result --------------------------------------------------------------------------------------------------------


def extrapolated(leader: dict[str, Any], ranks: dict[str, dict[str, Any]], block_count: int, rank_count: int) -> Any:
    """The full size, computed from the samples.

    Prefault times are the shortest CPU time, divided by the threads: kvbm uses at most 16 per rank. A core per thread
    is assumed.
    """
    rank_bytes = block_count * SLOT_STRIDE
    sample = leader["payload_sample"]
    per_kind = {
        kind: {
            "page_table_bytes_of_a_rank": round(found["page_table_bytes"] / found["bytes"] * rank_bytes),
            "prefault_s_of_a_rank": {
                threads: round(min(found["prefault_cpu_s_per_gib"]) * rank_bytes / GIB / threads, 1)
                for threads in (1, MAX_PREFAULT_THREADS)
            },
        }
        for kind, found in ranks.items()
    }
    every_page = sample["page_table_bytes"] / sample["bytes"] * rank_bytes * rank_count
    return {"page_table_bytes_of_a_process_that_touches_every_page": round(every_page), "ranks": per_kind}


def memory_above_limits(leader: dict[str, Any], hash_bytes: int, blocks: int) -> Iterator[str]:
    per_block = BYTES_PER_BLOCK_LIMITS[hash_bytes] + PROCESS_BYTES / blocks
    limits = {
        "bytes_per_block": per_block,
        "bytes_per_block_after_evictions": per_block,
        "references_walked_by_the_collector": WALKED_REFERENCES_LIMIT,
    }
    for name, limit in limits.items():
        if leader[name] > limit:
            yield f"{name}: {leader[name]}, limit {limit}"


def calls_above_limits(leader: dict[str, Any]) -> Iterator[str]:
    for phase, limit in (("filling", SLOW_CALLS_LIMIT), ("evicting", SLOW_CALLS_LIMIT), ("reset", 0)):
        if leader[phase]["calls_above_limit"] > limit:
            found = leader[phase]
            yield f"{phase}: {found['calls_above_limit']} slow calls: {found['longest_call_cpu_ms']} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=16 << 20, help="blocks of host memory")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kernel-settings", action="store_true", help="as root: also measure huge pages")
    parser.add_argument("--hash-bytes", type=int, nargs="+", choices=[16, 32], default=[16, 32])
    parser.add_argument("--memory-only", action="store_true", help="no segments with pages, no limits on calls")
    parser.add_argument("--output", type=Path, help="JSON file of the result")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    leaders = {
        hash_bytes: in_process(measure_leader, options.blocks, options.ranks, hash_bytes)
        for hash_bytes in options.hash_bytes
    }
    ranks = {} if options.memory_only else measure_ranks(changes_settings=options.kernel_settings)
    failed = [
        f"{hash_bytes}-byte hashes, {line}"
        for hash_bytes, leader in leaders.items()
        for line in (
            *memory_above_limits(leader, hash_bytes, options.blocks),
            *(() if options.memory_only else calls_above_limits(leader)),
        )
    ]
    result = {
        "benchmark": "memory_at_scale",
        **facts(("kvbm-cli",)),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "blocks": options.blocks,
        "ranks": options.ranks,
        "host_bytes": options.blocks * options.ranks * SLOT_STRIDE,
        "limits": {
            "bytes_per_block_by_hash_bytes": BYTES_PER_BLOCK_LIMITS,
            "step_call_cpu_ms": STEP_CALL_LIMIT_MS,
            "slow_calls": SLOW_CALLS_LIMIT,
            "reset_cpu_ms": RESET_LIMIT_MS,
        },
        "leader_by_hash_bytes": leaders,
        "rank_samples": ranks,
        "extrapolated": extrapolated(leaders[options.hash_bytes[-1]], ranks, options.blocks, options.ranks),
        "above_a_limit": failed,
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
