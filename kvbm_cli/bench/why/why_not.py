"""Lists why kvbm did not pay, most likely first. A cause is reported only if its numbers are known and beyond a limit.

invalid       the machine or the load; why no block was loaded, if the verdict is about that
same, slower  first what makes the run useless, then what leaves nothing to gain, what lost the blocks, what made the
inconclusive  loads slow; noise if there is no other cause; without any, one sentence with the main numbers

The causes here are those that no cache below G1 could have helped, and those in the run itself: a busy machine, the
load on the engine, and noise. `tiers` has the causes in the tiers.
"""

from __future__ import annotations

from kvbm_cli.bench.judge.paired import is_tight
from kvbm_cli.bench.judge.verdict import LONGER_TIMES, Verdict
from kvbm_cli.bench.why.facts import ArmFacts, CellFacts, Why, share
from kvbm_cli.bench.why.tiers import disk_slower, host_slower, kvbm_off, lost_blocks
from kvbm_cli.bench.workload.schema import KINDS
from kvbm_cli.terminal.quantities import counted, shown_ms

# The part of the reusable tokens that G1 must have found. It is below 1, because requests that run at the same time
# cannot reuse each other's blocks, however large G1 is.
G1_FINDS = 0.9
PRESSURE = 2
# An engine that computes half of the time has short queues: it is the default of `schedule.target_utilisation`.
COMFORTABLE = 0.5


def why_not(facts: CellFacts) -> list[Why]:
    """Empty if kvbm paid, or if its answers were wrong."""
    verdict = facts.compared.judgement.verdict
    if verdict not in (Verdict.SAME, Verdict.SLOWER, Verdict.INVALID, Verdict.INCONCLUSIVE):
        return []
    found = _known(machine_busy(facts), overloaded(facts))
    if any(arm.summary["errors"] for arm in (facts.reference, facts.measured)):
        return found  # the verdict names the failed requests; tokens of the others say little
    if verdict is Verdict.INVALID:
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


def no_reuse(facts: CellFacts) -> Why | None:
    """Prompts repeat so little that computing less cannot shorten TTFT by the margin of the verdict."""
    reuse, least = facts.reuse, facts.limits.margin
    if reuse is None or reuse.repeated_share >= least:
        return None
    text = (
        f"prompts repeat {share(reuse.repeated_share)} of their tokens ({reuse.repeated_tokens:,} of "
        f"{reuse.prompt_tokens:,}), so a cache cannot save work{_tax(facts)}; choose a `--workload` whose prompts "
        "begin alike"
    )
    return Why("no-reuse", text, "--workload")


def _tax(facts: CellFacts) -> str:
    ratio = facts.compared.ratio
    if ratio is None:
        return ""
    low, high = ratio.low, ratio.high
    interval = (
        f" (95% interval {1 / high - 1:+.1%} to {1 / low - 1:+.1%})" if low > 0 and ratio.session_count > 1 else ""
    )
    return f". With {facts.measured.name}, TTFT changed by {1 / ratio.ratio - 1:+.1%}{interval}: its cost, and noise"


def short_prefixes(facts: CellFacts) -> Why | None:
    """Prompts repeat tokens, but few whole blocks, and only whole blocks are cached."""
    reuse, least = facts.reuse, facts.limits.margin
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
    if reachable is None or found is None or reachable < facts.limits.margin or found < G1_FINDS * reachable:
        return None
    name, needed, g1_tokens = facts.reference.name, facts.cell.plan.working_set_tokens, facts.g1_tokens
    sizes = ""
    if g1_tokens is not None:
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
    kind = KINDS.get(facts.cell.kind)
    scale_key = kind.scale_key if kind else None
    if scale_key is None:
        return "measure a workload with a larger working set", "--workload"
    return f"`--pressure {PRESSURE}` raises `{scale_key}` until the working set is {PRESSURE} times G1", "--pressure"


