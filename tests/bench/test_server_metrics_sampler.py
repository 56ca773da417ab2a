"""The sampler against a server whose page the test controls: rate, faults, and its end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from metrics_server import MetricsServerForTests
from waiting import eventually, is_gone

from kvbm.errors import EnvironmentProblem
from kvbm_cli.bench.metrics.sampler import START_TIMEOUT_S, Sampler
from kvbm_cli.bench.metrics.summary import summarise
from kvbm_cli.system.usage import Gpus, ProcessTree

ROOT = Path(__file__).resolve().parents[2]
INTERVAL_S = 0.1
PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} %d
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 20.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 30.0
vllm:request_success_total{finished_reason="length"} %d
"""


def page(number: int) -> str:
    return PAGE % (number, number)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server-metrics.jsonl"


@pytest.fixture
def server():
    with MetricsServerForTests(page(1)) as running:
        yield running


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_first_sample_is_written_before_the_run_and_the_last_one_after_it(server, path):
    path.write_text("samples of an earlier attempt\n")
    with Sampler.start(path, base_url=server.url, interval_s=60) as sampler:
        assert [line["prompt_tokens"]["g1"] for line in lines(path)] == [1]
        server.text = page(5)
    assert [line["prompt_tokens"]["g1"] for line in lines(path)] == [1, 5]
    assert sampler.failure is None
    assert sampler.path == path
    summary = summarise(path)
    assert summary["requests"] == 4
    assert summary["prompt_tokens"] == {"g1": 4, "g2": 0, "g3": 0, "g4": 0, "computed": 0}
    assert summary["caveats"] == []


def test_samples_follow_the_interval_and_count_from_the_start_of_the_run(server, path):
    start_ns = time.perf_counter_ns() + 60 * 10**9  # the run starts later than the sampler
    with Sampler.start(path, base_url=server.url, interval_s=INTERVAL_S, start_ns=start_ns):
        time.sleep(10.5 * INTERVAL_S)
    times = [line["t_ms"] for line in lines(path)]
    assert -60_000 < times[0] < 0
    assert 4 <= len(times) <= 13  # 12 on an idle machine
    assert times == sorted(times)
    assert times[-1] - times[0] > 1e3 * 10 * INTERVAL_S


def test_a_page_that_takes_longer_than_the_interval_does_not_pile_up(server, path):
    server.delay_s = 2.5 * INTERVAL_S
    with Sampler.start(path, base_url=server.url, interval_s=INTERVAL_S):
        time.sleep(12 * INTERVAL_S)
    found = lines(path)
    assert all("error" not in line for line in found)
    assert 3 <= len(found) <= 8
    assert len(server.requests) <= len(found) + 1


def test_one_slow_page_is_not_followed_by_a_burst(server, path):
    with Sampler.start(path, base_url=server.url, interval_s=INTERVAL_S):
        server.delay_s = 8 * INTERVAL_S
        eventually(lambda: len(server.requests) >= 2)
        server.delay_s = 0
        time.sleep(13 * INTERVAL_S)
    assert len(lines(path)) <= 10  # 8 missed samples are not made up for


def test_an_answer_to_an_earlier_sample_is_ignored(server, path):
    with Sampler.start(path, base_url=server.url, interval_s=INTERVAL_S):
        server.text, server.delay_s = page(2), 0.6
        eventually(lambda: len(server.requests) >= 2)
        time.sleep(0.3)
        server.text = page(5)
    assert lines(path)[-1]["prompt_tokens"]["g1"] == 5


def test_a_server_that_dies_leaves_lines_with_an_error(server, path):
    with Sampler.start(path, base_url=server.url, interval_s=INTERVAL_S) as sampler:
        eventually(lambda: len(lines(path)) >= 2)
        server.close()
        eventually(lambda: sum("error" in line for line in lines(path)) >= 2)
    assert sampler.failure is None
    last = lines(path)[-1]
    assert "refused" in last["error"]
    assert last["prompt_tokens"] is None
    assert last["running"] is None
    assert any("after" in caveat and "not known" in caveat for caveat in summarise(path)["caveats"])


def test_a_server_that_comes_back_is_sampled_again(path):
    with MetricsServerForTests(page(1)) as server, Sampler.start(path, base_url=server.url, interval_s=INTERVAL_S):
        server.status = 503
        eventually(lambda: "error" in lines(path)[-1])
        server.status = 200
        eventually(lambda: "error" not in lines(path)[-1])
    assert summarise(path)["prompt_tokens"] is not None


