"""What a Prometheus scrape shows of the block manager."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvbm.metrics import BLOCKS, COUNTERS, HIT_RATES, TOTALS, Counters, KvbmCollector
from kvbm.observe.series import COUNTED
from kvbm.types import Tier


def scrape(counters: Counters) -> str:
    registry = CollectorRegistry()
    registry.register(KvbmCollector(counters, lambda: {Tier.HOST: {"free": 3, "pinned": 1}}))
    return generate_latest(registry).decode()


def test_names_that_dashboards_know_appear_to_the_letter():
    lines = scrape(Counters(matched_tokens=48, offload_blocks=5, onboard_blocks=3)).splitlines()
    assert "kvbm_matched_tokens 48.0" in lines
    assert "kvbm_offload_blocks_d2h 5.0" in lines
    assert "kvbm_onboard_blocks_h2d 3.0" in lines
    assert 'kvbm_host_blocks{state="free"} 3.0' in lines


def test_no_key_of_a_total_and_no_metric_name_changes():
    """Dashboards, recordings and engines of other versions know these names: a change of this file breaks them."""
    names = {key: name for name, (key, _) in COUNTERS.items()}
    known = (Path(__file__).parent / "metric_names.txt").read_text().splitlines()
    assert sorted(f"{key} {names.get(key, '-')}" for key in TOTALS) == known


@pytest.mark.parametrize("key", TOTALS)
def test_a_total_is_set_and_read_under_its_key(key):
    counters = Counters()
    counters.set_total(key, 7)
    assert counters.totals() == {**dict.fromkeys(TOTALS, 0), key: 7}


def test_counters_of_a_lower_tier_are_those_of_its_kind():
    counters = Counters()
    counters.of(Tier.DISK).late_blocks += 2
    counters.of(Tier.SHARED).late_blocks += 3
    assert (counters.totals()["disk_late_blocks"], counters.totals()["shared_late_blocks"]) == (2, 3)


def test_every_counter_is_exported_and_belongs_to_one_attribute():
    keys = [key for key, _ in COUNTERS.values()]
    parts = {key for family in COUNTED.values() for key in family.rows.values()}
    assert len(set(keys)) == len(keys)
    assert parts | set(keys) == set(TOTALS)
    text = scrape(Counters())
    assert all(f"\n{name} " in text for name in COUNTERS)
    assert all(name in text for name, _ in (HIT_RATES[Tier.HOST], BLOCKS[Tier.HOST]))


def test_hit_rate_is_zero_before_the_first_request_and_then_a_share_of_blocks():
    counters = Counters()
    assert counters.hit_rate(Tier.HOST) == 0.0
    counters.hit_window.extend([(3, 1, 0, 4), (0, 0, 0, 4)])
    assert (counters.hit_rate(Tier.HOST), counters.hit_rate(Tier.DISK)) == (3 / 8, 1 / 8)
