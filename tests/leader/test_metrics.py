"""What a Prometheus scrape shows of the block manager."""

from __future__ import annotations

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


def test_every_counter_is_exported_and_belongs_to_one_attribute():
    attributes = [attribute for attribute, _ in COUNTERS.values()]
    parts = {attribute for family in COUNTED.values() for attribute in family.rows.values()}
    assert len(set(attributes)) == len(attributes)
    assert parts | set(attributes) == set(TOTALS)
    text = scrape(Counters())
    assert all(f"\n{name} " in text for name in COUNTERS)
    assert all(name in text for name, _ in (HIT_RATES[Tier.HOST], BLOCKS[Tier.HOST]))


def test_hit_rate_is_zero_before_the_first_request_and_then_a_share_of_blocks():
    counters = Counters()
    assert counters.hit_rate(Tier.HOST) == 0.0
    counters.hit_window.extend([(3, 1, 0, 4), (0, 0, 0, 4)])
    assert (counters.hit_rate(Tier.HOST), counters.hit_rate(Tier.DISK)) == (3 / 8, 1 / 8)
