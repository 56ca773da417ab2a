"""The series by tier and engine: what they count, when, and of which tiers."""

from __future__ import annotations

import pytest
from fake_store import FakeStore
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rig import Rig, chain, disk_policy

from kvbm.core.shadow_caches import EVICTIONS, SIZES
from kvbm.metrics import TRANSFER_BOUNDS_S, Counters, Durations
from kvbm.observe.series import COUNTED, GAUGES, HISTOGRAMS, EngineReport, SeriesCollector
from kvbm.tiers.settings import TierPolicy

BLOCK_BYTES = 1024
ALWAYS = TierPolicy("always")


def samples(*leaders) -> dict[tuple[str, ...], float]:
    """The samples of a scrape: (name, label values but the engine's, in the order of the labels' names) -> value."""
    registry = CollectorRegistry()
    registry.register(SeriesCollector(lambda: {n: EngineReport.of(leader) for n, leader in enumerate(leaders)}))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            engine = labels.pop("engine")
            values = [labels[name] for name in sorted(labels)]
            found[(sample.name, *values) if engine == "0" else (sample.name, *values, engine)] = sample.value
    return found


def all_tiers(**options) -> Rig:
    made = Rig(fake_disk=32, store=FakeStore(2), shared=ALWAYS, **disk_policy("always", **options))
    made.leader.counters.hit_rates_at = {(eviction, size): 0.5 for eviction in EVICTIONS for size in SIZES}
    return made


@pytest.fixture
def rig():
    made = all_tiers()
    yield made
    made.close()


def moved(found: dict[tuple[str, ...], float]) -> dict[str, float]:
    return {
        f"{source} to {target}": value / BLOCK_BYTES
        for (name, source, target), value in ((key, value) for key, value in found.items() if len(key) == 3)
        if name == "kvbm_transfer_bytes_total"
    }


def test_bytes_are_counted_by_the_two_tiers_of_a_transfer(rig):
    hashes = rig.fill("a", 4)
    rig.settle_store()
    assert moved(samples(rig.leader)) == {
        "device to host": 4,
        "host to device": 0,
        "host to disk": 4,
        "disk to host": 0,
        "host to object": 4,
        "object to host": 0,
    }
    rig.leader.host.store.forget(hashes)  # host memory only
    rig.load("r", hashes)
    for _ in range(4):
        rig.step()
    found = moved(samples(rig.leader))
    assert (found["disk to host"], found["host to device"], found["object to host"]) == (4, 4, 0)
    rig.leader.host.store.forget(hashes)
    rig.disk_tier.store.forget(hashes)
    rig.load("s", hashes)
    for _ in range(4):
        rig.step()
    found = moved(samples(rig.leader))
    assert (found["disk to host"], found["host to device"], found["object to host"]) == (4, 8, 4)


def test_nothing_is_counted_before_it_has_happened_and_a_queue_shows_it_meanwhile(rig):
    blocks = rig.compute("r", chain("a", 3))
    rig.order()
    rig.now_s += 1.5
    found = samples(rig.leader)
    assert moved(found)["device to host"] == found["kvbm_transfer_seconds_count", "device", "host"] == 0
    assert found["kvbm_queue_blocks", "offload"] == 3
    assert found["kvbm_queue_oldest_seconds", "offload"] == 1.5
    assert found["kvbm_admissions_total", "admitted", "policy", "host"] == 0
    for rank in rig.ranks:
        rank.run_all()
    rig.settle()
    found = samples(rig.leader)
    assert moved(found)["device to host"] == 3
    assert found["kvbm_queue_blocks", "offload"] == found["kvbm_queue_oldest_seconds", "offload"] == 0
    assert found["kvbm_transfer_seconds_sum", "device", "host"] == 1.5
    assert found["kvbm_queue_blocks", "disk_write"] == 3
    assert moved(found)["host to disk"] == found["kvbm_evictions_total", "capacity", "host"] == 0
    rig.finish("r", chain("a", 3), blocks)


