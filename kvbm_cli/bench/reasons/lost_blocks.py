"""Causes for which blocks that were needed again were in no tier: never copied, filtered, or evicted too early.

Each requires that kvbm loaded less than `FEW` of the prompt tokens that G1 did not hold.
"""

from __future__ import annotations

import math
from typing import Any

from kvbm.config.sizes import UNITS, parse_size
from kvbm_cli.bench.reasons.cell_facts import CellFacts
from kvbm_cli.bench.reasons.why import Why, share

# Below half, more of the possible gain was lost than made.
FEW = 0.5
# A tier evicts too early if most of the blocks that it got were evicted during the run.
CHURN = 0.5
# The frequency filter decides the result if it rejects most blocks.
MOST = 0.5
# A hit ends at the first block that is missing, so few missing blocks lose many others.
SKIPPED = 0.2
# Room for the answers, and for the last blocks of prompts, which are not part of the working set.
ROOM = 1.25
MIB = UNITS["MiB"]


def lost_blocks(facts: CellFacts) -> list[Why]:
    """All causes that apply, the one with the most blocks first."""
    if (facts.missed_share or 0.0) < facts.limits.gain or facts.saved_share is None or facts.saved_share >= FEW:
        return []
    found = [_g2_too_small(facts), _filtered(facts), _skipped(facts), _disk_off(facts), _shared_off(facts)]
    return [why for _, why in sorted((one for one in found if one), key=lambda one: -one[0])]


def small_g2(facts: CellFacts) -> str | None:
    """Return a caveat on a run that paid although G2 does not hold its working set."""
    needed, g2_tokens = facts.working_set_tokens, facts.g2_tokens
    if needed is None or g2_tokens is None or g2_tokens >= needed:
        return None
    return f"G2 holds {g2_tokens:,} tokens, less than the working set of {needed:,}"


def kvbm_off(facts: CellFacts) -> Why | None:
    """kvbm turned itself off, so the engine ran without it."""
    runs = facts.measured.runs_with("kvbm_disabled")
    if not runs:
        return None
    text = (
        f"kvbm turned itself off in {len(runs)} of {len(facts.measured.summary['runs'])} runs (`kvbm_disabled` is 1), "
        f"so the engine continued without it; runs/{runs[0]}/engine.log has the cause"
    )
    return Why("kvbm-off", text)


def _saved(facts: CellFacts) -> str:
    name, saved, missed = facts.measured.name, facts.saved_share or 0.0, facts.missed_share or 0.0
    return f"{name} loaded {share(saved)} of the tokens that it could have saved ({share(missed)} of all prompt tokens)"


def _g2_too_small(facts: CellFacts) -> tuple[int, Why] | None:
    arm, needed, g2_tokens = facts.measured, facts.working_set_tokens, facts.g2_tokens
    evicted, copied = arm.counter("kvbm_evicted_blocks"), arm.counter("kvbm_offload_blocks_d2h")
    if needed is None or g2_tokens is None or g2_tokens >= needed or not evicted or not copied:
        return None
    received = copied + (arm.counter("kvbm_disk_fetched_blocks") or 0)
    if evicted < CHURN * received:
        return None
    of_g1 = f", G1 {facts.g1_tokens:,}" if facts.g1_tokens else ""
    key, value = _enough_host_memory(facts, g2_tokens, needed)
    text = (
        f"G2 is too small: it holds {g2_tokens:,} tokens{of_g1}, and the working set is {needed:,}. It evicted "
        f"{evicted:,} of the {received:,} blocks that it got, and {_saved(facts)}; `{key}: {value}` would hold them"
    )
    return evicted, Why("g2-too-small", text, key)


def _enough_host_memory(facts: CellFacts, g2_tokens: int, needed: int) -> tuple[str, str]:
    """Return the key that sets the size of G2, and a value with room for the working set."""
    host: dict[str, Any] = (facts.profile.get("tiers") or {}).get("host") or {}
    wanted_tokens = ROOM * needed
    if host.get("blocks") or not host.get("capacity"):
        return "tiers.host.blocks", f"{math.ceil(wanted_tokens / (facts.block_size or 1))}"
    wanted_bytes = parse_size(host["capacity"]) / g2_tokens * wanted_tokens
    return "tiers.host.capacity", f"{math.ceil(wanted_bytes / MIB)}MiB"


