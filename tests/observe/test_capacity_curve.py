"""The hit rates of other capacities: from the leader to the series, without a wait."""

from __future__ import annotations

import threading

import pytest
from rig import Rig, chain
from waiting import eventually

from kvbm.config.schema import MetricsSection
from kvbm.core.shadow_caches import EVICTIONS, SIZES
from kvbm.metrics import Counters
from kvbm.observe import capacity_curve
from kvbm.observe.capacity_curve import CapacityCurve
from kvbm.observe.series import EngineReport
from kvbm.observe.telemetry import Telemetry


@pytest.fixture
def curve():
    made = CapacityCurve()
    yield made
    made.close()


def test_the_leader_passes_each_chain_that_has_ended_with_the_blocks_that_it_looked_up():
    ended = []
    rig = Rig(ended=lambda hashes, asked: ended.append((list(hashes), asked)))
    hashes = rig.fill("a", 4)
    assert ended == [(hashes, 0)], "nothing was looked up"
    blocks = rig.load("r", hashes)
    for _ in range(3):
        rig.step()
    rig.finish("r", [*hashes, *chain("more", 1)], blocks)
    assert ended[1:] == [([*hashes, *chain("more", 1)], 4)]
    rig.close()


def test_rates_of_requests_appear_in_the_counters(curve):
    counters = Counters()
    curve.start(100, counters)
    for _ in range(3):
        curve.note(chain("a", 8), 8)
    eventually(lambda: counters.hit_rates_at.get(("lru", 1.0)) == pytest.approx(2 / 3, abs=1e-3))
    assert len(counters.hit_rates_at) == len(EVICTIONS) * len(SIZES)


def test_requests_beyond_the_queue_are_left_out_and_none_are_held_before_the_start(curve, monkeypatch):
    curve.note(chain("a", 8), 8)
    # The memory that it takes.
    assert curve._queue.qsize() == 0
    monkeypatch.setattr(capacity_curve, "MOST_WAITING", 2)
    may_go_on = threading.Event()

    class Held:
        def use(self, at_s, hashes, *, asked):
            may_go_on.wait()
            yield

        def hit_rates(self):
            return {}

    monkeypatch.setattr(capacity_curve, "ShadowCaches", lambda capacity_blocks: Held())
    curve.start(100, Counters())
    for _ in range(20):
        curve.note(chain("a", 8), 8)
    # The memory that it takes.
    assert curve._queue.qsize() <= 2
    may_go_on.set()


def test_it_is_off_by_default():
    before = set(threading.enumerate())
    telemetry = Telemetry(MetricsSection(log_interval_s=0))
    assert telemetry.ended is None
    assert set(threading.enumerate()) == before
    telemetry.close()


def test_telemetry_measures_for_the_size_of_host_memory():
    telemetry = Telemetry(MetricsSection(log_interval_s=0, capacities=True))
    rig = Rig(slots=8, ended=telemetry.ended)
    telemetry.watch(rig.leader)
    hashes = rig.fill("a", 6)
    for number in range(2):
        blocks = rig.load(f"r{number}", hashes)
        rig.step()
        rig.finish(f"r{number}", hashes, blocks)
    rates = eventually(lambda: rig.leader.counters.hit_rates_at)
    eventually(lambda: rig.leader.counters.hit_rates_at["lru", 1.0] == 1.0)
    assert rig.leader.counters.hit_rates_at["lru", 0.25] == pytest.approx(2 / 6, abs=1e-3)
    assert set(rates) == {(eviction, size) for eviction in EVICTIONS for size in SIZES}
    telemetry.close()
    rig.close()


def test_rates_pass_from_the_process_of_the_engine_to_that_of_the_metrics():
    rig = Rig()
    rig.leader.counters.hit_rates_at = {("lru", 0.5): 0.25, ("adaptive", 2.0): 0.75}
    here = EngineReport.of(rig.leader)
    there = EngineReport.from_data(here.totals, here.blocks, EngineReport.data_of(rig.leader))
    assert there.hit_rates_at == here.hit_rates_at == rig.leader.counters.hit_rates_at
    rig.close()
