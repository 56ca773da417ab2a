"""Lists why kvbm did not pay, most likely first. A cause is reported only if its numbers are known and beyond a limit.

invalid     the client or the load; why no block was loaded, if the verdict is about that
same        first what makes the run useless, then what leaves nothing to gain, what lost the blocks, what made the
slower      loads slow; noise if there is no other cause; without any, one sentence with the main numbers
"""

from __future__ import annotations

from kvbm_cli.bench.reasons.cell_facts import ArmFacts, CellFacts
from kvbm_cli.bench.reasons.lost_blocks import kvbm_off, lost_blocks
from kvbm_cli.bench.reasons.nothing_to_gain import fits_g1, no_reuse, short_prefixes, small_prefill
from kvbm_cli.bench.reasons.run_quality import client_limited, noisy, overloaded
from kvbm_cli.bench.reasons.slow_loads import disk_slower, host_slower
from kvbm_cli.bench.reasons.why import Why, share

SAME, SLOWER, INVALID = "same", "slower", "invalid"


def why_not(facts: CellFacts) -> list[Why]:
    """Empty if kvbm paid, or if its answers were wrong."""
    if facts.verdict not in (SAME, SLOWER, INVALID):
        return []
    found = _known(client_limited(facts), overloaded(facts))
    if any(arm.summary["errors"] for arm in (facts.reference, facts.measured)):
        return found  # the verdict names the failed requests; tokens of the others say little
    if facts.verdict == INVALID:
        return [*found, *_nothing_to_find(facts), *lost_blocks(facts)]
    found += [*_nothing_to_find(facts), *_known(disk_slower(facts)), *lost_blocks(facts), *_known(host_slower(facts))]
    if not _has(found, "fits-g1", "no-reuse", "short-prefixes"):
        found += _known(small_prefill(facts))
    return found or _known(noisy(facts)) or [_unknown(facts)]


def _nothing_to_find(facts: CellFacts) -> list[Why]:
    return _known(kvbm_off(facts), no_reuse(facts), short_prefixes(facts), fits_g1(facts))


def _known(*causes: Why | None) -> list[Why]:
    return [cause for cause in causes if cause is not None]


def _has(found: list[Why], *causes: str) -> bool:
    return any(why.cause in causes for why in found)


def _unknown(facts: CellFacts) -> Why:
    parts = [_sources(arm) for arm in (facts.reference, facts.measured)]
    reach = facts.reachable_share
    repeat = "" if reach is None else f"; {share(reach)} of the prompt tokens repeat"
    return Why("unknown", f"no known cause fits the numbers of this run: {'; '.join(parts)}{repeat}")


def _sources(arm: ArmFacts) -> str:
    shares = {place: arm.share_from(tier) for place, tier in (("G1", "g1"), ("G2", "g2"), ("G3", "g3"))}
    if any(value is None for value in shares.values()):
        return f"{arm.name} does not report where its prompt tokens came from"
    if (shared := arm.share_from("g4")) is not None and shared > 0:
        shares["G4"] = shared
    found = ", ".join(f"{share(value or 0.0)} in {place}" for place, value in shares.items())
    return f"{arm.name} found {found} of its prompt tokens"
