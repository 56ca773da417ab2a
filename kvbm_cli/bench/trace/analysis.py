"""Analysis of a trace: lengths, sessions, what prompts have in common, and the hit-rate curve of a cache.

The length of a prompt is its `input_length`. That of a text is estimated, and its blocks are pieces of it. Without text
and `hash_ids`, the content of a line is unknown, and counts as one block that no other line shares. If the lines of a
session hold what each turn adds, the answer stays in the cache after its request, because the next prompt repeats it.

`findings_of` says what must be known of the trace of a workload before an engine starts. A wrong line ends the reading.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvbm_cli.bench.result.results import percentile
from kvbm_cli.bench.trace.hit_rates import HitCurve, PrefixTree, Simulation, TimedUse, Use, hit_curve
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import (
    CHARACTERS_PER_TOKEN,
    Placement,
    Sessions,
    TraceFormat,
    TraceRequest,
    Turns,
    estimated_tokens,
)

LONGEST_PREFIX_TABLE = 5
REPORT_EVERY = 1000
NEARLY_ALL = 0.9
PLAUSIBLE_PER_S = 100  # public traces have 0.01 to 30 requests per second
SHARES = (0.5, 0.8, 0.9, 0.95, 1.0)
CURVE_POINTS = 64
Report = Callable[[str], None]


def analyse(
    path: Path,
    form: TraceFormat,
    *,
    policies: Sequence[str] = (),
    bytes_per_token: int | None = None,
    report: Report = lambda phase: None,
) -> dict[str, Any]:
    """Return the numbers of a trace as JSON data, not rounded. The file is read once.

    `policies` are simulated if anything repeats. `answer_tokens` is None if no request has a length of its answer,
    `pauses_s` if none has a `delay`, `duration_s` without timestamps. Capacities are in tokens, blocks and, if the
    bytes of a token are known, bytes. `report` is called with what is being done.
    """
    reader = TraceReader(path, form)
    trace = collect(reader, report=report)
    tree, requests, block_tokens = trace.tree, trace.sessions.request_count, reader.form.block_tokens
    uses = [one.use for one in trace.timed_uses()]
    counts = tree.use_counts(use.prompt for use in uses)
    unique_blocks, block_uses = sum(count > 0 for count in counts[1:]), sum(counts[1:])
    duration_s = (max(trace.launches) - min(trace.launches)) / 1000 if trace.launches else None
    curve = hit_curve(tree, uses, report=lambda done: report(f"computing hit rates, {done} of {len(uses)} requests"))

    def capacity(tokens: int) -> dict[str, int | None]:
        size = tokens * bytes_per_token if bytes_per_token else None
        return {"tokens": tokens, "blocks": math.ceil(tokens / block_tokens), "bytes": size}

    def at(tokens: int) -> dict[str, Any]:
        return {"hit_rate": curve.hit_rate(tokens), **capacity(tokens)}

    shares = [(share, tokens) for share in SHARES if (tokens := curve.capacity_for(share))]
    return {
        "file": path.name,
        "requests": requests,
        "sessions": trace.sessions.session_count,
        "largest_turn": trace.largest_turn,
        "duration_s": duration_s,
        "requests_per_s": requests / duration_s if duration_s else None,
        "prompt_tokens": _lengths([tree.depth_tokens[use.prompt] for use in uses]),
        "answer_tokens": _lengths(trace.answers),
        "pauses_s": _lengths(trace.pauses_s),
        "block_tokens": block_tokens,
        "bytes_per_token": bytes_per_token,
        "unique_blocks": unique_blocks,
        "unique_tokens": sum(tree.tokens),
        "block_uses": block_uses,
        "repeated_block_uses": block_uses - unique_blocks,
        "shared_prefixes": _most_shared(tree, counts),
        "ideal_hit_rate": curve.ideal,
        "capacity_for_share_of_ideal": [{"share": share, **at(tokens)} for share, tokens in shares],
        "curve": [at(tokens) for tokens in _capacities(curve, block_tokens)],
        "evictions": trace.evictions(policies, capacity, report) if policies and curve.ideal else [],
        "notes": _notes(reader, trace, duration_s),
    }


def _lengths(values: Sequence[float]) -> dict[str, float] | None:
    """Of tokens per request, or of seconds per pause."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return {"mean": sum(values) / len(values), "p50": p50, "p90": p90, "p99": p99, "max": max(values)}


