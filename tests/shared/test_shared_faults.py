"""A store that fails in one way or another: orders end as misses in time, and the storage is back afterwards."""

import signal
import time

import pytest
import servers
from conftest import SERVERS, fresh_place, set_environment
from fault_proxy import FAULTS, FaultProxy
from storage_rig import EXTENT_BLOCKS, make_run, opened

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared.orders import Get, Outcome, Probe, Put
from kvbm.tiers.shared.stores.request_limit import LEAST_LIMIT_S

MISS_LIMIT_S = 4.0  # a request may take 1 s then, and a call twice as long
BACK_LIMIT_S = 12.0  # pauses of 1, 2 and 4 s
WHOLE_STORE = ("refuse", "hang", "unavailable")
each_server = pytest.mark.parametrize("server", SERVERS, indirect=True)


@pytest.fixture
def proxy(server, monkeypatch):
    with FaultProxy(server.port) as proxy:
        set_environment(monkeypatch, server.through(proxy.port))
        yield proxy


@pytest.fixture
def rig(proxy, place):
    with opened(place) as rig:
        for number in range(3):
            assert rig.put(make_run(number)).outcome is Outcome.GOOD
        assert rig.get(make_run(0)).outcome is Outcome.GOOD
        yield rig


def get_at_once(rig, count):
    """Read runs at the same time, each into slots of its own; return the results."""
    tickets = [rig.submit(Get, make_run(number), slots_of(number)) for number in range(count)]
    return [rig.wait(ticket) for ticket in tickets]


def slots_of(number):
    return range(16 + number * EXTENT_BLOCKS, 16 + (number + 1) * EXTENT_BLOCKS)


def await_on(rig):
    """Wait until orders are accepted again."""
    deadline_s = time.monotonic() + BACK_LIMIT_S
    while rig.storage.off_because is not None:
        assert time.monotonic() < deadline_s, rig.storage.off_because
        rig.storage.poll()
        time.sleep(0.01)


@each_server
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_a_miss_in_time_and_the_store_is_used_again_after_it(rig, proxy, fault):
    proxy.fault = fault
    began_s = time.monotonic()
    results = get_at_once(rig, 3)
    assert time.monotonic() - began_s < MISS_LIMIT_S
    assert all(result.outcome in (Outcome.BAD, Outcome.FAILED) for result in results), results
    assert (fault == "refuse") == (proxy.faults_shown == 0)
    if fault in WHOLE_STORE:
        assert rig.storage.off_because
        assert rig.run(Put, make_run(9), tuple(range(4)), (1,) * 4).outcome is Outcome.FAILED
        assert rig.run(Probe, [make_run(0)[-1]]).present is None
    proxy.fault = None
    await_on(rig)
    for number, result in enumerate(get_at_once(rig, 3)):
        assert result.outcome is Outcome.GOOD, result
        assert all(rig.holds(slot, name) for slot, name in zip(slots_of(number), make_run(number), strict=True))


@each_server
def test_a_store_that_has_become_slower_gets_more_time(rig, proxy):
    while rig.store.limit_s > LEAST_LIMIT_S:
        assert rig.get(make_run(0)).outcome is Outcome.GOOD
    proxy.bytes_per_s = rig.form.object_bytes / (1.5 * LEAST_LIMIT_S)
    proxy.fault = "slow"
    assert rig.get(make_run(0)).outcome is Outcome.FAILED
    assert rig.store.limit_s == 2 * LEAST_LIMIT_S
    assert rig.get(make_run(0)).outcome is Outcome.GOOD


@each_server
@pytest.mark.parametrize("fault", WHOLE_STORE)
def test_a_probe_and_a_write_without_an_answer_fail(rig, proxy, fault):
    proxy.fault = fault
    began_s = time.monotonic()
    probe = rig.submit(Probe, [make_run(0)[-1]])
    write = rig.submit(Put, make_run(9), tuple(range(4)), (1,) * 4)
    assert rig.wait(probe).present is None
    assert rig.wait(write).outcome is Outcome.FAILED
    assert time.monotonic() - began_s < MISS_LIMIT_S


