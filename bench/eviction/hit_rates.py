"""Hit rates of `lru` and `adaptive` on traces, with the product's own block store, against limits.

    python bench/eviction/hit_rates.py --trace conversation=mooncake-conversation.jsonl.gz \\
        --trace agents=weka.jsonl.gz --output bench/results/NAME-eviction-hit-rates.json \\
        --picture docs/images/eviction.svg

`conversation` is the conversation trace that the Mooncake project published, `agents` are recorded sessions of a coding
agent (`callanjfox/kv-cache-tester`, every second file, started at random times within six hours) in the same format.
The limits in LIMITS are for these two. Without files, two seeded workloads are generated: `documents` (questions about
documents, some of them popular) and `scans` (conversations, and thrice half an hour of prompts that never repeat).
`documents-then-scans` is one after the other.

Each capacity is simulated exactly, as with `kvbm plan --exact`. Exits with 1 if `adaptive` misses a limit by more than
2 %, or is more than 1 % below `lru` at a capacity of at least twice the longest request.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "vllm")]

from facts import facts  # noqa: E402

from kvbm.core.shadow_caches import EVICTIONS  # noqa: E402
from kvbm_cli.bench.trace.analysis import collect  # noqa: E402
from kvbm_cli.bench.trace.hit_rates import PrefixTree, Sample, TimedUse, Use, hit_rate  # noqa: E402  # noqa: E402
from kvbm_cli.bench.trace.reader import TraceReader  # noqa: E402
from kvbm_cli.bench.trace.request import TraceFormat  # noqa: E402

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the different blocks of a trace
CAPACITIES = {"conversation": (1827, 3655, 9139, 18279, 36558), "agents": (2008, 4017, 10043)}
LIMITS = {
    "conversation": {1827: 0.100, 3655: 0.136, 9139: 0.206, 18279: 0.284, 36558: 0.345},
    "agents": {2008: 0.405, 4017: 0.660, 10043: 0.917},
}
TOLERANCE, LEAST_OF_LRU = 0.02, 0.99
BLOCK_TOKENS = 512
HOUR_S = 3600.0

Workload = tuple[PrefixTree, list[TimedUse]]
Request = tuple[float, tuple[int, ...]]  # when, and the hash ids


def read(path: Path) -> Workload:
    trace = collect(TraceReader(path, TraceFormat(BLOCK_TOKENS)))
    return trace.tree, trace.timed_uses()


def made(requests: Sequence[Request]) -> Workload:
    tree, uses = PrefixTree(), []
    for at_s, ids in sorted(requests):
        node = tree.add(0, ids, token_count=len(ids) * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)
        uses.append(TimedUse(at_s, Use(node, node)))
    return tree, uses


def arrivals(choice: random.Random, per_s: float, end_s: float) -> Iterator[float]:
    at_s = choice.expovariate(per_s)
    while at_s < end_s:
        yield at_s
        at_s += choice.expovariate(per_s)


def documents(choice: random.Random, start_s: float = 0.0) -> Iterator[Request]:
    """Three hours of questions about 2,500 documents; the popular ones change slowly."""
    weights = [1 / (rank + 1) ** 0.9 for rank in range(2500)]
    lengths = [max(1, round(choice.lognormvariate(math.log(17), 0.8))) for _ in weights]
    for number, at_s in enumerate(arrivals(choice, 1.0, 3 * HOUR_S)):
        document = (choice.choices(range(2500), weights)[0] + int(at_s / 50)) % 2500
        ids = [1, *(10_000 + 1000 * document + block for block in range(lengths[document]))]
        for turn in range(1 if choice.random() < 0.7 else choice.randrange(2, 5)):
            ids.append(10_000_000 + 10 * number + turn)
            yield start_s + at_s + turn * choice.lognormvariate(math.log(30), 0.8), tuple(ids)


def scans(choice: random.Random, start_s: float = 0.0) -> Iterator[Request]:
    """Three hours of conversations, and in each hour half an hour of prompts that never repeat."""
    for number, at_s in enumerate(arrivals(choice, 0.35, 3 * HOUR_S)):
        turn_s, ids = at_s, [2, 3, 4]
        for turn in range(1 if choice.random() < 0.45 else choice.randrange(2, 10)):
            ids += (100_000_000 + 1000 * number + 20 * turn + block for block in range(choice.randrange(1, 6)))
            yield start_s + turn_s, tuple(ids)
            turn_s += choice.lognormvariate(math.log(45), 1.1)
    for hour in range(3):
        for number in range(1800):
            base = 1_000_000_000 + (hour * 1800 + number) * 100
            length = max(1, round(choice.lognormvariate(math.log(17), 0.4)))
            yield start_s + hour * HOUR_S + number, (5, *(base + block for block in range(length)))


def workloads(files: Sequence[str], *, with_generated: bool) -> Iterator[tuple[str, Workload]]:
    for text in files:
        name, _, path = text.partition("=")
        yield name, read(Path(path))
    if not with_generated:
        return
    yield "documents", made([*documents(random.Random(1))])
    yield "scans", made([*scans(random.Random(2))])
    both = [*documents(random.Random(1)), *scans(random.Random(2), start_s=4 * HOUR_S)]
    yield "documents-then-scans", made(both)


def measure(name: str, workload: Workload) -> list[dict[str, Any]]:
    tree, uses = workload
    blocks = len(tree) - 1
    sample = Sample(tree, blocks)
    points = []
    for capacity in CAPACITIES.get(name) or [round(share * blocks) for share in SHARES]:
        rates = {policy: round(hit_rate(tree, uses, sample, capacity, policy), 4) for policy in EVICTIONS}
        points.append({"capacity_blocks": capacity, "share_of_blocks": round(capacity / blocks, 4), **rates})
        print(f"{name:<22}{capacity:>8}  lru {rates['lru']:.4f}  adaptive {rates['adaptive']:.4f}", flush=True)
    return points


def missed(name: str, workload: Workload, points: Sequence[dict[str, Any]]) -> Iterator[str]:
    longest = max(workload[0].depth[one.use.prompt] for one in workload[1])
    for point in points:
        capacity, lru, adaptive = (point[key] for key in ("capacity_blocks", *EVICTIONS))
        limit = LIMITS.get(name, {}).get(capacity, 0.0)
        if adaptive < limit * (1 - TOLERANCE):
            yield f"{name}, {capacity} blocks: {adaptive}, limit {limit}"
        if capacity >= 2 * longest and adaptive < LEAST_OF_LRU * lru:
            yield f"{name}, {capacity} blocks: {adaptive}, and lru has {lru}"


# -- the picture -------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 170, 46, 40, 34
COLOURS = {"lru": "#8a8f98", "adaptive": "#1f6feb"}


def picture(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return an SVG with one chart per trace: hit rate by capacity, on a logarithmic axis."""
    columns = min(2, len(results))
    rows = -(-len(results) // columns)
    size = (columns * (WIDTH + LEFT + GAP), rows * (HEIGHT + TOP + 2 * GAP))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" '
        f'font-size="11"><rect width="{size[0]}" height="{size[1]}" fill="white"/>'
    ]
    for index, (name, points) in enumerate(results.items()):
        left = LEFT + index % columns * (WIDTH + LEFT + GAP)
        top = TOP + index // columns * (HEIGHT + TOP + 2 * GAP)
        parts += [f'<g transform="translate({left},{top})">', *chart(name, points), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def chart(name: str, points: Sequence[dict[str, Any]]) -> Iterator[str]:
    low, high = (math.log(points[at]["capacity_blocks"]) for at in (0, -1))
    top = max(max(point[policy] for policy in EVICTIONS) for point in points)

    def place(point: dict[str, Any], policy: str) -> tuple[float, float]:
        across = (math.log(point["capacity_blocks"]) - low) / (high - low) * WIDTH
        return round(across, 1), round(HEIGHT * (1 - point[policy] / top), 1)

    yield f'<text x="0" y="-14" font-weight="bold">{name}</text>'
    yield f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#444"/>'
    for share in (0.0, 0.5, 1.0):
        yield f'<text x="-6" y="{HEIGHT * (1 - share) + 4}" text-anchor="end">{top * share:.0%}</text>'
    for at, anchor in ((0, "start"), (-1, "end")):
        x = 0 if at == 0 else WIDTH
        label = f"{points[at]['capacity_blocks']:,} blocks"
        yield f'<text x="{x}" y="{HEIGHT + 16}" text-anchor="{anchor}">{label}</text>'
    for row, policy in enumerate(EVICTIONS):
        line = " ".join(f"{x},{y}" for x, y in (place(point, policy) for point in points))
        yield f'<polyline points="{line}" fill="none" stroke="{COLOURS[policy]}" stroke-width="2"/>'
        place_of_name = f'x="{WIDTH}" y="{HEIGHT - 8 - 14 * row}" text-anchor="end"'
        yield f'<text {place_of_name} fill="{COLOURS[policy]}">{policy}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE", help="trace in Mooncake's format")
    parser.add_argument("--traces-only", action="store_true", help="do not generate workloads")
    parser.add_argument("--output", type=Path, help="JSON file of the result; keeps the other traces that it has")
    parser.add_argument("--picture", type=Path, help="SVG file of the result")
    options = parser.parse_args()
    results, problems = {}, []
    if options.output and options.output.exists():
        results = json.loads(options.output.read_text())["hit_rates"]
    for name, workload in workloads(options.trace, with_generated=not options.traces_only):
        results[name] = measure(name, workload)
        problems += missed(name, workload, results[name])
    if options.output:
        command = f"python bench/eviction/hit_rates.py {' '.join('--trace NAME=FILE' for _ in options.trace)}".strip()
        report = {**facts(()), "command": command, "hit_rates": results, "missed": problems}
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    if options.picture:
        options.picture.write_text(picture(results))
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