def small_prefill(facts: CellFacts) -> Why | None:
    """Even the floor, whose G1 holds everything, is not faster by the margin of the verdict."""
    floor = facts.floor.summary["ttft_ms"]["p50"] if facts.floor else None
    reference = facts.reference.summary["ttft_ms"]["p50"]
    if floor is None or not reference or 1 - floor / reference >= facts.limits.margin:
        return None
    text = (
        f"there is little to gain: with a G1 that holds everything (the floor), the median TTFT is "
        f"{shown_ms(floor)} instead of {shown_ms(reference)}; use longer prompts or a larger model"
    )
    return Why("small-prefill", text, "--workload")


def machine_busy(facts: CellFacts) -> Why | None:
    """Return a reason if the load client did not get a core in time. Requests that it launched late are a reason of the
    verdict itself."""
    most_ms = facts.limits.most_late_ms(facts.compared.medians_ms[1])
    runs = [run for arm in (facts.reference, facts.measured) for run in facts.cell.of_arm(arm.name)]
    lag_ms = max(run.client["loop_lag_p99_ms"] or 0.0 for run in runs)
    is_client = max(run.client["cpu_share"] for run in runs) > facts.limits.client_cpu_share  # the verdict says it
    if lag_ms <= most_ms or is_client:
        return None
    text = (
        f"the machine was busy: the event loop of the load client lagged {lag_ms:.0f} ms (p99), the limit is "
        f"{most_ms:.0f} ms; repeat the run on an idle machine"
    )
    return Why("machine-busy", text, None)


def overloaded(facts: CellFacts) -> Why | None:
    """TTFT was mostly waiting. In a closed loop a busy engine is normal, so there only a queue in both arms counts."""
    limits, arms = facts.limits, (facts.reference, facts.measured)
    queues = [arm.queue_share or 0.0 for arm in arms]
    if facts.cell.plan.is_closed_loop:
        is_overloaded = min(queues) > limits.collapse_queue_share
    else:
        busy = facts.reference.summary["utilisation"] or 0.0
        is_overloaded = busy > limits.collapse_utilisation or queues[0] > limits.collapse_queue_share
    if not is_overloaded:
        return None
    action, key = _less_load(facts)
    return Why("overloaded", f"the engine could not keep up: {'; '.join(map(_load, arms))}; {action}", key)


def _load(arm: ArmFacts) -> str:
    busy, queue = arm.summary["utilisation"], arm.queue_share
    queued = "its queue is unknown" if queue is None else f"{share(queue)} of its TTFT was spent in its queue"
    return f"{arm.name} was busy {share(busy or 0.0)} of the time, and {queued}"


def _less_load(facts: CellFacts) -> tuple[str, str]:
    if facts.cell.plan.is_closed_loop:
        return "use a lower `--concurrency`", "--concurrency"
    if facts.cell.kind == "trace":
        return LONGER_TIMES, "time_scale"
    rate = facts.reference.summary["throughput"]["requests_per_s"]
    if not rate:
        return "use a lower `--rate`", "--rate"
    text = (
        f"{facts.reference.name} answered {rate:.2g} requests per second, so `--rate {COMFORTABLE * rate:.2g}` leaves "
        "it idle about half of the time"
    )
    return text, "--rate"


def noisy(facts: CellFacts) -> Why | None:
    """Return a reason if the interval shows neither a difference of the margin nor that there is none."""
    ratio, margin = facts.compared.ratio, facts.limits.margin
    if facts.compared.judgement.verdict is not Verdict.INCONCLUSIVE or ratio is None or ratio.session_count < 2:
        return None
    noise = facts.compared.noise
    own = "" if noise is None else f", and two runs of {facts.reference.name} itself differ by {noise.ratio - 1:.0%}"
    interval = f"the 95% interval is {ratio.low:.2f} to {ratio.high:.2f}"
    if is_tight(ratio):
        text = f"the difference is close to the limit of {margin:.0%}, so more pairs would rarely decide: {interval}"
        return Why("noise", text, None)
    text = (
        f"the run cannot show a gain of {margin:.0%}: {interval} after {counted(ratio.run_count, 'run')} of each arm"
        f"{own}; raise `--pairs`, on an idle machine"
    )
    return Why("noise", text, "--pairs")