@each_server
@pytest.mark.parametrize("fault", WHOLE_STORE)
def test_a_store_that_does_not_answer_at_the_start_is_an_error_in_time(proxy, place, fault):
    proxy.fault = fault
    began_s = time.monotonic()
    with pytest.raises(EnvironmentProblem, match=place), opened(place):
        pass
    assert time.monotonic() - began_s < 8


@each_server
def test_a_stopped_server_is_a_miss_and_is_used_again_when_it_continues(server, place):
    with opened(place) as rig:
        rig.put(make_run(0))
        server.signal(signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            results = get_at_once(rig, 4)
            assert time.monotonic() - began_s < MISS_LIMIT_S
            assert not any(result.outcome is Outcome.GOOD for result in results)
            assert rig.storage.off_because
        finally:
            server.signal(signal.SIGCONT)
        await_on(rig)
        assert rig.get(make_run(0)).outcome is Outcome.GOOD


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_killed_under_load_is_a_miss(name, tmp_path, monkeypatch):
    try:
        with servers.running(name, tmp_path / "server") as server:
            set_environment(monkeypatch, server.environment)
            with opened(fresh_place(server)) as rig:
                rig.put(make_run(0))
                tickets = [rig.submit(Get, make_run(0), slots_of(0)) for _ in range(200)]
                assert rig.wait(tickets[0]).outcome is Outcome.GOOD
                server.signal(signal.SIGKILL)
                began_s = time.monotonic()
                results = [rig.wait(ticket) for ticket in tickets]
                assert time.monotonic() - began_s < MISS_LIMIT_S
                assert {result.outcome for result in results} == {Outcome.GOOD, Outcome.FAILED}
                assert rig.storage.off_because
                assert all(rig.holds(slot, name) for slot, name in zip(slots_of(0), make_run(0), strict=True))
    except servers.NotInstalled as missing:
        pytest.skip(f"needs {missing}")


@each_server
@pytest.mark.parametrize("writes", [True, False])
def test_a_missing_bucket_is_an_error_at_the_start(server, writes):
    url = fresh_place(server).replace(servers.BUCKET, "no-such-bucket")
    with pytest.raises(EnvironmentProblem, match=url), opened(url, writes=writes):
        pass


@each_server
def test_two_storages_that_write_the_same_runs_make_no_wrong_byte(server, place):
    with opened(place) as first, opened(place) as second:
        for rig in (first, second):
            for position in range(16):
                rig.fill(position, make_run(position // EXTENT_BLOCKS)[position % EXTENT_BLOCKS])
        writes = [
            (rig, rig.submit(Put, make_run(number), tuple(range(4 * number, 4 * number + 4)), (1,) * 4))
            for number in range(4)
            for rig in (first, second)
        ]
        assert all(rig.wait(ticket).outcome in (Outcome.GOOD, Outcome.EXISTS) for rig, ticket in writes)
        for rig in (first, second):
            for number, result in enumerate(get_at_once(rig, 4)):
                assert result.outcome is Outcome.GOOD
                assert all(rig.holds(s, name) for s, name in zip(slots_of(number), make_run(number), strict=True))


@pytest.mark.servers
@pytest.mark.parametrize("server", ["ceph", "azurite"], indirect=True)
def test_wrong_credentials_are_an_error_at_the_start_that_does_not_show_them(server, place, monkeypatch, caplog):
    secret = "d3JvbmcgYnV0IHNlY3JldA=="
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", secret)
    with pytest.raises(EnvironmentProblem, match=place) as caught, opened(place):
        pass
    assert secret not in f"{caught.value} {caught.value.message} {caught.value.hint} {caplog.text}"


@pytest.mark.servers
@pytest.mark.parametrize("server", ["s3rver"], indirect=True)
def test_a_server_that_ignores_conditions_is_known_as_such_and_writes_work(server, place):
    with opened(place) as rig:
        assert not rig.store.creates_once
        assert rig.put(make_run(0)).outcome is Outcome.GOOD
        assert rig.get(make_run(0)).outcome is Outcome.GOOD


def test_a_url_with_a_password_is_refused_without_showing_it():
    with pytest.raises(EnvironmentProblem, match="credentials") as caught, opened("s3://key:open-sesame@bucket/team"):
        pass
    assert "open-sesame" not in f"{caught.value!r} {caught.value.message} {caught.value.hint}"
