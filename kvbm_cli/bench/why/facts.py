"""CellFacts: the numbers of one comparison that its causes depend on. A number that is not known is `None`.

`Why` is one cause. `Reuse` says what a cache of unlimited size would find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_cli.bench.judge.compared import Compared, queue_share_of
from kvbm_cli.bench.judge.verdict import VerdictLimits
from kvbm_cli.bench.result.results import LOADED, TIERS, CellResult
from kvbm_cli.bench.workload.plan import Plan
from kvbm_cli.bench.workload.script import Content, Prefixes


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """One arm: its part of summary.json, and the share of its TTFT that requests waited in the engine's queue."""

    name: str
    summary: Mapping[str, Any]
    queue_share: float | None

    @property
    def prompt_token_count(self) -> int | None:
        """Prompt tokens of all runs; `None` if the engine does not say where they came from."""
        tokens = self.summary["prompt_tokens"]
        if tokens["g1"] is None or tokens["computed"] is None:
            return None
        return sum(tokens.get(tier) or 0 for tier in TIERS) or None

    def share_from(self, *tiers: str) -> float | None:
        """Share of the prompt tokens that were found in these tiers."""
        total = self.prompt_token_count
        return None if total is None else sum(self.summary["prompt_tokens"].get(tier) or 0 for tier in tiers) / total

    def size(self, name: str) -> int | None:
        """Return a size of the engine, such as `g2_blocks`: the same in all runs."""
        return next((run["engine"][name] for run in self._servers if run["engine"].get(name)), None)

    def counter(self, name: str) -> int | None:
        """Return a kvbm_* counter, summed over all runs; `None` if a run has none."""
        found = [run["kvbm_counters"].get(name) for run in self._servers]
        return None if None in found or not found else round(sum(found))

    def runs_with(self, state: str) -> list[str]:
        """Return the runs in which this kvbm_* state was 1."""
        runs = zip(self.summary["runs"], self.summary["server"], strict=True)
        return [name for name, server in runs if (server.get("kvbm_states", {}).get(state) or 0) >= 1]

    @property
    def _servers(self) -> Sequence[Mapping[str, Any]]:
        return [run for run in self.summary["server"] if "kvbm_counters" in run]


@dataclass(frozen=True, slots=True)
class CellFacts:
    """`limits` are what the verdict compares with. `profile` is the measured arm's; empty if it has none."""

    compared: Compared
    limits: VerdictLimits
    measured: ArmFacts
    reference: ArmFacts
    floor: ArmFacts | None
    reuse: Reuse | None
    profile: Mapping[str, Any]

    @property
    def cell(self) -> CellResult:
        return self.compared.cell

    @property
    def block_size(self) -> int | None:
        return self.reference.size("block_size")

    @property
    def g1_tokens(self) -> int | None:
        return self.cell.definition["g1_tokens"] or self.reference.size("g1_tokens")

    @property
    def g2_tokens(self) -> int | None:
        blocks, block_size = self.measured.size("g2_blocks"), self.block_size
        return blocks * block_size if blocks and block_size else None

    @property
    def reachable_share(self) -> float | None:
        """Share of the prompt tokens that a G1 of unlimited size would find: by the plan, or else by the floor."""
        if self.reuse is not None:
            return self.reuse.block_share
        return self.floor.share_from("g1") if self.floor else None

    @property
    def missed_share(self) -> float | None:
        """Share of the prompt tokens that repeat, and that the measured arm did not find in G1: what kvbm can save."""
        reachable, found = self.reachable_share, self.measured.share_from("g1")
        return None if reachable is None or found is None else max(0.0, reachable - found)

    @property
    def saved_share(self) -> float | None:
        """The part of the missed tokens that the measured arm loaded, 0 to 1."""
        missed, loaded = self.missed_share, self.measured.share_from(*LOADED)
        return None if not missed or loaded is None else min(1.0, loaded / missed)


@dataclass(frozen=True, slots=True)
class Why:
    """`key` is the profile key, the workload key or the option to change; `None` if there is none."""

    cause: str
    text: str
    key: str | None = None


def share(value: float) -> str:
    """Return a share with the digits that tell it from 0 and from 1."""
    percent = 100 * value
    return f"{percent:.1f}%" if 0 < percent < 10 or 90 < percent < 99.95 else f"{percent:.0f}%"


@dataclass(frozen=True, slots=True)
class Reuse:
    """`repeated_tokens` begin a prompt that was sent before; `block_tokens` of them are in whole blocks.

    The last token of a prompt is always computed, so its block is not among the whole ones.
    """

    prompt_tokens: int
    repeated_tokens: int
    block_tokens: int

    @property
    def repeated_share(self) -> float:
        return self.repeated_tokens / self.prompt_tokens

    @property
    def block_share(self) -> float:
        return self.block_tokens / self.prompt_tokens


def reuse_of(plan: Plan, block_size: int) -> Reuse | None:
    """`None` if a request has a fixed body, whose tokens are not known."""
    if not all(request.parts for request in plan.requests):
        return None
    prefixes, prompt, repeated, in_blocks = Prefixes(), 0, 0, 0
    known: dict[Content, Content] = {}  # equal contents as one object, by which prefixes are known
    for request in plan.requests:
        end, old, new = prefixes.add(known.setdefault(part, part) for part in request.parts)
        if request.answer is not None:
            answer = request.answer.content
            prefixes.add([known.setdefault(answer, answer)], after=end)
        prompt += old + new
        repeated += old
        in_blocks += max(0, min(old, old + new - 1)) // block_size * block_size
    return Reuse(prompt, repeated, in_blocks) if prompt else None


def facts_of(
    compared: Compared,
    arms: Mapping[str, Mapping[str, Any]],
    *,
    floor: str | None,
    profile: Mapping[str, Any] | None,
    limits: VerdictLimits,
) -> CellFacts:
    """`arms` are the arms of the cell in summary.json, `profile` is the one there."""
    cell = compared.cell
    facts = {name: ArmFacts(name, arm, queue_share_of(cell.of_arm(name))) for name, arm in arms.items()}
    reference = facts[compared.reference]
    block_size = reference.size("block_size")
    return CellFacts(
        compared=compared,
        limits=limits,
        measured=facts[compared.measured],
        reference=reference,
        floor=facts.get(floor) if floor else None,
        reuse=reuse_of(cell.plan, block_size) if block_size else None,
        profile=profile or {},
    )
