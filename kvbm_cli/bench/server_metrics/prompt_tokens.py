"""Splits prompt tokens by the tier in which their blocks were found. Works on totals and on differences of totals."""

from __future__ import annotations

from collections.abc import Mapping

TIERS = ("g1", "g2", "g3", "g4", "computed")


def prompt_tokens_by_tier(counters: Mapping[str, float]) -> dict[str, int | None] | None:
    """Return the tokens of g1, g2, g3, g4 and computed; None if the engine reports no sources.

    g3 and g4 are None if the engine reports only that tokens were loaded, but not from where: g2 then has all of them.
    """
    if "external_tokens" in counters:
        return _from_external(counters)
    if "device_hit_tokens" in counters and "prompt_tokens" in counters:  # SGLang: by tier, without the computed tokens
        found = [round(counters.get(name, 0)) for name in ("device_hit_tokens", "host_hit_tokens", "disk_hit_tokens")]
        return dict(zip(TIERS, (*found, 0, max(0, round(counters["prompt_tokens"]) - sum(found))), strict=True))
    return None


def _from_external(counters: Mapping[str, float]) -> dict[str, int | None]:
    """vLLM and the embedded engine count each prompt token as found in G1, as loaded, or as computed."""
    external = round(counters["external_tokens"])
    disk = _disk_tokens(counters, external)
    g3 = None if disk is None else min(disk, external)
    g4 = None if g3 is None else min(_shared_tokens(counters, external), external - g3)
    g1, computed = (round(counters.get(name, 0)) for name in ("device_hit_tokens", "computed_tokens"))
    return {"g1": g1, "g2": external - (g3 or 0) - (g4 or 0), "g3": g3, "g4": g4, "computed": computed}


def _disk_tokens(counters: Mapping[str, float], external: int) -> int | None:
    """From kvbm's blocks if there are any, otherwise from vLLM's sources: these count a load that then fails, too."""
    if external == 0:
        return 0
    if loaded_blocks := counters.get("kvbm_onboard_blocks_h2d"):
        return round(external * counters.get("kvbm_onboard_blocks_d2d", 0) / loaded_blocks)
    if "disk_hit_tokens" in counters and not counters.get("other_hit_tokens"):
        return round(counters["disk_hit_tokens"])
    return None


def _shared_tokens(counters: Mapping[str, float], external: int) -> int:
    """Only kvbm's blocks tell the shared tier apart."""
    loaded_blocks = counters.get("kvbm_onboard_blocks_h2d")
    return round(external * counters.get("kvbm_onboard_blocks_o2d", 0) / loaded_blocks) if loaded_blocks else 0
