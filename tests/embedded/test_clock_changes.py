"""A clock that is set a year ahead or back while an engine serves: only its displays may notice."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from bookkeeping import check_leader, tier_of
from kvbm_engine import assert_same, prompt, running
from waiting import eventually

import kvbm
from kvbm.child import deadlines
from kvbm.types import Tier

YEAR_S = 365 * 24 * 3600
LENGTH, LOADABLE = 200, 192
PATCH = """\
import os, time
from pathlib import Path

_time = time.time
_file = Path(os.environ["KVBM_TEST_CLOCK"])
time.time = lambda: _time() + float(_file.read_text())
time.time_ns = lambda: int(time.time() * 1e9)
"""


class Clock:
    """The wall clock of this process and of all that it starts."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0)

    def set(self, offset_s: float) -> None:
        draft = self.file.with_suffix(".new")
        draft.write_text(str(offset_s))
        draft.replace(self.file)


@pytest.fixture
def clock(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(PATCH)
    clock = Clock(tmp_path / "clock")
    tree = Path(kvbm.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{tree}")
    monkeypatch.setenv("KVBM_TEST_CLOCK", str(clock.file))
    monkeypatch.setattr(deadlines, "ANSWER_LIMIT_S", 100.0)  # more than a busy machine takes, and less than a year
    monkeypatch.setattr(time, "time", time.time)  # restores what the next line replaces
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    exec(PATCH, {})
    return clock


@contextmanager
def restless(clock, offsets):
    """Set the clock all the time, so that loads and copies see it change."""
    has_ended = threading.Event()

    def change():
        for offset_s in itertools.cycle(offsets):
            clock.set(offset_s)
            if has_ended.wait(0.002):
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def engine_on(directory):
    return running(
        host_blocks=100,
        worker_process=True,
        disk={"directory": str(directory), "blocks": 200},
        offload={"to_disk": "always"},
        onboard={"policy": "always"},
    )


@pytest.mark.parametrize(
    "offsets",
    [(YEAR_S, -YEAR_S), *(pytest.param(one, marks=pytest.mark.soak) for one in ((YEAR_S, 0), (-YEAR_S, 0)))],
)
def test_a_clock_that_is_set_changes_nothing(tmp_path, clock, offsets):
    with engine_on(tmp_path / "disk") as engine:
        expected = [engine.ask(prompt(seed, LENGTH)).said() for seed in range(3)]
        engine.settle()
        with restless(clock, (0, *offsets)):
            for seed in (0, 1, 2) * 5:
                engine.forget_g1()
                answer = engine.ask(prompt(seed, LENGTH))
                assert_same([answer.said()], [expected[seed]])
                assert answer.last.num_external_tokens == LOADABLE
                engine.ask(prompt(100 + seed, LENGTH))  # something to write, once
            engine.settle()
        counters = engine.counters
        assert counters.disk.times_off == counters.onboard_failed_blocks == counters.overdue_transfers == 0
        os.kill(tier_of(engine.leader, Tier.DISK).disk.process.pid, signal.SIGKILL)
        eventually(
            lambda: engine.ask(prompt(99, 20), max_tokens=1) and counters.disk.restarts and not counters.disk.off
        )
        check_leader(engine.leader)
    with engine_on(tmp_path / "disk") as engine:
        answer = engine.ask(prompt(0, LENGTH))
        assert_same([answer.said()], [expected[0]])
        assert answer.last.num_external_tokens == LOADABLE, "found on disk"
        assert engine.engine.begin_reset().result()
        assert engine.ask(prompt(0, LENGTH)).last.num_external_tokens == 0