def test_a_server_that_hangs_delays_neither_the_start_nor_the_end(server, path):
    server.hangs = True
    started = time.monotonic()
    sampler = Sampler.start(path, base_url=server.url, interval_s=INTERVAL_S)
    try:
        assert time.monotonic() - started < START_TIMEOUT_S  # 1.5 s on an idle machine
        assert lines(path)[0]["error"].startswith("engine: no ")
        time.sleep(0.3)  # it waits for the next answer
    finally:
        sampler.stop()
    assert sampler.failure is None, "it was killed, because it did not end in time"
    assert max(line["took_ms"] for line in lines(path)) < 10e3  # 1.1 s on an idle machine
    assert summarise(path)["caveats"][-1] == "the server reported no metrics"


def test_a_sample_that_waits_does_not_delay_the_end(server, path):
    with Sampler.start(path, base_url=server.url, interval_s=1.5) as sampler:
        server.hangs = True
        eventually(lambda: len(server.requests) >= 2)  # this sample may take 2.5 s
    assert sampler.failure is None, "it was killed, because it did not end in time"
    assert ["error" in line for line in lines(path)] == [False, True]


def test_a_page_that_hangs_does_not_delay_the_other_one(server, path):
    server.text = 'kvbm_evicted_blocks 7.0\nkvbm_host_blocks{state="free"} 4.0\n'
    with MetricsServerForTests(page(1)) as engine:
        engine.hangs = True
        with Sampler.start(path, base_url=engine.url, kvbm_metrics_url=f"{server.url}/metrics", interval_s=INTERVAL_S):
            pass
    first = lines(path)[0]
    assert first["error"].startswith("engine: no ")
    assert first["evictions"] == 7
    assert first["facts"] == {"g2_blocks": 4}


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("<html><body>Not a page of metrics</body></html>", 200, "engine: the answer has no metrics"),
        (b"\xff\xfe\x00\x80" * 100, 200, "engine: the answer has no metrics"),
        ('{"error": {"message": "no such page"}}', 404, "engine: HTTP 404: no such page"),
    ],
)
def test_a_page_without_metrics_is_an_error(server, path, text, status, error):
    server.text, server.status = text, status
    with Sampler.start(path, base_url=server.url):
        pass
    assert [line["error"] for line in lines(path)] == [error, error]


def test_damaged_series_are_left_out(server, path):
    server.text = page(1) + "vllm:num_preemptions_total{ 5\nvllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc x\n"
    with Sampler.start(path, base_url=server.url):
        pass
    assert [(line["waiting"], line["kv_usage"], line["running"]) for line in lines(path)] == [(None, None, 3)] * 2
    assert summarise(path)["preemptions"] is None


def test_headers_are_sent_but_no_user_sees_them(server, path):
    with Sampler.start(path, base_url=server.url, headers={"X-Secret": "0123456789"}) as sampler:
        command = Path(f"/proc/{sampler.pid}/cmdline").read_bytes()
        assert os.getpgid(sampler.pid) == sampler.pid  # Ctrl-C in a terminal does not end it before its last sample
    assert server.requests[-1].headers["x-secret"] == "0123456789"
    assert b"0123456789" not in command
    assert "0123456789" not in path.read_text()


