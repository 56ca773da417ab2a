"""The sizes of LMBenchmark's scenarios (commit 26d02bd), as its scripts name them.

Each multi-round scenario is a shell script of LMBenchmark that starts one program with fixed arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHAREGPT_QPS = 1.34
AGENT_INTERVAL_S = 3.0  # between two rounds of a user's agents


@dataclass(frozen=True, slots=True)
class Preset:
    """One run of the multi-round program."""

    users: int
    rounds: int
    system_words: int
    history_words: int
    answer_tokens: int
    qps: float
    duration_s: float = 100.0

    @property
    def gap_s(self) -> float:
        """The time between two requests of one user."""
        return self.users / self.qps


PRESETS: Mapping[str, Preset] = {
    "long": Preset(  # long_input_short_output_run.sh
        users=15, rounds=20, system_words=1000, history_words=20000, answer_tokens=100, qps=0.1
    ),
    "short": Preset(  # short_input_short_output.sh
        users=320, rounds=20, system_words=0, history_words=256, answer_tokens=20, qps=15.0
    ),
    "long-long": Preset(  # long_input_long_output.sh
        users=320, rounds=20, system_words=0, history_words=2000, answer_tokens=1000, qps=0.7
    ),
}
