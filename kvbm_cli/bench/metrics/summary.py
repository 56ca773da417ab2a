"""Summary of server-metrics.jsonl: what the engine did between its first and its last sample.

A counter that a page has not exported yet counts as 0 at the start, because series appear with their first event. After
a restart of the engine no difference is known. docs/reference/server-metrics.md describes every field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.metrics.engine_metrics import (
    KVBM_COUNTERS,
    KVBM_STATES,
    QUANTITIES,
    WRITE_AMPLIFICATION,
    SampleLine,
    prompt_tokens_by_tier,
)
from kvbm_cli.bench.result.directory import json_lines
from kvbm_cli.bench.result.results import TIERS

PAIRS = ("g2_to_g1", "g1_to_g2", "g3_to_g2", "g2_to_g3", "g4_to_g2", "g2_to_g4")
PEAKS = ("running", "waiting", "kv_usage")
WHOLE = ("blocks", "bytes")


def summarise(path: Path, *, has_pages: bool = True) -> dict[str, Any]:
    """Raise UsageError if the file cannot be read, has no complete line, or is not one of a sampler.

    Without `has_pages`, the engine is known to have no metrics, which is then no caveat.
    """
    return summary_of(read_samples(path), has_pages=has_pages)


def read_samples(path: Path) -> list[SampleLine]:
    """Read all samples. Ignores a last line that is incomplete, because the sampler may have been killed."""
    samples = [_sample(line, f"{path}:{number}") for number, line in enumerate(json_lines(path), start=1)]
    if not samples:
        raise UsageError(f"`{path}` has no complete line; a sampler writes at least one")
    return samples


def summary_of(samples: Sequence[SampleLine], *, has_pages: bool = True) -> dict[str, Any]:
    """Return differences between the first and the last sample, and peaks. None if the engine does not report it.

    `prompt_tokens` has g1 to g4 and computed; `hit_shares` the share of each tier, 0 to 1. `transfers` has blocks,
    bytes, seconds and gb_per_s by pair of tiers. `disk` is what the engine's processes read and wrote. `engine` has the
    sizes of the engine. `kvbm_counters` has every kvbm_* counter by its name, `kvbm_states` every 0 or 1.
    """
    answered = [sample for sample in samples if sample.counters]
    has_restarted = _has_restarted(answered)
    counters = {} if has_restarted else _changes(answered)
    facts = {name: value for sample in answered for name, value in sample.facts.items()}
    tokens = prompt_tokens_by_tier(counters)
    requests = counters.get("requests")
    process = _process_changes(samples)
    gpu = _gpu(samples)
    states = [sample.gauges for sample in answered]
    energy = [one["energy_j"] for one in gpu]
    return {
        "samples": len(samples),
        "failed_samples": sum(sample.error is not None for sample in samples),
        "first_ms": answered[0].t_ms if answered else None,
        "last_ms": answered[-1].t_ms if answered else None,
        "requests": _whole(requests),
        "prompt_tokens": tokens,
        "hit_shares": _shares(tokens),
        "external_hit_share": _ratio(counters.get("external_found_tokens"), counters.get("external_queried_tokens")),
        "queue_wait_ms": _ratio(counters.get("queue_wait_s"), counters.get("queue_waits"), 1e3),
        "preemptions": _whole(counters.get("preemptions")),
        "evictions": _whole(counters.get("evictions")),
        "transfers": {pair: _transfer(pair, counters) for pair in PAIRS},
        "disk": _disk(process, requests),
        "peaks": {
            **{name: _peak(sample.process.get(name) for sample in samples) for name in ("rss_bytes", "shared_bytes")},
            **{name: _peak(gauges.get(name) for gauges in states) for name in PEAKS},
        },
        "cpu_s": process["cpu_s"],
        "gpu": gpu,
        "energy_j": sum(value for value in energy if value) if energy and None not in energy else None,
        "kvbm_counters": {name: counters[name] for name in KVBM_COUNTERS if name in counters},
        "kvbm_states": {
            name: value
            for name in (*KVBM_STATES, WRITE_AMPLIFICATION)
            if (value := _peak(gauges.get(name) for gauges in states)) is not None
        },
        "engine": facts,
        "caveats": list(_caveats(samples, answered, has_restarted, process, has_pages=has_pages)),
    }


def _sample(line: Mapping[str, Any], where: str) -> SampleLine:
    try:
        return SampleLine.from_json(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{where}: not a sample of server metrics: {reason}") from None


def _has_restarted(samples: Sequence[SampleLine]) -> bool:
    """Whether the start time changed, or a counter fell. Compares only samples that lack the same page: two pages may
    count the same events with a different delay."""
    if len({sample.started_s for sample in samples if sample.started_s is not None}) > 1:
        return True
    last_by_error: dict[str | None, dict[str, float]] = {}
    for sample in samples:
        last = last_by_error.setdefault(sample.error, {})
        if any(value < last.get(name, value) for name, value in sample.counters.items()):
            return True
        last |= sample.counters
    return False


def _changes(samples: Sequence[SampleLine]) -> dict[str, float]:
    """Empty with fewer than two samples: one sample has no difference.

    A counter that is missing before the first sample in which all pages answered was not known; later, it was 0.
    """
    if len(samples) < 2:
        return {}
    first: dict[str, float] = {}
    for sample in samples:
        first = {**sample.counters, **first}
        if sample.error is None:
            break
    last: dict[str, float] = {}
    for sample in samples:
        last |= sample.counters
    return {name: value - first.get(name, 0.0) for name, value in last.items()}


def _process_changes(samples: Sequence[SampleLine]) -> dict[str, float | None]:
    """Return the changes of CPU time and disk traffic; None if unknown, or if a process took its share when ending."""
    changes: dict[str, float | None] = {}
    for name in ("cpu_s", "read_bytes", "written_bytes"):
        values = [value for sample in samples if (value := sample.process.get(name)) is not None]
        changes[name] = values[-1] - values[0] if len(values) > 1 and values[-1] >= values[0] else None
    return changes


def _disk(process: dict[str, float | None], requests: float | None) -> dict[str, float | None]:
    found = {name: process[name] for name in ("read_bytes", "written_bytes")}
    return {**found, **{f"{name}_per_1000_requests": _ratio(value, requests, 1e3) for name, value in found.items()}}


def _transfer(pair: str, changes: Mapping[str, float]) -> dict[str, float | None]:
    values = {quantity: changes.get(f"{pair}_{quantity}") for quantity in QUANTITIES}
    whole = {name: _whole(value) if name in WHOLE else value for name, value in values.items()}
    return {**whole, "gb_per_s": _ratio(values["bytes"], values["seconds"], 1e-9)}


def _gpu(samples: Sequence[SampleLine]) -> list[dict[str, float | int | None]]:
    """Peak memory, mean utilisation and energy of every GPU."""
    series: dict[int, list[dict[str, float | int | None]]] = {}
    for sample in samples:
        for entry in sample.gpu:
            series.setdefault(int(entry["index"] or 0), []).append(dict(entry))
    return [_one_gpu(index, entries) for index, entries in sorted(series.items())]


def _one_gpu(index: int, entries: Sequence[dict[str, float | int | None]]) -> dict[str, float | int | None]:
    rates = [value for entry in entries if (value := entry["utilisation"]) is not None]
    energy = [value for entry in entries if (value := entry["energy_j"]) is not None]
    return {
        "index": index,
        "mean_utilisation": sum(rates) / len(rates) if rates else None,
        "peak_memory_bytes": _peak(entry["memory_bytes"] for entry in entries),
        "energy_j": energy[-1] - energy[0] if len(energy) > 1 and energy[-1] >= energy[0] else None,
    }


def _shares(tokens: dict[str, int | None] | None) -> dict[str, float | None] | None:
    if tokens is None:
        return None
    total = sum(count or 0 for count in tokens.values())
    return {tier: _ratio(tokens[tier], total) for tier in TIERS[:-1]}


def _caveats(
    samples: Sequence[SampleLine],
    answered: Sequence[SampleLine],
    has_restarted: bool,
    process: dict[str, float | None],
    *,
    has_pages: bool,
) -> Iterable[str]:
    failed = [sample for sample in samples if sample.error is not None]
    if failed:
        yield f"{len(failed)} of {len(samples)} samples of server metrics failed; the first: {failed[0].error}"
    if not answered and has_pages:
        yield "the server reported no metrics"
    elif len(answered) == 1:
        yield "the server reported metrics only once, so no difference is known"
    if has_restarted:
        yield "the engine was restarted during the run, so no difference of its counters is known"
    if answered and answered[0] is not samples[0]:
        yield f"the server's counters before {answered[0].t_ms / 1e3:.1f} s are not known"
    if answered and answered[-1] is not samples[-1]:
        yield f"the server's counters after {answered[-1].t_ms / 1e3:.1f} s are not known"
    if process["cpu_s"] is None and any(sample.process.get("cpu_s") is not None for sample in samples):
        yield "a process of the engine ended during the run, so its CPU time is not known"


def _ratio(part: float | None, whole: float | None, factor: float = 1.0) -> float | None:
    return factor * part / whole if part is not None and whole else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _peak(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
