"""Hit rates of device memory (G1) and host memory (G2) together: kvbm's defaults against each fixed choice.

    python bench/eviction/device_and_host.py --trace conversation=mooncake-conversation.jsonl.gz \\
        --output bench/results/NAME-eviction-device-and-host.json

The choices are `eviction: lru` or `adaptive`, and `offload.to_host: always` or `on_evict`. The defaults are `adaptive`
and `auto`, as an engine without a disk chooses it. The product's own leader copies blocks and looks for them. G1 is a
prefix cache that evicts like vLLM: the least recently used block first, the tail of a chain before its head. There is
one request at a time, which computes PREFILL_BLOCKS in a step, and those of `--profile` one token of the answer in each
of the following ones; copies end in the step that orders them. No bytes move.

Without files, the generated workloads of `hit_rates.py` are used. `--profile` measures the workload of shipped profiles
with their own sizes, as `kvbm bench` sends it. Exits with 1 if the defaults have more than 2 % fewer hits than the best
choice.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "bench" / one) for one in ("vllm", "micro", "eviction"))]

from facts import facts  # noqa: E402
from hit_rates import BLOCK_TOKENS, Workload, made, workloads  # noqa: E402
from sparse_segments import sparse_segment  # noqa: E402

from kvbm.config.schema import Tiers  # noqa: E402
from kvbm.core.shadow_caches import ADAPTIVE, EVICTIONS, NAME_BYTES  # noqa: E402
from kvbm.engines.table import load as load_profile  # noqa: E402
from kvbm.host.layout import BlockLayout  # noqa: E402
from kvbm.host.region import Region  # noqa: E402
from kvbm.host.segment import Segment  # noqa: E402
from kvbm.host.shared_memory import SharedMemory  # noqa: E402
from kvbm.leader.late_offloads import reason_to_copy_at_once  # noqa: E402
from kvbm.leader.leader import Leader  # noqa: E402
from kvbm.tiers.settings import HELD_SHARE_OF_G1, EngineTraits, LeaderCallbacks, LeaderSettings  # noqa: E402
from kvbm.types import SlotState  # noqa: E402
from kvbm_cli.bench.trace.hit_rates import PrefixTree, TimedUse, name_of  # noqa: E402
from kvbm_cli.bench.workload.build import build_script  # noqa: E402
from kvbm_cli.bench.workload.files import load_workload  # noqa: E402
from kvbm_cli.bench.workload.script import AnswerOf, LengthWriter, length_of  # noqa: E402
from kvbm_cli.package_data import profiles_directory  # noqa: E402
from kvbm_cli.profile.size import size_of  # noqa: E402

CHOICES = [(eviction, to_host) for eviction in EVICTIONS for to_host in ("always", "on_evict")]
DEFAULTS = (ADAPTIVE, "auto")
PREFILL_BLOCKS = 16  # in a step
RATIOS = [0.5, 1, 1.5, 2, 3, 4, 6, 12]
TOLERANCE = 0.02
PAGE_BYTES = 4096


class PrefixCache:
    """G1. Free blocks are in a circular list, the next one to be evicted first; `block_count` is its only node that is
    no block. It is an EvictionQueue."""

    def __init__(self, block_count: int) -> None:
        self.block_count = self.end = block_count
        self._next = [*range(1, block_count + 1), 0]
        self._previous = [block_count, *range(block_count)]
        self._references = [0] * block_count
        self._contents: list[list[bytes] | None] = [None] * block_count  # lists, because they have identities
        self._blocks: dict[bytes, int] = {}

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of a hit, held."""
        found = []
        for name in names:
            if (block := self._blocks.get(name)) is None:
                break
            found.append(block)
        self.hold(found)
        return found

    def allocate(self, names: Sequence[bytes]) -> list[int]:
        """Return blocks with these contents, held."""
        blocks = []
        for name in names:
            block = self._next[self.end]
            assert block != self.end, "a request is larger than G1"
            if (content := self._contents[block]) is not None and self._blocks.get(content[0]) == block:
                del self._blocks[content[0]]
            self.hold([block])
            self._contents[block] = [name]
            self._blocks.setdefault(name, block)
            blocks.append(block)
        return blocks

    def hold(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if not self._references[block]:
                before, after = self._previous[block], self._next[block]
                self._next[before], self._previous[after] = after, before
            self._references[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self._references[block] -= 1
            if not self._references[block]:
                last = self._previous[self.end]
                self._next[last] = self._previous[self.end] = block
                self._previous[block], self._next[block] = last, self.end

    def contents_of(self, block_ids: Sequence[int]) -> list[list[bytes] | None]:
        return [self._contents[block] for block in block_ids]

    def first(self, count: int, *, again: bool) -> list[tuple[int, object]]:
        found: list[tuple[int, object]] = []
        block = self._next[self.end]
        while count and block != self.end:
            if (content := self._contents[block]) is not None:
                found.append((block, content))
            block, count = self._next[block], count - 1
        return found


class Engine:
    def __init__(self, g1_blocks: int, host_blocks: int, eviction: str, to_host: str) -> None:
        self.g1 = PrefixCache(g1_blocks)
        self.now_s = 0.0
        self.hits = {"g1": 0, "host": 0}
        self.copied = 0
        layout = BlockLayout.block_contiguous(block_count=g1_blocks, block_bytes=PAGE_BYTES)
        info = sparse_segment(0, layout, host_blocks)
        self._segment = Segment(SharedMemory(info.fd, mmap.mmap(info.fd, info.length)), info, host_blocks)
        tiers = Tiers.model_validate({"host": {"blocks": host_blocks}})
        is_late = to_host == "on_evict" or (
            to_host == "auto" and not reason_to_copy_at_once(tiers, host_blocks=host_blocks, g1_blocks=g1_blocks)
        )
        settings = LeaderSettings(
            EngineTraits(BLOCK_TOKENS, hash_bytes=NAME_BYTES),
            block_bytes=PAGE_BYTES,
            max_in_flight_blocks=max(1, g1_blocks // HELD_SHARE_OF_G1),
            reads_always=True,
            host_eviction=eviction,
            to_host=to_host,
        )
        callbacks = LeaderCallbacks(
            self.g1.hold, self.g1.release, clock=lambda: self.now_s, evictions=self.g1 if is_late else None
        )
        self._leader = Leader(Region.map([info]), settings, callbacks)

    def serve(self, request_id: str, names: Sequence[bytes], answer_tokens: int) -> None:
        leader, blocks = self._leader, self.g1.find(names)
        start = len(blocks)
        while (loaded := leader.match(request_id, names, start)) is None:
            self._step()
        self.hits["g1"] += start
        self.hits["host"] += loaded
        if loaded:
            blocks += self.g1.allocate(names[start : start + loaded])
            leader.onboard(request_id, names, start, blocks[start:])
            while not (results := self._step()):
                pass
            assert not results[0].failed_block_ids, results
        while True:
            blocks += self.g1.allocate(names[len(blocks) : len(blocks) + PREFILL_BLOCKS])
            leader.offload(request_id, names, blocks, computed_blocks=len(blocks), prompt_blocks=len(names))
            self._step()
            if len(blocks) == len(names):
                break
        for _ in range(answer_tokens):
            leader.offload(request_id, names, blocks, computed_blocks=len(blocks), prompt_blocks=len(names))
            self._step()
        leader.finish(request_id, names)
        self.g1.release(blocks[::-1])
        self._step()

    def _step(self) -> list[Any]:
        plan = self._leader.step()
        for order in plan.offloads:
            self.copied += len(order.slots)
            self._segment.write_slots(order.slots, order.generation, SlotState.READY)
        for load in plan.onboards:
            self._segment.write_lane(load.lane, load.generation, SlotState.READY)
        return self._leader.settle()


Request = tuple[float, list[bytes], int]  # when, the names of its blocks, and the tokens of its answer


def parts(requests: Sequence[Request], g1: int, host: int, choice: tuple[str, str]) -> list[float]:
    """Return which part of all blocks was found in G1, and in host memory, and which was copied to host memory."""
    engine = Engine(g1, host, *choice)
    for number, (at_s, names, answer_tokens) in enumerate(requests):
        engine.now_s = at_s
        engine.serve(f"r{number}", names, answer_tokens)
    total = sum(len(names) for _, names, _ in requests)
    return [round(count / total, 4) for count in (*engine.hits.values(), engine.copied)]


def named(tree: PrefixTree, uses: Sequence[TimedUse], answer_tokens: Iterable[int]) -> list[Request]:
    names = ([name_of(node) for node in reversed(tree.path(one.use.prompt))] for one in uses)
    return [(one.at_s, *rest) for one, *rest in zip(uses, names, answer_tokens, strict=False)]


def measure(name: str, workload: Workload, options: argparse.Namespace) -> list[dict[str, Any]]:
    tree, uses = workload
    uses = uses[: options.requests]
    requests = named(tree, uses, repeat(0))
    blocks = len({block for _, names, _ in requests for block in names})
    longest = max(len(names) for _, names, _ in requests)
    points = []
    for share in options.shares:
        g1 = max(round(share * blocks), longest + 1)
        points += [point(name, requests, g1, max(1, round(ratio * g1))) for ratio in options.ratios]
    return points


def point(name: str, requests: Sequence[Request], g1: int, host: int) -> dict[str, Any]:
    found = {" ".join(one): parts(requests, g1, host, one) for one in (*CHOICES, DEFAULTS)}
    hits = {one: in_g1 + in_host for one, (in_g1, in_host, _) in found.items()}
    best = max(hits[" ".join(one)] for one in CHOICES)
    loss = 1 - hits[" ".join(DEFAULTS)] / best if best else 0.0
    shown = "  ".join(f"{one} {rate:.4f}" for one, rate in hits.items())
    print(f"{name:<14}G1 {g1:>7}  host {host / g1:>4.1f} x G1  {shown}  loss {loss:+.2%}", flush=True)
    return {"g1_blocks": g1, "host_blocks": host, "g1_host_copied": found, "loss": round(loss, 4)}


def shipped(profile: str) -> tuple[Sequence[Request], int, int]:
    """Return the requests of a profile's workload, one per second, and the blocks of its G1 and host memory."""
    resolved = load_profile(profile, directories=[profiles_directory()])
    sizing = size_of(resolved)
    assert sizing.device is not None
    workload = load_workload(resolved.profile.bench.workload)
    script = build_script(workload, LengthWriter(), seed=workload.seed)
    ids: dict[object, int] = defaultdict(count(1).__next__)  # by the tokens of a block
    size, requests = sizing.block_tokens, []
    for number, request in enumerate(script.requests):
        tokens: list[tuple[object, int]] = []
        for part in request.parts:
            source = part if isinstance(part, AnswerOf) else id(part)
            tokens += [(source, place) for place in range(length_of(part))]
        starts = range(0, len(tokens) - size + 1, size)
        requests.append((float(number), tuple(ids[tuple(tokens[at : at + size])] for at in starts)))
    return (
        named(*made(requests), [one.answer_tokens or 0 for one in script.requests]),
        sizing.device.block_count,
        sizing.host.block_count,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE", help="trace in Mooncake's format")
    parser.add_argument("--profile", action="append", default=[], help="a shipped profile with a workload")
    parser.add_argument("--requests", type=int, help="only so many requests of each trace")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.03], help="G1, of a trace's blocks")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="host memory, of G1")
    parser.add_argument("--output", type=Path, help="JSON file of the result; keeps the other traces that it has")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.output and options.output.exists():
        results = json.loads(options.output.read_text())["traces"]
    measured = ((name, [point(name, *shipped(name))]) for name in options.profile)
    named = workloads(options.trace, with_generated=not options.trace and not options.profile)
    for name, points in chain(measured, ((name, measure(name, workload, options)) for name, workload in named)):
        results[name] = points
        if options.output:
            command = "python bench/eviction/device_and_host.py [--trace NAME=FILE --requests N] [--profile NAME]"
            report = {**facts(()), "command": command, "requests": options.requests, "traces": results}
            options.output.write_text(json.dumps(report, indent=1) + "\n")
    missed = [(name, one) for name, points in results.items() for one in points if one["loss"] > TOLERANCE]
    for name, one in missed:
        print(f"missed: {name}: {json.dumps(one)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
