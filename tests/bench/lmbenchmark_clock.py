"""A simulated clock for a multi-round schedule. It imports neither kvbm nor LMBenchmark: both are driven with it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

START_S = 1_700_000_000.0
TICK_S = 0.1004  # LMBenchmark sleeps 0.1 s after each step; a step takes 0.4 ms here


def simulate(
    step: Callable[[float], list[tuple[int, str]]],
    answered: Callable[[int, float, str], None],
    *,
    duration_s: float,
    seed: int,
    longest_answer_s: float,
) -> list[tuple[int, int, str]]:
    """Call `step` until the duration has passed, and answer each launch after a random time.

    `step` returns (user, text of the last message) of its launches. The result has (tick, user, text) of each launch.
    """
    random_s = random.Random(seed)
    open_answers: list[tuple[float, int]] = []
    launches = []
    now, tick = START_S, 0
    while now - START_S <= duration_s:
        while open_answers and open_answers[0][0] <= now:
            finished_s, user = heapq.heappop(open_answers)
            answered(user, finished_s, f" answer for {user}")
        for user, text in step(now):
            launches.append((tick, user, text))
            heapq.heappush(open_answers, (now + random_s.uniform(0.0, longest_answer_s), user))
        now += TICK_S
        tick += 1
    while open_answers:
        finished_s, user = heapq.heappop(open_answers)
        answered(user, finished_s, f" answer for {user}")
    return launches