def _capacities(curve: HitCurve, block_tokens: int) -> list[int]:
    """Capacities in tokens, evenly spaced on a logarithmic axis from one block to all that a hit needs."""
    if not curve.distances:
        return []
    last = curve.distances[-1]
    first = min(block_tokens, last)
    step = math.log(last / first) / (CURVE_POINTS - 1)
    return sorted({*(round(first * math.exp(step * number)) for number in range(CURVE_POINTS - 1)), last})


def collect(reader: TraceReader, *, report: Report = lambda phase: None) -> CollectedTrace:
    """Read the file. `report` is called with what is being done."""
    trace = CollectedTrace(Sessions(reader.path, reader.form), reader.form)
    for number, request in enumerate(reader):
        trace.add(request)
        if number % REPORT_EVERY == 0:
            lines = reader.lines
            report(f"reading, {lines.bytes_read / 2**20:.1f} of {lines.byte_count / 2**20:.1f} MiB")
    return trace


@dataclass(slots=True)
class CollectedTrace:
    """What is kept of the requests while the file is read."""

    sessions: Sessions
    form: TraceFormat
    tree: PrefixTree = field(default_factory=PrefixTree)
    uses: list[Use] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    use_launches: list[float] = field(default_factory=list)  # 0 in a trace without timestamps
    answers: array[int] = field(default_factory=lambda: array("q"))
    pauses_s: array[float] = field(default_factory=lambda: array("d"))
    histories: dict[int, int] = field(default_factory=dict)  # session: node after its latest answer
    text_requests: int = 0
    requests_without_ids: int = 0
    largest_turn: int = 0

    def add(self, request: TraceRequest) -> None:
        placed = self.sessions.place(request)
        self.largest_turn = max(self.largest_turn, placed.turn)
        if placed.launch_ms is not None:
            self.launches.append(placed.launch_ms)
        if request.output_tokens is not None:
            self.answers.append(request.output_tokens)
        if request.delay_ms is not None and placed.turn > 1:
            self.pauses_s.append(request.delay_ms / 1000)
        self.text_requests += request.input_tokens is None
        self.requests_without_ids += request.input_tokens is not None and request.hash_ids is None
        self.use_launches.append(0.0 if placed.launch_ms is None else placed.launch_ms)
        self.uses.append(self._use(request, placed))

    def _use(self, request: TraceRequest, placed: Placement) -> Use:
        is_added = self.sessions.repeats_answers(request)
        prompt = self._prompt(request, self.histories.get(placed.session, 0) if is_added else 0)
        if not is_added:
            return Use(prompt, prompt)
        kept = prompt if request.output_tokens is None else self.tree.append(prompt, request.output_tokens)
        self.histories[placed.session] = kept
        return Use(prompt, kept)

    def _prompt(self, request: TraceRequest, start: int) -> int:
        """Return the last node of the prompt, which continues the path of `start`."""
        block_tokens = self.form.block_tokens
        if request.input_tokens is None:
            text = "".join(request.texts())
            ids = tuple(_piece_ids(text, block_tokens * CHARACTERS_PER_TOKEN))
            return self.tree.add(start, ids, token_count=estimated_tokens(text), block_tokens=block_tokens)
        if request.hash_ids is None:
            return self.tree.append(start, request.input_tokens)
        return self.tree.add(start, request.hash_ids, token_count=request.input_tokens, block_tokens=block_tokens)

    def timed_uses(self) -> list[TimedUse]:
        """Return when each request is launched, and what it uses, in the order of the launches."""
        order = sorted(range(len(self.uses)), key=self.use_launches.__getitem__)
        return [TimedUse(self.use_launches[index] / 1000, self.uses[index]) for index in order]

    def evictions(
        self, policies: Sequence[str], capacity: Callable[[int], dict[str, int | None]], report: Report
    ) -> list[dict[str, Any]]:
        """Simulate caches with these evictions: hit rates of blocks. The trace has hits.

        `capacity_for_share_of_hits` is the least one with NEARLY_ALL of the hits of an unlimited cache. `capacity`
        takes tokens.
        """
        simulation = Simulation(self.tree, self.timed_uses(), report=report)
        capacities = simulation.capacities()

        def of_blocks(blocks: int) -> dict[str, int | None]:
            return capacity(blocks * self.form.block_tokens)

        return [
            {
                "policy": policy,
                "share_of_hits": NEARLY_ALL,
                "capacity_for_share_of_hits": of_blocks(
                    simulation.capacity_for(NEARLY_ALL * rates[-1], policy, capacities, rates)
                ),
                "curve": [
                    {"hit_rate": rate, **of_blocks(blocks)} for blocks, rate in zip(capacities, rates, strict=True)
                ],
            }
            for policy, rates in simulation.rates(policies, capacities).items()
        ]