def test_a_write_that_waits_has_an_age_before_it_begins(rig):
    rig.fill("a", 2)
    rig.disk.is_hanging = True
    for index in range(4):  # two writes at a time
        rig.fill(f"b{index}", 1)
    rig.now_s += 3
    rig.order()
    found = samples(rig.leader)
    assert found["kvbm_queue_blocks", "disk_write"] > 2
    assert found["kvbm_queue_oldest_seconds", "disk_write"] >= 3


def test_an_eviction_has_a_reason(rig):
    for index in range(5):
        rig.fill(f"a{index}", 3)  # of 8 slots
        for _ in range(3):
            rig.step()
    found = samples(rig.leader)
    assert found["kvbm_evictions_total", "capacity", "host"] == 15 - 8
    assert found["kvbm_evictions_total", "capacity", "disk"] == found["kvbm_evictions_total", "reset", "host"] == 0
    for index in range(10):
        rig.fill(f"b{index}", 3)
        for _ in range(3):
            rig.step()
    assert samples(rig.leader)["kvbm_evictions_total", "capacity", "disk"] == 45 - 32
    rig.leader.reset()
    found = samples(rig.leader)
    assert found["kvbm_evictions_total", "reset", "host"] == 8
    assert found["kvbm_evictions_total", "reset", "disk"] == 32


@pytest.mark.parametrize(("fault", "reason"), [("damage", "checksum"), ("fail-all", "io")])
def test_a_failed_read_from_disk_has_a_reason(rig, fault, reason):
    hashes = rig.fill("a", 1)
    rig.settle_store()
    rig.leader.host.store.forget(hashes)
    rig.load("r", hashes)
    rig.order()
    assert rig.disk.run("read", fault)
    rig.settle()
    found = samples(rig.leader)
    reasons = {key[1]: value for key, value in found.items() if key[0] == "kvbm_transfer_failures_total" and value}
    assert reasons == {reason: 1}
    assert found["kvbm_evictions_total", "damaged", "disk"] == (1 if fault == "damage" else 0)


def test_a_failed_copy_to_the_device_is_not_a_failed_read():
    rig = Rig()
    hashes = rig.fill("a", 2)
    rig.load("r", hashes)
    rig.ranks[0].copier.next("fail")
    rig.step()
    failed = {key[1:]: value for key, value in samples(rig.leader).items() if "failures_total" in key[0] and value}
    assert failed == {("copy", "host", "device"): 2}
    rig.close()


@pytest.mark.parametrize(("known", "result"), [(4, "hit"), (2, "partial"), (0, "miss")])
def test_a_request_is_a_hit_by_what_it_got(known, result):
    rig = Rig()
    hashes = chain("a", 4)
    if known:
        rig.fill("a", known)
        rig.load("r", hashes)
        assert not samples(rig.leader)["kvbm_matches_total", result], "it has not ended"
        rig.step()
    else:
        assert rig.leader.match("r", hashes, 0) == 0
    rig.leader.finish("r", hashes)
    found = samples(rig.leader)
    assert {one: found["kvbm_matches_total", one] for one in ("hit", "partial", "miss")} == {
        one: int(one == result) for one in ("hit", "partial", "miss")
    }
    assert found[("kvbm_match_seconds_count",)] == 1
    rig.close()


def test_the_saved_time_is_that_of_the_measured_rate():
    rig = Rig()
    hashes = rig.fill("a", 4)
    rig.load("r", hashes)
    rig.step()
    assert samples(rig.leader)[("kvbm_saved_prefill_seconds_total",)] == 0, "the rate is unknown"
    rig.leader.note_step(1000, 0.5)
    rig.load("s", hashes)
    rig.step()
    assert samples(rig.leader)[("kvbm_saved_prefill_seconds_total",)] == pytest.approx(64 / 2000)
    rig.close()


def test_occupancy_is_in_bytes(rig):
    rig.fill("a", 3)
    for _ in range(3):
        rig.step()
    found = samples(rig.leader)
    assert found["kvbm_tier_used_bytes", "host"] == found["kvbm_tier_used_bytes", "disk"] == 3 * BLOCK_BYTES
    assert found["kvbm_tier_capacity_bytes", "host"] == 8 * BLOCK_BYTES
    assert found["kvbm_tier_capacity_bytes", "disk"] == 32 * BLOCK_BYTES


