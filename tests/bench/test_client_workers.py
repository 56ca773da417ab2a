import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from client_rig import drive_plan, open_loop, plan_of, planned, target_of
from openai_mock import Answer, OpenAIMock
from test_client_drive import in_flight_at_most, session_plan

from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.bench.load import drive as workers
from kvbm_cli.bench.load.drive import drive, estimated_load, parts_of, worker_count

earlier: set[int] = set()  # processes that other tests left, such as a resource tracker of multiprocessing


@pytest.fixture(autouse=True)
def _earlier():
    earlier.clear()
    earlier.update(children())


def children() -> list[int]:
    """The processes that a test started, except zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(int(path.parent.name))
    return [pid for pid in found if pid not in earlier]


@pytest.mark.soak
def test_two_processes_give_the_records_of_one():
    plan = session_plan(6, 2, concurrency=4)
    _, of_one, _ = drive_plan(plan, Answer(cached_tokens=4), workers=1)
    result, of_two, mock = drive_plan(plan, Answer(cached_tokens=4), workers=2)
    assert result.health.workers == 2
    assert len(mock.arrivals) == 12

    def known(record):
        return record.index, record.error, record.token_ids, record.prompt_tokens, record.cached_tokens, record.phase

    assert [known(record) for record in of_two] == [known(record) for record in of_one]
    assert in_flight_at_most(of_two, lambda record: record.session) <= 4
    for record in of_two:
        if record.turn > 1:
            assert record.intended_ms == of_two[record.index - 1].end_ms


def test_processes_launch_at_times_of_one_clock():
    plan = open_loop(20, 0.03)
    result, records, mock = drive_plan(plan, workers=2)
    assert [record.intended_ms for record in records] == pytest.approx([30.0 * index for index in range(20)])
    late_ms = sorted(record.lateness_ms for record in records)
    assert late_ms[0] >= 0
    assert late_ms[14] < 100, "a quarter may be late on a busy machine, but not one of two processes"
    arrived_ms = {
        int(arrival.headers["x-request-id"].rpartition("-")[2]): (arrival.complete_s - result.start_ns / 1e9) * 1e3
        for arrival in mock.arrivals
    }
    on_the_way_ms = sorted(arrived_ms[record.index] - record.launched_ms for record in records)
    assert on_the_way_ms[0] > 0
    assert on_the_way_ms[14] < 100
    assert len(result.health.cpu_shares) == 2
    assert all(0 < share < 1 for share in result.health.cpu_shares)


def test_a_killed_worker_ends_the_drive_with_an_error():
    with OpenAIMock(Answer(first_ms=3000)) as mock:

        def kill_one() -> None:
            while not mock.arrivals and not over.wait(0.01):
                pass
            os.kill(children()[0], signal.SIGKILL)

        over = threading.Event()
        threading.Thread(target=kill_one, daemon=True).start()
        with pytest.raises(EnvironmentProblem, match=r"load worker [12] of 2 \(pid \d+\) was killed by SIGKILL before"):
            asyncio.run(drive(open_loop(4, 0.01), [target_of(mock.url)], on_record=lambda record: None, workers=2))
        over.set()
    assert children() == []


def test_a_worker_that_cannot_start_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", "raise SystemExit('no module named aiohttp')"))
    with pytest.raises(EnvironmentProblem, match="ended with status 1 before its requests: no module named aiohttp"):
        asyncio.run(drive(open_loop(4, 0.01), [target_of("http://127.0.0.1:1")], on_record=print, workers=2))


@pytest.mark.parametrize("workers", [1, 2])
def test_cancelling_ends_requests_and_workers(workers):
    async def cancelled() -> None:
        plan, targets = open_loop(4, 0.01), [target_of(mock.url)]
        task = asyncio.create_task(drive(plan, targets, on_record=seen.append, workers=workers))
        while not mock.arrivals:
            await asyncio.sleep(0.01)
        assert len(children()) == (0 if workers == 1 else 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    seen: list[object] = []
    with OpenAIMock(Answer(stall_after=1)) as mock:
        asyncio.run(cancelled())
    assert (seen, children()) == ([], [])


def test_an_engine_that_ends_fails_the_requests_of_all_workers():
    over = threading.Event()
    with OpenAIMock(Answer(stall_after=1)) as mock:

        def end() -> None:
            while len(mock.arrivals) < 4:
                over.wait(0.01)
            over.set()

        threading.Thread(target=end, daemon=True).start()
        target = target_of(mock.url, has_ended=over.is_set)
        result = asyncio.run(drive(open_loop(4, 0.01), [target], on_record=lambda record: None, workers=2))
    assert [record.error for record in result.records[target.run]] == ["the engine ended"] * 4


def test_workers_do_not_import_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    _, records, _ = drive_plan(open_loop(2, 0.01), workers=2)
    assert all(record.is_ok for record in records)


def test_parts_keep_linked_sessions_together_and_divide_the_rest():
    requests = [planned(index, session=index // 2, after=(index - 1,) if index % 2 else ()) for index in range(20)]
    requests[10] = planned(10, session=5, after=(1,))  # session 5 awaits session 0
    parts = parts_of(plan_of(requests, concurrency=5), 2)
    assert sorted(request.index for part in parts for request in part.requests) == list(range(20))
    assert [part.concurrency for part in parts] == [3, 2]
    for part in parts:
        own = {request.index for request in part.requests}
        assert all(index in own for request in part.requests for index in request.after)
        assert [request.index for request in part.requests] == sorted(own)
        assert 8 <= len(own) <= 12
    assert Counter(part.concurrency for part in parts_of(open_loop(4, 1), 2)) == {None: 2}


def test_the_number_of_workers_follows_from_the_load(monkeypatch):
    monkeypatch.setattr(workers, "_cores", lambda: 8)
    small, large = open_loop(50, 0.1), open_loop(5000, 0.002, tokens=20)
    assert estimated_load(small, 1) < 0.05
    assert estimated_load(large, 1) == pytest.approx(500 * (0.00035 + 20 * 0.00008), rel=0.05)
    assert estimated_load(large, 2) == pytest.approx(2 * estimated_load(large, 1))
    assert worker_count(small, 1, "auto") == 1
    assert worker_count(large, 1, "auto") == 2
    assert worker_count(large, 20, "auto") == 7, "one core is left for the engine"
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    assert worker_count(large, 20, "auto") == 1
    assert worker_count(small, 1, 3) == 3
    assert worker_count(session_plan(8, 2, concurrency=2), 1, 3) == 2, "at most one per session in flight"
    assert worker_count(session_plan(1, 5), 1, 3) == 1, "a session is never divided"
    assert estimated_load(session_plan(400, 2, concurrency=100), 1) > 0.4
    with pytest.raises(UsageError, match="at least 1"):
        worker_count(small, 1, 0)


def test_a_burst_counts_as_much_as_its_ten_seconds():
    burst = [planned(index, intended_s=1000.0 + index * 0.01, tokens=20) for index in range(1000)]
    assert estimated_load(plan_of([planned(0, intended_s=0.0), *burst]), 1) == pytest.approx(
        100 * (0.00035 + 20 * 0.00008), rel=0.05
    )