@pytest.mark.parametrize("has_heir", [False, True], ids=["", "another process holds its input open"])
def test_the_sampler_ends_with_its_parent(server, path, has_heir):
    code = (
        "import os, sys, time; from pathlib import Path; from kvbm_cli.bench.metrics.sampler import Sampler\n"
        f"sampler = Sampler.start(Path({str(path)!r}), base_url={server.url!r}, interval_s=0.1)\n"
        f"heir = os.fork() if {has_heir} else 0\n"
        f"if heir or not {has_heir}: print(sampler.pid, heir, flush=True)\n"
        "time.sleep(20)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    pid, heir = map(int, parent.stdout.readline().split())
    try:
        assert not is_gone(pid)
        parent.kill()
        eventually(lambda: is_gone(pid))
        assert not has_heir or not is_gone(heir)
    finally:
        if has_heir:
            os.kill(heir, signal.SIGKILL)
        parent.kill()
        parent.communicate()
    assert all("error" not in line for line in lines(path))


def test_a_sampler_that_was_killed_is_reported(server, path):
    with Sampler.start(path, base_url=server.url, interval_s=60) as sampler:
        os.kill(sampler.pid, signal.SIGKILL)
        eventually(lambda: is_gone(sampler.pid))
    assert sampler.failure is not None
    assert "exit code -9" in sampler.failure
    assert "the server reported metrics only once" in summarise(path)["caveats"][0]
    assert sampler.summary()["caveats"][-1] == f"the server metrics cover only a part of the run: {sampler.failure}"
    sampler.stop()


def test_a_file_that_cannot_be_written_is_an_error(server, tmp_path):
    with pytest.raises(EnvironmentProblem, match=r"cannot write .*missing/file"):
        Sampler.start(tmp_path / "missing/file", base_url=server.url)


def test_memory_cpu_time_and_disk_traffic_of_all_descendants(server, path):
    burn = "sum(i * i for i in range(3_000_000)); data = bytearray(b'1') * 50_000_000"
    child = f"import subprocess, sys, time; {burn}; print('up', flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0)
    try:
        assert parent.stdout.readline() == b"up\n"
        with Sampler.start(path, base_url=server.url, pid=parent.pid):
            pass
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    last = lines(path)[-1]
    assert last["rss_bytes"] > 50_000_000
    assert last["cpu_s"] > 0.05
    summary = summarise(path)
    assert summary["peaks"]["rss_bytes"] >= last["rss_bytes"]
    assert summary["cpu_s"] is not None
    assert summary["cpu_s"] >= 0
    assert summary["disk"]["written_bytes"] in (None, 0)


def fake_process(proc: Path, pid: int, parent: int, *, ticks: int, io: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a) b) S {parent} {pid} 1 0 0 0 0 0 0 0 {ticks} 1 2 3 0 0\n")
    (folder / "status").write_text("Name:\ta\nVmRSS:\t  100 kB\nRssShmem:\t  40 kB\n")
    (folder / "io").write_text(io)


IO = "rchar: 9\nread_bytes: 100\nwrite_bytes: 70\ncancelled_write_bytes: 20\n"


def test_children_count_and_strangers_do_not(tmp_path, monkeypatch):
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        fake_process(tmp_path, pid, parent, ticks=4, io=IO)
    tree = ProcessTree(10, proc=tmp_path)
    usage = tree.usage()
    assert tree.pids == {10, 11, 12}
    assert (usage.processes, usage.rss_bytes, usage.shared_bytes) == (3, 3 * 102_400, 3 * 40_960)
    assert usage.cpu_s == pytest.approx(3 * 10 / os.sysconf("SC_CLK_TCK"))
    assert (usage.read_bytes, usage.written_bytes) == (300, 150)
    read_text = Path.read_text

    def refuse(self, *arguments, **options):
        if self == tmp_path / "11/io":
            raise PermissionError
        return read_text(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    usage = ProcessTree(10, proc=tmp_path).usage()
    assert (usage.rss_bytes, usage.read_bytes, usage.written_bytes) == (3 * 102_400, None, None), "traffic is unknown"
    usage = ProcessTree(30, proc=tmp_path).usage()
    assert (usage.processes, usage.rss_bytes, usage.cpu_s, usage.read_bytes) == (0, None, None, None), "it has ended"


class NvmlError(Exception): ...


def energy_of(gpu: int) -> int:
    if gpu == 1:
        raise NvmlError
    return 7500


# The functions of pynvml that kvbm uses. GPU 1 reports no energy.
NVML = SimpleNamespace(
    NVMLError=NvmlError,
    nvmlDeviceGetCount=lambda: 3,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetComputeRunningProcesses=lambda gpu: [SimpleNamespace(pid=100 + gpu)],
    nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=40, memory=9),
    nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=5 << 30),
    nvmlDeviceGetTotalEnergyConsumption=energy_of,
)


def test_only_the_gpus_of_the_engine_count():
    gpus = Gpus(NVML)
    assert gpus.sample({101}) == [{"index": 1, "utilisation": 0.4, "memory_bytes": 5 << 30, "energy_j": None}]
    assert [gpu["index"] for gpu in gpus.sample({999})] == [0, 1, 2]  # unknown process ids: a container
    assert gpus.sample({100})[0]["energy_j"] == 7.5
    assert Gpus(None).sample({100}) == []
