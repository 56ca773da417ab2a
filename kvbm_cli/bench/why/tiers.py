"""Causes in the tiers: blocks that were needed again were in no tier, or loading them took as long as computing them.

Blocks are lost because they were never copied, filtered, or evicted too early. Each such cause requires that kvbm
loaded less than `FEW` of the prompt tokens that G1 did not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvbm.config.engine import ENGINES
from kvbm.config.sizes import UNITS, parse_size
from kvbm_cli.bench.judge.estimates import TtftModel
from kvbm_cli.bench.judge.paired import LEAST_COUNTS
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.why.facts import CellFacts, Why, share
from kvbm_cli.terminal.quantities import shown_ms

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
Pair = tuple[float, float]  # TTFT with the reference and with the measured arm, ms


def lost_blocks(facts: CellFacts) -> list[Why]:
    """All causes that apply, the one with the most blocks first."""
    if (facts.missed_share or 0.0) < facts.limits.margin or facts.saved_share is None or facts.saved_share >= FEW:
        return []
    filtered = _filtered_from_disk(facts) or _filtered_by_priority(facts)
    found = [_g2_too_small(facts), filtered, _skipped(facts), _disk_off(facts), _shared_off(facts)]
    return [why for _, why in sorted((one for one in found if one), key=lambda one: -one[0])]


def small_g2(facts: CellFacts) -> str | None:
    """Return a caveat on a run that paid although G2 does not hold its working set."""
    needed, g2_tokens = facts.cell.plan.working_set_tokens, facts.g2_tokens
    if g2_tokens is None or g2_tokens >= needed:
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
    arm, needed, g2_tokens = facts.measured, facts.cell.plan.working_set_tokens, facts.g2_tokens
    evicted, copied = arm.counter("kvbm_evicted_blocks"), arm.counter("kvbm_offload_blocks_d2h")
    if g2_tokens is None or g2_tokens >= needed or not evicted or not copied:
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
    raise_limits = f"raise `transfer.max_concurrent`{now} or `tiers.host.capacity`"
    evicted = "the engine evicted them before their copy had ended"
    busy = "host memory was full or too many copies were in flight"
    at_once = "`offload.to_host: always` copies blocks when they are computed"
    to_host = (facts.profile.get("offload") or {}).get("to_host")
    if to_host == "on_evict":
        reason, action, key = evicted, at_once, "offload.to_host"
    elif to_host == "auto" and _shows_evictions(facts):
        action = f"{at_once}; if `auto` did so (`kvbm_info` has its choice), {raise_limits}"
        reason, key = f"{evicted}, {busy}", "offload.to_host"
    else:
        reason, action, key = busy, raise_limits, "transfer.max_concurrent"
    text = (
        f"{lost:,} of {lost + copied:,} blocks were not copied to host memory: {skipped:,} because {reason}, "
        f"{failed:,} because the copy failed. {_saved(facts)}; {action}"
    )
    return lost, Why("offload-skipped", text, key)


def _shows_evictions(facts: CellFacts) -> bool:
    """Whether `auto` may have copied blocks when the engine evicted them. Results do not have its choice."""
    engine = ENGINES.get((facts.profile.get("engine") or {}).get("kind", ""))
    return engine is not None and engine.shows_evictions


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


# kvbm's own decisions count if it left most of the blocks that it found on disk.


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
    if left < facts.limits.margin * total or left < MOST * (left + loaded * facts.block_size):
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
    return median(reference / measured for reference, measured in pairs) < 1 + facts.limits.margin


def _medians(facts: CellFacts, pairs: Sequence[Pair]) -> str:
    reference, measured = (shown_ms(median(times)) for times in zip(*pairs, strict=True))
    return (
        f"the {len(pairs)} requests with such loads took {measured} with {facts.measured.name} and {reference} with "
        f"{facts.reference.name} (medians)"
    )


def _per_token(facts: CellFacts, tier: str) -> str:
    """Return the costs by the TTFT model, if it exists and explains the same."""
    model = facts.compared.ttft_model
    if not isinstance(model, TtftModel):
        return ""
    cost, computed = model.ms_per_token[tier], model.ms_per_token["computed"]
    if cost is None or computed is None:
        return ""
    return (
        f"; a token loaded takes {1e3 * cost:.0f} µs, a token computed {1e3 * computed:.0f} µs "
        f"({share(model.explained)} of the variance of TTFT)"
    )