def _filtered(facts: CellFacts) -> tuple[int, Why] | None:
    """Blocks that never got to a lower tier, because an offload filter of the profile keeps them out."""
    return _filtered_from_disk(facts) or _filtered_by_priority(facts)


def _filtered_from_disk(facts: CellFacts) -> tuple[int, Why] | None:
    arm, offload = facts.measured, facts.profile.get("offload") or {}
    rejected, admitted, evicted = (
        arm.counter(name)
        for name in ("kvbm_disk_filter_rejected_blocks", "kvbm_disk_filter_admitted_blocks", "kvbm_evicted_blocks")
    )
    if not rejected or admitted is None or not evicted or offload.get("to_disk") != "frequency":
        return None
    if rejected < MOST * (rejected + admitted):
        return None
    text = (
        f"`offload.to_disk: frequency` with `offload.frequency_threshold: {offload['frequency_threshold']}` kept "
        f"blocks from disk: it rejected {rejected:,} and admitted {admitted:,}, and G2 evicted {evicted:,}. "
        f"{_saved(facts)}; `offload.to_disk: on_evict` writes every block that G2 evicts"
    )
    return rejected, Why("filtered", text, "offload.to_disk")


def _filtered_by_priority(facts: CellFacts) -> tuple[int, Why] | None:
    arm, least = facts.measured, (facts.profile.get("offload") or {}).get("min_priority") or 0
    copied, computed = arm.counter("kvbm_offload_blocks_d2h"), _computed_blocks(facts)
    skipped, failed = arm.counter("kvbm_offload_skipped_blocks") or 0, arm.counter("kvbm_offload_failed_blocks") or 0
    if not least or copied is None or computed is None:
        return None
    left_out = computed - copied - skipped - failed
    if left_out < MOST * computed:
        return None
    text = (
        f"`offload.min_priority: {least}` kept blocks from host memory: kvbm copied {copied:,} of the {computed:,} "
        f"computed blocks. {_saved(facts)}; a lower value copies more blocks, 0 copies all"
    )
    return left_out, Why("filtered", text, "offload.min_priority")


def _computed_blocks(facts: CellFacts) -> int | None:
    tokens, block_size = facts.measured.summary["prompt_tokens"]["computed"], facts.block_size
    return None if tokens is None or not block_size else tokens // block_size


def _skipped(facts: CellFacts) -> tuple[int, Why] | None:
    arm = facts.measured
    counts = [arm.counter(f"kvbm_offload_{name}") for name in ("skipped_blocks", "failed_blocks", "blocks_d2h")]
    skipped, failed, copied = (count or 0 for count in counts)
    lost = skipped + failed
    if not lost or lost < SKIPPED * (lost + copied):
        return None
    limit = (facts.profile.get("transfer") or {}).get("max_concurrent")
    now = "" if limit is None else f" (now {limit})"
    text = (
        f"{lost:,} of {lost + copied:,} computed blocks were not copied to host memory: {skipped:,} because it was "
        f"full or too many copies were in flight, {failed:,} because the copy failed. {_saved(facts)}; raise "
        f"`transfer.max_concurrent`{now} or `tiers.host.capacity`"
    )
    return lost, Why("offload-skipped", text, "transfer.max_concurrent")


def _disk_off(facts: CellFacts) -> tuple[int, Why] | None:
    if not facts.measured.runs_with("kvbm_disk_off"):
        return None
    failed = facts.measured.counter("kvbm_disk_failed_blocks") or 0
    text = (
        f"kvbm turned the disk tier off (`kvbm_disk_off` is 1): {failed:,} blocks could not be written or read. "
        f"{_saved(facts)}; `kvbm doctor` tests `tiers.disk.directory`"
    )
    return failed, Why("disk-off", text, "tiers.disk.directory")


def _shared_off(facts: CellFacts) -> tuple[int, Why] | None:
    runs = facts.measured.runs_with("kvbm_shared_off")
    if not runs:
        return None
    failed = facts.measured.counter("kvbm_shared_failed_requests") or 0
    text = (
        f"kvbm turned the shared tier off in {len(runs)} of {len(facts.measured.summary['runs'])} runs "
        f"(`kvbm_shared_off` is 1): {failed:,} requests to its store failed or were not answered in time. "
        f"{_saved(facts)}; runs/{runs[0]}/engine.log has the cause, `kvbm doctor --url` tests `tiers.shared.url`"
    )
    return failed, Why("shared-off", text, "tiers.shared.url")