def test_an_engine_has_no_series_of_tiers_that_it_does_not_have(rig):
    plain = Rig()
    values = {value for key in samples(plain.leader) for value in key}
    assert "disk" not in values
    assert "object" not in values
    assert not {value for value in values if value.startswith(("disk_", "object_"))}
    assert {"disk", "object", "disk_write", "object_read"} <= {value for key in samples(rig.leader) for value in key}
    plain.close()


def test_an_engine_with_all_tiers_has_at_most_200_series_and_those_of_two_do_not_mix(rig):
    other = all_tiers()
    other.fill("a", 3)
    found = samples(rig.leader, other.leader)
    assert len(found) == 2 * len(samples(rig.leader))
    assert len(samples(rig.leader)) <= 200
    assert found["kvbm_transfer_bytes_total", "device", "host"] == 0
    assert found["kvbm_transfer_bytes_total", "device", "host", "1"] == 3 * BLOCK_BYTES
    other.close()


def test_every_series_of_the_tables_is_exported(rig):
    names = {key[0] for key in samples(rig.leader)}
    gauges = set(GAUGES) - {"kvbm_startup_seconds"}  # `open_leader` measures it
    assert {f"{name}_total" for name in COUNTED} | gauges <= names
    assert {f"{name}_bucket" for name in HISTOGRAMS} <= names


def test_hit_rates_of_other_capacities_are_named_by_size_and_eviction(rig):
    rig.leader.counters.hit_rates_at = {("lru", 0.25): 0.1, ("adaptive", 4.0): 0.9}
    found = {key: value for key, value in samples(rig.leader).items() if key[0] == "kvbm_hit_rate_at"}
    assert found == {("kvbm_hit_rate_at", "0.25", "lru"): 0.1, ("kvbm_hit_rate_at", "4", "adaptive"): 0.9}


def test_a_duration_is_in_the_first_bucket_that_is_not_shorter():
    one = Durations()
    for seconds in (0.0, TRANSFER_BOUNDS_S[0], 0.0011, 100.0):
        one.observe(seconds)
    assert one.counts == [2, 1, 0, 0, 0, 0, 0, 0, 1]
    assert one.sum_s == pytest.approx(100.0016)


def test_buckets_include_the_shorter_durations():
    rig = Rig()
    for seconds in (0.0, 0.001, 100.0):
        rig.leader.counters.durations["device-host"].observe(seconds)
    found = samples(rig.leader)
    counts = [found["kvbm_transfer_seconds_bucket", bound, "device", "host"] for bound in ("0.0005", "0.002", "+Inf")]
    assert counts == [1, 2, 3]
    rig.close()


def test_a_queue_is_as_old_as_the_oldest_of_several():
    rig = Rig()
    first, second = rig.fill("a", 4), rig.fill("b", 2)
    rig.load("r", first)
    rig.order()
    rig.now_s += 2
    rig.load("s", second)
    rig.order()
    rig.now_s += 1
    found = samples(rig.leader)
    assert found["kvbm_queue_oldest_seconds", "onboard"] == 3
    assert found["kvbm_queue_blocks", "onboard"] == 6
    rig.close()


def test_the_sources_of_a_prompt_add_up_to_it():
    counters = Counters()
    counters.count_prompt(100, device=32, external=48, disk=16, shared=16)
    counters.count_prompt(10, device=16, external=48, disk=48, shared=0)  # a hit of more than the prompt
    counters.count_prompt(50, device=0, external=16, disk=32, shared=32)  # what was read was cut afterwards
    assert counters.prompt_device_tokens == 32 + 10
    assert counters.prompt_host_tokens == 16
    assert counters.disk.prompt_tokens == 16 + 16
    assert counters.shared.prompt_tokens == 16
    assert counters.prompt_computed_tokens == 20 + 34
