"""Advice: sentences about a curve of hit rates: what more memory gains, what that saves, and from when on it pays.

A hit rate becomes time with the speed of the prefill and the mean length of a prompt, both measured or given: a request
computes so many tokens less. Time becomes money with the price of an accelerator. What is not known is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvbm.core.shadow_caches import ADAPTIVE, LRU
from kvbm_cli.bench.result.cost import GB, HOURS_PER_MONTH
from kvbm_cli.terminal.console import table

NOTABLE_GAIN = 0.005  # of the hit rate


@dataclass(frozen=True, slots=True)
class Curve:
    """`rates[eviction][i]` is the hit rate with the capacity `names[i]`, of `sizes[i]` bytes if that is known."""

    names: tuple[str, ...]
    sizes: tuple[float, ...] | None
    rates: dict[str, list[float]]

    def rows(self, *columns: Sequence[str]) -> list[tuple[str, ...]]:
        """Return a row per capacity: what `columns` have of it, and its hit rates, one per eviction."""
        shown = ([f"{rate:.1%}" for rate in rates] for rates in self.rates.values())
        return list(zip(*columns, *shown, strict=True))

    def as_data(self, key: str, capacities: Sequence[int]) -> list[dict[str, Any]]:
        """Return every point. `key` names the unit of the capacities."""
        return [
            {"policy": policy, key: capacity, "hit_rate": rate}
            for policy, rates in self.rates.items()
            for capacity, rate in zip(capacities, rates, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Mean length of a prompt, and how fast the engine computes prompts. None if not known."""

    prompt_tokens: float | None = None
    prefill_tokens_per_s: float | None = None

    def saved_s(self, gain: float) -> float | None:
        """Return how much shorter the mean prefill is with so much more of the hit rate."""
        if self.prompt_tokens is None or not self.prefill_tokens_per_s:
            return None
        return gain * self.prompt_tokens / self.prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a gigabyte of memory per month, and of the accelerators of one engine per hour."""

    memory_gb_month: float
    engine_hour: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What the capacity `more` has over `less`, as JSON has it."""

    less: str
    more: str
    policy: str
    hit_rates: tuple[float, float]
    saved_prefill_s: float | None
    pays_from_requests_per_hour: float | None


def gains(curve: Curve, prompts: Prompts, prices: Prices | None) -> Iterator[Gain]:
    """Return those between two neighbouring capacities that are notable, with the best eviction."""
    eviction, rates = max(curve.rates.items(), key=lambda item: sum(item[1]))
    for more in range(1, len(curve.names)):
        gain = rates[more] - rates[more - 1]
        if gain <= NOTABLE_GAIN:
            continue
        saved_s = prompts.saved_s(gain)
        pays_from = None
        if prices is not None and curve.sizes is not None and saved_s:
            added = (curve.sizes[more] - curve.sizes[more - 1]) / GB * prices.memory_gb_month / HOURS_PER_MONTH
            pays_from = added / (saved_s / 3600 * prices.engine_hour)
        less_name, more_name = curve.names[more - 1 : more + 1]
        yield Gain(less_name, more_name, eviction, (rates[more - 1], rates[more]), saved_s, pays_from)


def sentences(curve: Curve, prompts: Prompts, prices: Prices | None) -> list[str]:
    lines = [_sentence(one) for one in gains(curve, prompts, prices)]
    if LRU in curve.rates and ADAPTIVE in curve.rates:
        lines.append(_about_eviction(curve))
    return lines or ["The hit rate does not depend on these capacities."]


def _sentence(gain: Gain) -> str:
    before, after = gain.hit_rates
    text = (
        f"With {gain.more} instead of {gain.less}, {after:.0%} instead of {before:.0%} of "
        f"the prompt tokens come from the cache ({gain.policy})"
    )
    if (saved_s := gain.saved_prefill_s) is not None:
        text += f": {_seconds(saved_s)} less prefill per request on average"
    if (pays_from := gain.pays_from_requests_per_hour) is not None:
        text += f", which pays from {_count(pays_from)} requests per hour"
    return f"{text}."


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _about_eviction(curve: Curve) -> str:
    lru, adaptive = curve.rates[LRU], curve.rates[ADAPTIVE]
    gained = [new - old for new, old in zip(adaptive, lru, strict=True)]
    best = gained.index(max(gained))
    if gained[best] <= NOTABLE_GAIN:
        return "`adaptive` gains nothing here, compared with `lru`."
    return f"`adaptive` gains most with {curve.names[best]}: {adaptive[best]:.1%} instead of {lru[best]:.1%}."


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What is printed of a trace, or of an engine. `columns` are the capacities in its table by the heads of columns,
    `data` is what its JSON has first."""

    head: str
    curve: Curve
    prompts: Prompts
    columns: Mapping[str, Sequence[str]]
    data: Mapping[str, Any]

    def text(self, prices: Prices | None) -> str:
        rows = [(*self.columns, *self.curve.rates), *self.curve.rows(*self.columns.values())]
        found = table(rows, right=tuple(range(len(rows[0]))))
        return "\n".join([self.head, "", found, "", *sentences(self.curve, self.prompts, prices)])

    def as_data(self, prices: Prices | None) -> dict[str, Any]:
        return {
            **self.data,
            "prompt_tokens": self.prompts.prompt_tokens,
            "prefill_tokens_per_s": self.prompts.prefill_tokens_per_s,
            "gains": [asdict(one) for one in gains(self.curve, self.prompts, prices)],
        }
