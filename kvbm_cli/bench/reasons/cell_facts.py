"""CellFacts: the numbers of one comparison that its causes depend on. A number that is not known is `None`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbm_cli.bench.analysis.paired import Noise, PairedRatio
from kvbm_cli.bench.analysis.ttft_model import NoModel, TtftModel
from kvbm_cli.bench.reasons.reuse import Reuse
from kvbm_cli.bench.records.results import CellResult

LOADED = ("g2", "g3", "g4")


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
        return sum(tokens.get(tier) or 0 for tier in ("g1", *LOADED, "computed")) or None

    def share_from(self, *tiers: str) -> float | None:
        """Share of the prompt tokens that were found in these tiers."""
        total = self.prompt_token_count
        return None if total is None else sum(self.summary["prompt_tokens"].get(tier) or 0 for tier in tiers) / total

    @property
    def median_ms(self) -> float | None:
        found: float | None = self.summary["ttft_ms"]["p50"]
        return found

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
class CauseLimits:
    """Limits of the verdict: the smallest gain that counts, the client's lateness and CPU, and the engine's load."""

    gain: float
    late_ms: float
    client_cpu_share: float
    utilisation: float
    queue_share: float


@dataclass(frozen=True, slots=True)
class CellFacts:
    """`verdict` is the comparison's, as in summary.json. `profile` is the measured arm's; empty if it has none."""

    cell: CellResult
    verdict: str
    ratio: PairedRatio | None
    noise: Noise | None
    ttft_model: TtftModel | NoModel
    limits: CauseLimits
    measured: ArmFacts
    reference: ArmFacts
    floor: ArmFacts | None
    reuse: Reuse | None
    profile: Mapping[str, Any]

    @property
    def workload(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.cell.definition["workload"]
        return found

    @property
    def is_trace(self) -> bool:
        """Whether the file of the workload fixes the times."""
        return bool(self.workload["kind"] == "trace")

    @property
    def is_closed_loop(self) -> bool:
        plan = self.cell.plan
        return plan is not None and plan.is_closed_loop

    @property
    def working_set_tokens(self) -> int | None:
        plan = self.cell.plan
        return plan.working_set_tokens if plan else None

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
