"""The leader keeps no object per block: bytes per block, and references that the garbage collector follows."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/micro/memory_at_scale.py"


def run(*arguments: object) -> None:
    subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def test_a_leader_keeps_no_object_per_block():
    run("--blocks", 1 << 17, "--ranks", 2, "--hash-bytes", 16, "--memory-only")


@pytest.mark.soak
@pytest.mark.slow
def test_sixteen_million_blocks_on_eight_ranks_stay_within_the_limits():
    run()
