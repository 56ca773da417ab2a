"""The figures of `kvbm top`: what two readings say about the time between them."""

from __future__ import annotations

import pytest
from metric_pages import FakeLeader, sglang_text, text_of

from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.top.figures import LOADS, NAMES, Reading, engines_of, figures


def readings(before: FakeLeader, after: FakeLeader, seconds: float = 2.0) -> tuple[Reading, Reading]:
    old, new = (engines_of(MetricsPage.parse(text_of(one), NAMES))["0"] for one in (before, after))
    return Reading(10.0, old), Reading(10.0 + seconds, new)


def test_rates_are_the_increases_of_two_scrapes_per_second():
    before = FakeLeader(prompt_host_tokens=100, prompt_computed_tokens=50, onboard_bytes=10_000, saved_prefill_s=1.0)
    after = FakeLeader(prompt_host_tokens=400, prompt_computed_tokens=150, onboard_bytes=70_000, saved_prefill_s=3.0)
    after.waiting = {"offload": (7, 1.5)}
    found = figures([readings(before, after)])
    assert found.tokens_per_s == {"device": 0, "host": 150, "disk": 0, "computed": 50}
    assert found.hit_rate == 0.75
    assert found.saved_s_per_s == 1.0
    assert found.transfers["host", "device"].bytes_per_s == 30_000
    assert found.bandwidth(LOADS) == 30_000
    assert found.tiers == {"host": (75_000, 100_000), "disk": (0, 10_000)}
    assert found.queues == {"offload": (7, 1.5)}
    assert ("object", "host") not in found.transfers, "the engine has no object tier"


def of_sglang(at_s: float, text: str) -> Reading:
    return Reading(at_s, engines_of(MetricsPage.parse(text_of(FakeLeader()) + text, NAMES))["0"])


def test_tokens_and_requests_of_sglang_are_its_own_counts():
    before = of_sglang(10.0, sglang_text(1000, device=100, storage=50))
    after = of_sglang(12.0, sglang_text(3000, running=2, device=500, host=200, storage=650))
    found = figures([(before, after)])
    assert found.tokens_per_s == {"device": 200, "host": 100, "disk": 300, "computed": 400}
    assert found.requests == {"running": 2, "waiting": 0}
    other = readings(FakeLeader(), FakeLeader(prompt_host_tokens=20, prompt_computed_tokens=10))
    together = figures([(before, after), other])
    assert together.tokens_per_s == {"device": 200, "host": 110, "disk": 300, "computed": 405}
    again = figures([(after, of_sglang(14.0, sglang_text(60, device=20)))])
    assert again.tokens_per_s == {"device": 10, "host": 0, "disk": 0, "computed": 20}, "a restart counts from zero"


def test_a_restart_counts_from_zero_and_never_backwards():
    before = FakeLeader(prompt_computed_tokens=5000, onboard_bytes=10**9)
    after = FakeLeader(prompt_computed_tokens=30)
    before.counters.durations["host-device"].observe(5.0)
    after.counters.durations["host-device"].observe(0.001)
    found = figures([readings(before, after)])
    assert found.tokens_per_s["computed"] == 15
    assert found.transfers["host", "device"].bytes_per_s == 0
    assert found.transfers["host", "device"].p99_s < 0.01


def test_nothing_is_measured_without_requests_and_transfers():
    found = figures([readings(FakeLeader(), FakeLeader())])
    assert found.hit_rate is None
    assert found.transfers["host", "device"].p50_s is None
    assert found.transfers["host", "device"].p99_s is None


def test_quantiles_are_those_of_the_interval():
    before, after = FakeLeader(), FakeLeader()
    for one in (before, after):
        for _ in range(100):
            one.counters.durations["device-host"].observe(5.0)  # long ago
    for seconds in [0.001] * 90 + [0.1] * 10:
        after.counters.durations["device-host"].observe(seconds)
    found = figures([readings(before, after)]).transfers["device", "host"]
    assert 0.0005 < found.p50_s <= 0.002
    assert 0.032 < found.p99_s <= 0.128


def test_quantile_beyond_all_buckets_is_the_last_bound():
    after = FakeLeader()
    after.counters.durations["device-host"].observe(1000.0)
    assert figures([readings(FakeLeader(), after)]).transfers["device", "host"].p99_s == pytest.approx(8.192)


def test_several_engines_are_added_up_and_the_oldest_transfer_counts():
    pairs = []
    for number in (1, 2):
        after = FakeLeader(prompt_host_tokens=100 * number)
        after.waiting = {"offload": (number, float(number))}
        pairs.append(readings(FakeLeader(), after))
    found = figures(pairs)
    assert found.tokens_per_s["host"] == 150
    assert found.queues == {"offload": (3, 2.0)}
    assert found.tiers["host"] == (150_000, 200_000)


def test_engines_of_one_page_are_told_apart():
    page = MetricsPage.parse(text_of(FakeLeader(prompt_host_tokens=1), FakeLeader(prompt_host_tokens=2)), NAMES)
    found = {name: sum(one.values("kvbm_prompt_tokens")) for name, one in engines_of(page).items()}
    assert found == {"0": 1, "1": 2}


def test_a_tier_that_is_off_is_named():
    assert figures([readings(FakeLeader(), FakeLeader(disk_off=1))]).off == ("disk tier",)
