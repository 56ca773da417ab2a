"""Causes in the run itself: the load client, the load on the engine, and noise."""

from __future__ import annotations

import math

from kvbm_cli.bench.reasons.cell_facts import ArmFacts, CellFacts
from kvbm_cli.bench.reasons.why import Why, share
from kvbm_cli.bench.verdicts.verdict import LONGER_TIMES

# An engine that computes half of the time has short queues: it is the default of `schedule.target_utilisation`.
COMFORTABLE = 0.5
SAME = "same"


def client_limited(facts: CellFacts) -> Why | None:
    """Return a reason if the client was late, busy, or too slow to take its own times, by the limits of the verdict."""
    limits, cell = facts.limits, facts.cell
    clients = [run.client for arm in (facts.reference, facts.measured) for run in cell.of_arm(arm.name)]
    late_ms = max(client["lateness_p99_ms"] or 0.0 for client in clients)
    lag_ms = max(client["loop_lag_p99_ms"] or 0.0 for client in clients)
    cpu = max(client["cpu_share"] for client in clients)
    most_ms = limits.late_ms
    if late_ms <= most_ms and lag_ms <= most_ms and cpu <= limits.client_cpu_share:
        return None
    action, key = (LONGER_TIMES, "time_scale") if facts.is_trace else ("use a lower `--rate`", "--rate")
    text = (
        f"the load client was the limit: at p99 it launched requests {late_ms:.0f} ms late and its event loop lagged "
        f"{lag_ms:.0f} ms (limit {most_ms:.0f} ms), and its busiest process used {cpu:.0%} of a core (limit "
        f"{limits.client_cpu_share:.0%}); repeat the run on an idle machine, or {action}"
    )
    return Why("client-limited", text, key)


def overloaded(facts: CellFacts) -> Why | None:
    """TTFT was mostly waiting. In a closed loop a busy engine is normal, so there only a queue in both arms counts."""
    limits, arms = facts.limits, (facts.reference, facts.measured)
    queues = [arm.queue_share or 0.0 for arm in arms]
    if facts.is_closed_loop:
        is_overloaded = min(queues) > limits.queue_share
    else:
        busy = facts.reference.summary["utilisation"] or 0.0
        is_overloaded = busy > limits.utilisation or queues[0] > limits.queue_share
    if not is_overloaded:
        return None
    action, key = _less_load(facts)
    return Why("overloaded", f"the engine could not keep up: {'; '.join(map(_load, arms))}; {action}", key)


def _load(arm: ArmFacts) -> str:
    busy, queue = arm.summary["utilisation"], arm.queue_share
    queued = "its queue is unknown" if queue is None else f"{share(queue)} of its TTFT was spent in its queue"
    return f"{arm.name} was busy {share(busy or 0.0)} of the time, and {queued}"


def _less_load(facts: CellFacts) -> tuple[str, str]:
    if facts.is_closed_loop:
        return "use a lower `--concurrency`", "--concurrency"
    if facts.is_trace:
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
    """Return a reason if the interval is wider than the margin, so a gain of the margin could not have been shown; or
    the mean is beyond the margin, and the verdict does not trust it."""
    ratio, margin = facts.ratio, facts.limits.gain
    if facts.verdict != SAME or ratio is None or ratio.session_count < 2:
        return None
    is_wide = ratio.low <= 0 or math.log(ratio.high / ratio.low) / 2 > math.log(1 + margin)
    if not is_wide and abs(math.log(ratio.ratio)) <= math.log(1 + margin):
        return None
    noise = facts.noise
    own = "" if noise is None else f", and two runs of {facts.reference.name} itself differ by {noise.ratio - 1:.0%}"
    text = (
        f"the run cannot show a gain of {margin:.0%}: the 95% interval is {ratio.low:.2f} to {ratio.high:.2f} after "
        f"{ratio.run_count} run{'s' * (ratio.run_count != 1)} of each arm{own}; raise `--pairs`, on an idle machine"
    )
    return Why("noise", text, "--pairs")
