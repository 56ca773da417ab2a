"""Causes for which no cache below G1 could have helped."""

from __future__ import annotations

from kvbm_cli.bench.reasons.cell_facts import CellFacts
from kvbm_cli.bench.reasons.why import Why, milliseconds, share
from kvbm_cli.workload.schema import KINDS

# The part of the reusable tokens that G1 must have found. It is below 1, because requests that run at the same time
# cannot reuse each other's blocks, however large G1 is.
G1_FINDS = 0.9
PRESSURE = 2


def no_reuse(facts: CellFacts) -> Why | None:
    """Prompts repeat so little that computing less cannot shorten TTFT by the margin of the verdict."""
    reuse, least = facts.reuse, facts.limits.gain
    if reuse is None or reuse.repeated_share >= least:
        return None
    text = (
        f"prompts repeat {share(reuse.repeated_share)} of their tokens ({reuse.repeated_tokens:,} of "
        f"{reuse.prompt_tokens:,}), so a cache cannot save work{_tax(facts)}; choose a `--workload` whose prompts "
        "begin alike"
    )
    return Why("no-reuse", text, "--workload")


def _tax(facts: CellFacts) -> str:
    ratio = facts.ratio
    if ratio is None:
        return ""
    low, high = ratio.low, ratio.high
    interval = (
        f" (95% interval {1 / high - 1:+.1%} to {1 / low - 1:+.1%})" if low > 0 and ratio.session_count > 1 else ""
    )
    return f". With {facts.measured.name}, TTFT changed by {1 / ratio.ratio - 1:+.1%}{interval}: its cost, and noise"


def short_prefixes(facts: CellFacts) -> Why | None:
    """Prompts repeat tokens, but few whole blocks, and only whole blocks are cached."""
    reuse, least = facts.reuse, facts.limits.gain
    if reuse is None or reuse.repeated_share < least or reuse.block_share >= least:
        return None
    text = (
        f"prompts repeat {share(reuse.repeated_share)} of their tokens, but only {share(reuse.block_share)} in whole "
        f"blocks of {facts.block_size} tokens, and only whole blocks are cached; use longer common prefixes"
    )
    return Why("short-prefixes", text, "--workload")


def fits_g1(facts: CellFacts) -> Why | None:
    """Return a reason if the reference found nearly everything that repeats in its own G1."""
    reachable, found = facts.reachable_share, facts.reference.share_from("g1")
    if reachable is None or found is None or reachable < facts.limits.gain or found < G1_FINDS * reachable:
        return None
    name, needed, g1_tokens = facts.reference.name, facts.working_set_tokens, facts.g1_tokens
    sizes = ""
    if needed is not None and g1_tokens is not None:
        how = "fits into" if needed <= g1_tokens else "is larger than"
        joint = ": " if needed <= g1_tokens else ", although "
        sizes = f"{joint}the working set of {needed:,} tokens {how} G1 ({g1_tokens:,} tokens)"
    action, key = _more_pressure(facts)
    text = (
        f"{name} found {share(found)} of all prompt tokens in its own G1, and only {share(reachable)} repeat{sizes}; "
        f"{action}"
    )
    return Why("fits-g1", text, key)


def _more_pressure(facts: CellFacts) -> tuple[str, str]:
    kind = KINDS.get(facts.workload["kind"])
    scale_key = kind.scale_key if kind else None
    if scale_key is None:
        return "measure a workload with a larger working set", "--workload"
    return f"`--pressure {PRESSURE}` raises `{scale_key}` until the working set is {PRESSURE} times G1", "--pressure"


def small_prefill(facts: CellFacts) -> Why | None:
    """Even the floor, whose G1 holds everything, is not faster by the margin of the verdict."""
    floor = facts.floor.median_ms if facts.floor else None
    reference = facts.reference.median_ms
    if floor is None or not reference or 1 - floor / reference >= facts.limits.gain:
        return None
    text = (
        f"there is little to gain: with a G1 that holds everything (the floor), the median TTFT is "
        f"{milliseconds(floor)} instead of {milliseconds(reference)}; use longer prompts or a larger model"
    )
    return Why("small-prefill", text, "--workload")
