"""Our schedule and CSV files equal those of LMBenchmark's own classes, driven with the same simulated clock.

Requires KVBM_LMBENCHMARK, a checkout of LMBenchmark, and KVBM_LMBENCHMARK_PYTHON, an interpreter with `openai` and
`pandas`.
"""

import json
import os
import random
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from lmbenchmark_clock import START_S, simulate

from kvbm_cli.bench.lmbenchmark.exchange import MeasuredAnswer, multi_round_csv
from kvbm_cli.bench.lmbenchmark.multi_round import MultiRoundSchedule
from kvbm_cli.bench.lmbenchmark.presets import preset

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not {"KVBM_LMBENCHMARK", "KVBM_LMBENCHMARK_PYTHON"} <= os.environ.keys(),
        reason="KVBM_LMBENCHMARK and KVBM_LMBENCHMARK_PYTHON are not set",
    ),
]


def cases():
    """All rates of two decimals of the long preset, and random parameters with late answers."""
    dice = random.Random(1)
    long = preset("lmbenchmark-long").scaled(0.0001)
    chosen = [(replace(long, qps=hundredths / 100), 100.0, 1.0) for hundredths in range(1, 400, 3)]
    chosen += [(replace(preset("lmbenchmark-short"), qps=qps), 40.0, 1.0) for qps in (0.7, 3.3, 15.0)]
    for _ in range(300):
        parameters = replace(
            long,
            users=dice.randint(1, 12),
            rounds=dice.randint(1, 6),
            system_words=dice.randint(0, 2),
            history_words=dice.randint(0, 3),
            qps=dice.choice([dice.uniform(0.05, 8.0), dice.randint(1, 800) / 100]),
            first_user_id=dice.randint(0, 50),
            strict_concurrent_users=dice.random() < 0.3,
        )
        chosen.append((parameters, dice.uniform(5.0, 60.0), dice.choice([0.0, 0.5, 3.0, 20.0])))
    return [
        {
            "parameters": asdict(parameters),
            "clock": {"duration_s": duration_s, "seed": position, "longest_answer_s": longest_s},
            "has_no_text": position % 7 == 0,
        }
        for position, (parameters, duration_s, longest_s) in enumerate(chosen)
    ]


def ours(case):
    schedule = MultiRoundSchedule(replace(preset("lmbenchmark-long"), **case["parameters"]))
    rows = {}

    def step(now):
        return [(launch.user, launch.messages[-1]["content"]) for launch in schedule.step(now)]

    def answered(user, now, text):
        of_user = rows.setdefault(user, [])
        times = (0, 0) if case["has_no_text"] else (now - START_S, 0.25)
        of_user.append(MeasuredAnswer(100 * user, len(of_user) + 1, *times, now - 1.0, now))
        schedule.answered(user, text)

    launches = simulate(step, answered, **case["clock"])
    return {
        "launches": [list(launch) for launch in launches],
        "csv": multi_round_csv([(user, rows.get(user, [])) for user in schedule.users]),
    }


def test_schedule_and_csv_equal_those_of_lmbenchmark():
    chosen = cases()
    oracle = Path(__file__).with_name("lmbenchmark_oracle.py")
    done = subprocess.run(
        [os.environ["KVBM_LMBENCHMARK_PYTHON"], str(oracle), os.environ["KVBM_LMBENCHMARK"]],
        input=json.dumps(chosen),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout)
    assert len(theirs) == len(chosen) == 436
    assert sum(len(one["launches"]) for one in theirs) > 10_000
    for case, expected in zip(chosen, theirs, strict=True):
        assert ours(case) == expected, case
