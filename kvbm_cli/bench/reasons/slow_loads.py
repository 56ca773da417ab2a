"""Causes for which blocks were found, but loading them took as long as computing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from kvbm_cli.bench.analysis.statistics import LEAST_COUNTS
from kvbm_cli.bench.analysis.ttft_model import TtftModel
from kvbm_cli.bench.reasons.cell_facts import CellFacts
from kvbm_cli.bench.reasons.why import Why, milliseconds, share
from kvbm_cli.bench.records.request_record import RequestRecord

# kvbm's own decisions count if it left most of the blocks that it found on disk.
MOST = 0.5

Pair = tuple[float, float]  # TTFT with the reference and with the measured arm, ms


def disk_slower(facts: CellFacts) -> Why | None:
    return _left_on_disk(facts) or _slow_disk_loads(facts)


def _left_on_disk(facts: CellFacts) -> Why | None:
    """kvbm computed blocks that were on disk, because it predicted or observed that reading takes longer."""
    arm = facts.measured
    names = ("kvbm_disk_declined_blocks", "kvbm_disk_late_blocks", "kvbm_onboard_blocks_d2d")
    declined, late, loaded = (arm.counter(name) or 0 for name in names)
    computed, total = arm.share_from("computed"), arm.prompt_token_count
    if not declined + late or computed is None or not total or not facts.block_size:
        return None
    # A request that waits looks up its blocks again, so a block may be declined several times.
    left = min((declined + late) * facts.block_size, round(computed * total))
    if left < facts.limits.gain * total or left < MOST * (left + loaded * facts.block_size):
        return None
    text = (
        f"the disk is slower than computing: kvbm loaded {loaded:,} blocks from it and left others there. It predicted "
        f"{declined:,} times that reading a block takes longer than computing it, and {late:,} reads took too long; "
        "set `tiers.disk.directory` to a faster drive (`kvbm doctor` measures it), or use a larger G2"
    )
    return Why("disk-slower", text, "tiers.disk.directory")


def _slow_disk_loads(facts: CellFacts) -> Why | None:
    """Return a reason if requests that loaded from disk were not faster than the same requests with the reference."""
    pairs = _pairs(facts, lambda record: bool(record.g3_tokens))
    if not _is_no_gain(facts, pairs):
        return None
    always = (facts.profile.get("onboard") or {}).get("policy") == "always"
    key = "onboard.policy" if always else "tiers.disk.directory"
    action = (
        "`onboard.policy: auto` computes them instead" if always else "set `tiers.disk.directory` to a faster drive"
    )
    text = f"loading from disk is no faster than computing: {_medians(facts, pairs)}{_per_token(facts, 'g3')}; {action}"
    return Why("disk-slower", text, key)


def host_slower(facts: CellFacts) -> Why | None:
    """Return a reason if requests that loaded from host memory only were not faster than the same requests with the
    reference."""
    pairs = _pairs(facts, lambda record: bool(record.g2_tokens) and not (record.g3_tokens or record.g4_tokens))
    if not _is_no_gain(facts, pairs):
        return None
    text = (
        f"loading from host memory is no faster than computing: {_medians(facts, pairs)}{_per_token(facts, 'g2')}; "
        "use longer common prefixes or a larger model"
    )
    return Why("host-slower", text, "--workload")


def _pairs(facts: CellFacts, is_wanted: Callable[[RequestRecord], bool]) -> list[Pair]:
    """Return times of the primary requests that the measured arm answered with tokens of the tier."""
    cell = facts.cell
    references = {
        (run.pair, one.key): one.ttft_ms
        for run in cell.of_arm(facts.reference.name)
        for one in cell.primary_records(run)
    }
    return [
        (reference_ms, one.ttft_ms)
        for run in cell.of_arm(facts.measured.name)
        for one in cell.primary_records(run)
        if is_wanted(one) and one.ttft_ms and (reference_ms := references.get((run.pair, one.key)))
    ]


def _is_no_gain(facts: CellFacts, pairs: Sequence[Pair]) -> bool:
    """Whether the typical request gained less than the margin, and there are enough requests for a median."""
    if len(pairs) < LEAST_COUNTS[50]:
        return False
    return median(reference / measured for reference, measured in pairs) < 1 + facts.limits.gain


def _medians(facts: CellFacts, pairs: Sequence[Pair]) -> str:
    reference, measured = (milliseconds(median(times)) for times in zip(*pairs, strict=True))
    return (
        f"the {len(pairs)} requests with such loads took {measured} with {facts.measured.name} and {reference} with "
        f"{facts.reference.name} (medians)"
    )


def _per_token(facts: CellFacts, tier: str) -> str:
    """Return the costs by the TTFT model, if it exists and explains the same."""
    model = facts.ttft_model
    if not isinstance(model, TtftModel):
        return ""
    cost = model.g2_ms_per_token if tier == "g2" else model.g3_ms_per_token
    if cost is None:
        return ""
    return (
        f"; a token loaded takes {1e3 * cost:.0f} µs, a token computed {1e3 * model.computed_ms_per_token:.0f} µs "
        f"({share(model.explained)} of the variance of TTFT)"
    )
