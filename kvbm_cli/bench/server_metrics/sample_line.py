"""SampleLine: one line of server-metrics.jsonl, as a value.

The top-level keys are for readers of the file. `counters` has every total that a page had; only the totals are exact
enough for differences, so the summary is computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbm_cli.bench.server_metrics.prompt_tokens import prompt_tokens_by_tier

MOVES = {"onboard": "g2_to_g1", "offload": "g1_to_g2"}
QUANTITIES = ("bytes", "blocks", "seconds")


@dataclass(frozen=True, slots=True)
class SampleLine:
    """`error` says which page is missing, and why. The readers return `counters`, `gauges` and `facts`."""

    t_ms: float
    took_ms: float
    error: str | None = None
    started_s: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, int] = field(default_factory=dict)
    process: Mapping[str, float | None] = field(default_factory=dict)
    gpu: Sequence[Mapping[str, float | int | None]] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "t_ms": round(self.t_ms, 3),
            "took_ms": round(self.took_ms, 3),
            **({} if self.error is None else {"error": self.error}),
            "prompt_tokens": prompt_tokens_by_tier(self.counters),
            **{name: self._move(pair) for name, pair in MOVES.items()},
            "disk": {name: self.process.get(name) for name in ("read_bytes", "written_bytes")},
            "evictions": self.counters.get("evictions"),
            **{name: self.gauges.get(name) for name in ("running", "waiting", "kv_usage")},
            **{name: self.process.get(name) for name in ("rss_bytes", "shared_bytes", "cpu_s")},
            "gpu": list(self.gpu),
            "started_s": self.started_s,
            "counters": dict(self.counters),
            "states": {name: value for name, value in self.gauges.items() if name.startswith("kvbm_")},
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> SampleLine:
        """Raise KeyError, TypeError or AttributeError if the line is not one of a sampler."""
        gauges = {name: line[name] for name in ("running", "waiting", "kv_usage") if line[name] is not None}
        return cls(
            t_ms=float(line["t_ms"]),
            took_ms=float(line["took_ms"]),
            error=line.get("error"),
            started_s=line["started_s"],
            counters=dict(line["counters"]),
            gauges={**gauges, **line["states"]},
            facts=dict(line["facts"]),
            process={**line["disk"], **{name: line[name] for name in ("rss_bytes", "shared_bytes", "cpu_s")}},
            gpu=tuple(line["gpu"]),
        )

    def _move(self, pair: str) -> dict[str, float | None]:
        return {quantity: self.counters.get(f"{pair}_{quantity}") for quantity in QUANTITIES}