def _piece_ids(text: str, characters: int) -> Iterator[int]:
    for start in range(0, len(text), characters):
        piece = text[start : start + characters].encode()
        yield int.from_bytes(blake2b(piece, digest_size=8).digest(), "big")


def _most_shared(tree: PrefixTree, counts: array[int]) -> list[dict[str, int]]:
    """Return the longest prefixes that most requests have in common: a prefix counts only at its full length, where
    fewer requests continue it."""
    continued = array("q", bytes(8 * len(tree)))
    for node in range(1, len(tree)):
        continued[tree.parent[node]] = max(continued[tree.parent[node]], counts[node])
    ends = [node for node in range(1, len(tree)) if 1 < counts[node] > continued[node]]
    ends.sort(key=lambda node: (-counts[node], -tree.depth_tokens[node]))
    return [{"tokens": tree.depth_tokens[node], "requests": counts[node]} for node in ends[:LONGEST_PREFIX_TABLE]]


def rate_doubt(requests: int, duration_s: float | None) -> str | None:
    """Return a question if so many requests per second come of timestamps in seconds rather than milliseconds."""
    if not duration_s or requests / duration_s <= PLAUSIBLE_PER_S:
        return None
    return f"{requests / duration_s:,.0f} requests per second: are these seconds?"


def _notes(reader: TraceReader, trace: CollectedTrace, duration_s: float | None) -> list[str]:
    """Return what a reader of the numbers must know about this trace."""
    found = reader.skips()
    if (doubt := rate_doubt(trace.sessions.request_count, duration_s)) is not None:
        found.append(f"{doubt} `--time-scale 1000` is for seconds")
    found += [f"the field `{name}` of {count:,} lines is ignored" for name, count in sorted(reader.ignored.items())]
    if trace.text_requests:
        found.append(
            f"{trace.text_requests:,} requests hold text: their tokens are estimated, "
            f"{CHARACTERS_PER_TOKEN} characters each"
        )
    if trace.requests_without_ids:
        found.append(f"{trace.requests_without_ids:,} requests have no hash ids; they count as content of their own")
    if duration_s is None:
        found.append("the trace has no timestamps: the hit rates are for the order of the lines")
    if trace.largest_turn > 1 and trace.form.turns is Turns.ADDED:
        found.append("a line holds what its turn adds; `--turns whole` is for lines that hold whole prompts")
    return found


def findings_of(path: Path, form: TraceFormat) -> list[str]:
    """Sentences about the requests. ProfileError for a wrong line."""
    reader = TraceReader(path, form)
    times, count = [], 0
    for request in reader:
        count += 1
        if request.timestamp_ms is not None:
            times.append(request.timestamp_ms)
    doubt = rate_doubt(count, (max(times) - min(times)) / 1000 if times else None)
    found = [*reader.skips(), *([f"{doubt} `time_scale: 1000` in the workload is for seconds"] if doubt else [])]
    return [f"{path.name}: {one}" for one in found]
