"""`kvbm size` answers any configuration of a model with sizes or a short error, in limited time and memory."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("hostile_configs.py")


def sized(seed: int, count: int) -> None:
    done = subprocess.run([sys.executable, PROGRAM, str(seed), str(count)], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[:6000]


def test_any_configuration_is_sized_or_refused_within_a_gigabyte() -> None:
    sized(seed=1, count=60)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_configurations_are_sized_or_refused_within_a_gigabyte(seed: int) -> None:
    sized(seed, count=1000)
