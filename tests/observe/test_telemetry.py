"""Telemetry of an engine's cache: hit rates in the log, a recording of decisions, metrics on a separate port."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
import threading
import time
import urllib.request

import pytest
from prometheus_client import Gauge
from prometheus_client.parser import text_string_to_metric_families
from rig import Rig, chain
from waiting import eventually

from kvbm.config.schema import MetricsSection
from kvbm.errors import EnvironmentProblem
from kvbm.metrics import Counters
from kvbm.observe import bounded_server, decision_trace
from kvbm.observe.decision_trace import DecisionTrace
from kvbm.observe.metrics_server import MetricsServer
from kvbm.observe.telemetry import HitRateLog, Telemetry, hit_rates
from kvbm.tiers.settings import EngineTraits, LeaderSettings
from kvbm.types import Tier
from kvbm_cli.engine.process import choose_port


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the window of the hit rates ---------------------------------------------------------------------------------------


def test_hit_rate_covers_as_many_requests_as_the_profile_says():
    rig = Rig(window_requests=2)
    for name in ("a", "b", "c"):
        hashes = rig.fill(name, 2)
        rig.leader.match(name, chain(name, 2) if name != "c" else hashes, 0)
        rig.leader.finish(name, hashes)
    assert rig.leader.counters.finished_requests == 3
    assert len(rig.leader.counters.hit_window) == 2
    rig.close()


def test_window_comes_from_the_configuration():
    from kvbm.config.schema import ConnectorConfig

    config = ConnectorConfig.model_validate({"tiers": {"host": {"blocks": 1}}, "metrics": {"window_requests": 7}})
    assert LeaderSettings.of(config, [], EngineTraits(16), g1_blocks=4).window_requests == 7


# -- the log -----------------------------------------------------------------------------------------------------------


def test_hit_rates_in_words():
    counters = Counters()
    counters.hit_window.extend([(3, 1, 0, 4), (0, 0, 0, 4)])
    assert hit_rates(counters) == (
        "kvbm: cache hit rates of the last 2 requests: host 37.5% (3/8 blocks), disk 12.5% (1/8)"
    )
    assert hit_rates(Counters()).endswith("host 0.0% (0/0 blocks), disk 0.0% (0/0)")


def test_line_comes_only_when_a_request_has_ended_and_once_more_at_the_end(caplog):
    counters = Counters()
    with caplog.at_level(logging.INFO):
        hit_rate_log = HitRateLog(counters, 0.02)
        time.sleep(0.2)
        assert caplog.messages == []
        counters.hit_window.append((1, 0, 0, 2))
        counters.finished_requests = 1
        eventually(lambda: len(caplog.messages) == 1)
        time.sleep(0.2)
        assert len(caplog.messages) == 1
        hit_rate_log.close()
        last = HitRateLog(counters, 3600)
        last.close()
    assert len(caplog.messages) == 2


# -- the recording -----------------------------------------------------------------------------------------------------


def traced_rig(trace):
    rig = Rig(trace=trace.record)
    trace.counters = rig.leader.counters
    return rig


def recorded(directory, work, **options):
    """What is in the file after `work(rig)`."""
    trace = DecisionTrace(directory, **options)
    rig = traced_rig(trace)
    work(rig)
    trace.close()
    rig.close()
    return trace, lines_of(trace.path)


def a_hit(rig):
    hashes = rig.fill("a", 3)
    blocks = rig.load("again", hashes)
    rig.step()
    rig.finish("again", hashes, blocks)
    rig.leader.reset()


def test_a_recording_has_every_decision_and_names_blocks_by_their_hashes(tmp_path):
    _, lines = recorded(tmp_path, a_hit)
    hashes = [one.hex() for one in chain("a", 3)]
    calls = [line["call"] for line in lines]
    assert (calls[0], calls[-1]) == ("begin", "end")
    assert {"match", "offload", "onboard", "step", "loaded", "finish", "reset"} <= set(calls)
    by_call = {line["call"]: line for line in lines}
    assert by_call["offload"]["hashes"] == by_call["match"]["hashes"] == by_call["onboard"]["hashes"] == hashes
    assert (by_call["match"]["request"], by_call["match"]["blocks"]) == ("again", 3)
    assert (by_call["loaded"]["blocks"], by_call["loaded"]["failed"]) == (3, 0)
    assert by_call["end"]["dropped"] == 0
    assert [line["at_s"] for line in lines] == sorted(line["at_s"] for line in lines)


def test_a_recording_is_private_and_never_the_file_of_another_engine(tmp_path):
    directory = tmp_path / "new"
    traces = [DecisionTrace(directory) for _ in range(3)]
    for trace in traces:
        trace.close()
    assert len({trace.path for trace in traces}) == 3
    assert {stat.S_IMODE(trace.path.stat().st_mode) for trace in traces} == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_directory_that_cannot_be_made_is_an_error_that_names_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"cannot record in .*/file/below: ") as caught:
        DecisionTrace(tmp_path / "file" / "below")
    assert "metrics.record_directory" in caught.value.hint
    assert "DYN_KVBM_ENABLE_RECORD=0" in caught.value.hint


def test_events_beyond_the_queue_are_dropped_counted_and_reported(tmp_path, monkeypatch, caplog):
    gate, write = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (gate.wait(20), write(fd, data))[1])
    trace = DecisionTrace(tmp_path, capacity=4)
    rig = traced_rig(trace)
    hashes = rig.fill("a", 2)
    began_s = time.monotonic()
    for _ in range(1000):
        rig.leader.match("r", hashes, 0)
    assert time.monotonic() - began_s < 5
    dropped = rig.leader.counters.record_dropped_calls
    assert dropped > 900
    gate.set()
    # Until all that was not dropped is written.
    eventually(trace._events.empty)
    rig.leader.match("r", hashes, 0)
    trace.close()
    rig.close()
    lines = lines_of(trace.path)
    assert lines[-1] == {**lines[-1], "call": "end", "dropped": dropped}
    assert any(line["call"] == "dropped" and line["calls"] == dropped for line in lines)
    assert caplog.messages.count(f"kvbm: recording queue full; dropping events ({trace.path})") == 1
    assert f"kvbm: recording {trace.path} is incomplete: {dropped} events dropped" in caplog.messages


def test_recording_that_cannot_be_written_in_time_is_reported_as_incomplete(tmp_path, monkeypatch, caplog):
    gate, write = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (gate.wait(20), write(fd, data))[1])
    monkeypatch.setattr(decision_trace, "CLOSE_TIMEOUT_S", 0.05)
    trace = DecisionTrace(tmp_path)
    trace.close()
    assert f"kvbm: recording {trace.path} is incomplete: not written within 0.05 s" in caplog.messages
    gate.set()
    eventually(lambda: [line["call"] for line in lines_of(trace.path)] == ["begin", "end"])


def test_file_that_cannot_be_written_ends_the_recording_and_nothing_else(tmp_path, caplog):
    trace, lines = recorded(tmp_path, a_hit, max_bytes=300)
    assert lines[0]["call"] == "begin"
    assert trace.path.stat().st_size <= 300
    assert f"kvbm: recording {trace.path} stopped: size limit of 300 bytes reached" in caplog.messages


def test_a_recorded_leader_decides_as_any_other(tmp_path):
    def decide(rig):
        a_hit(rig)
        rig.fill("b", 20) if rig.g1.block_count > 20 else rig.fill("b", 8)
        return rig.leader.counters, rig.leader.blocks()

    plain, said = Rig(), {}
    expected = decide(plain)
    plain.close()
    recorded(tmp_path, lambda rig: said.update(got=decide(rig)))
    assert said["got"] == expected


# -- a separate port ---------------------------------------------------------------------------------------------------


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
            if not sample.labels
        }


def test_series_are_served_on_a_separate_port_as_prometheus_reads_them():
    telemetry = Telemetry(MetricsSection(serve=True, port=0, log_interval_s=0))
    rig = Rig(trace=telemetry.trace)
    telemetry.watch(rig.leader)
    port = telemetry.server.port
    assert scrape(port)["kvbm_offload_blocks_d2h"] == 0
    rig.fill("a", 3)
    found = scrape(port)
    assert found["kvbm_offload_blocks_d2h"] == 3
    telemetry.close()
    rig.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_engines_of_one_server_have_ports_that_follow_each_other():
    base = choose_port("127.0.0.1", 0)
    ports = []
    for engine in (0, 1):
        telemetry = Telemetry(MetricsSection(serve=True, port=base), engine=engine)
        ports.append(telemetry.server.port)
        telemetry.close()
    assert ports == [base, base + 1]


def test_series_have_the_number_of_their_engine_as_label():
    telemetry = Telemetry(MetricsSection(serve=True, port=0, log_interval_s=0), engine=3)
    rig = Rig()
    telemetry.watch(rig.leader)
    with urllib.request.urlopen(f"http://127.0.0.1:{telemetry.server.port}/metrics", timeout=10) as answer:
        labels = set(re.findall(r'engine="(\d+)"', answer.read().decode()))
    assert labels == {"3"}
    telemetry.close()
    rig.close()


def test_port_that_is_in_use_is_an_error_that_names_variable_and_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem) as caught:
            Telemetry(MetricsSection(serve=True, port=port))
    assert caught.value.message == f"cannot listen on 127.0.0.1 port {port} for metrics: address already in use"
    assert "DYN_KVBM_METRICS_PORT" in caught.value.hint


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 6880), ("no.such.host.invalid", 6880), ("127.0.0.1", 65536)])
def test_address_that_does_not_exist_is_an_error_too(host, port):
    with pytest.raises(EnvironmentProblem, match=str(port)):
        MetricsServer(host, port)


def test_nothing_is_opened_unless_it_is_configured():
    before = threading.active_count()
    telemetry = Telemetry(MetricsSection(log_interval_s=0))
    rig = Rig(trace=telemetry.trace)
    telemetry.watch(rig.leader)
    assert telemetry.trace is None
    assert threading.active_count() == before
    assert rig.leader.counters.hit_rate(Tier.HOST) == 0
    telemetry.close()
    rig.close()


def test_clients_of_the_metrics_that_say_nothing_take_no_threads_and_write_nothing(capfd):
    server = MetricsServer("127.0.0.1", 0)
    threads = set(threading.enumerate())
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        for client in clients[:50]:
            client.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30).close()
        assert set(threading.enumerate()) <= threads  # one of an earlier test may end
    finally:
        for client in clients:
            client.close()
    server.close()
    assert capfd.readouterr().err == ""


def test_a_client_that_ends_its_side_gets_the_whole_page(monkeypatch):
    monkeypatch.setattr(bounded_server, "CLIENT_TIMEOUT_S", 60)
    server = MetricsServer("127.0.0.1", 0)
    server.show(Gauge("one", "x" * 2**23, registry=None))
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as answer:
            assert len(answer.read()) > 2**23
    server.close()
