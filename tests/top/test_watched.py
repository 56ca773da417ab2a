"""Which engines `kvbm top` reads: runs that begin, end and are removed, and what their logs say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from metric_pages import FakeLeader, serving, sglang_text
from recorded_runs import NOBODY, facts

from kvbm.errors import UsageError
from kvbm_cli.runs.run_directory import RunDirectory, Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.top.figures import figures
from kvbm_cli.top.watched import EngineReader, MetricsTarget, last_warnings, of_runs, of_url


class Home:
    """Runs of a user, each with a server of metrics."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        made = Runs.writable()
        assert made is not None
        self.runs = made
        self._begun: list[RunDirectory] = []

    def begin(self, profile: str = "demo", **changes: object) -> RunDirectory:
        port = self._stack.enter_context(serving(FakeLeader()))
        run = self.runs.create(profile)
        known = {"url": f"http://127.0.0.1:{port}", "state": RunState.HEALTHY, "logs": {"engine": str(run.log)}}
        run.begin(facts(run.name, **{**known, **changes}))
        self._begun.append(run)
        return run

    def close(self) -> None:
        for run in self._begun:
            run.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with ExitStack() as stack:
        made = Home(stack)
        stack.callback(made.close)
        yield made


def shown(engines: EngineReader) -> dict[str, str]:
    return {one.name: one.problem for one in engines.read()}


def test_all_living_runs_are_read_and_new_ones_appear(home: Home) -> None:
    home.begin()
    engines = EngineReader(of_runs(None))
    assert shown(engines) == {"demo-1": ""}
    home.begin("other")
    assert shown(engines) == {"demo-1": "", "other-1": ""}


def test_an_engine_with_a_page_of_its_own_is_read_at_both(home: Home) -> None:
    leader = FakeLeader()
    leader.engine_text = sglang_text(100, running=3)
    with serving(leader) as port:
        address = f"http://127.0.0.1:{port}"
        home.begin("sglang", url=f"{address}/engine", metrics_url=f"{address}/metrics")
        home.begin("other", url=f"{address}/none", metrics_url=f"{address}/metrics")
        engines = EngineReader(of_runs(None))
        assert shown(engines) == {"sglang-1": "", "other-1": ""}
        requests = {one.name: figures([one.pair]).requests for one in engines.read() if one.pair is not None}
        assert requests == {"sglang-1": {"running": 3, "waiting": 0}, "other-1": {}}
        home.begin("gone", url="http://127.0.0.1:9", metrics_url=f"{address}/metrics")
        assert "refused" in shown(engines)["gone-1"]


def test_a_run_that_ends_keeps_its_row_until_its_profile_is_served_again(home: Home) -> None:
    run = home.begin()
    engines = EngineReader(of_runs("demo"))
    engines.read()
    (one,) = engines.read()
    assert one.pair is not None
    run.end(3, "out of memory")
    run.close()
    (one,) = engines.read()
    assert (one.problem, one.pair) == ("ended with exit code 3", None)
    home.begin()
    assert shown(engines) == {"demo-2": ""}


def test_a_run_that_starts_or_was_killed_is_not_asked(home: Home) -> None:
    home.begin(state=RunState.STARTING)
    assert shown(EngineReader(of_runs(None))) == {"demo-1": "starting"}
    dead = home.begin("dead", launcher=NOBODY)
    dead.close()
    assert shown(EngineReader(of_runs("dead"))) == {"dead-1": "dead"}


def test_a_run_directory_that_is_removed_meanwhile_is_no_error(home: Home) -> None:
    run = home.begin()
    engines = EngineReader(of_runs(None))
    engines.read()
    shutil.rmtree(run.path)
    run.close()
    assert set(shown(engines)) <= {"demo-1"}


def test_a_run_that_does_not_exist_is_an_error_at_the_start(home: Home) -> None:
    with pytest.raises(UsageError):
        of_runs("absent")


def test_a_baseline_has_no_cache(home: Home) -> None:
    home.begin(is_baseline=True)
    assert shown(EngineReader(of_runs(None))) == {"demo-1": "no cache: this is the baseline"}


def test_a_server_without_metrics_of_kvbm_says_so() -> None:
    with serving(FakeLeader()) as port:
        (target,) = of_url(f"http://127.0.0.1:{port}/")()
        assert target == MetricsTarget(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/metrics")
        (one,) = EngineReader(lambda: [MetricsTarget("a", f"http://127.0.0.1:{port}/absent")]).read()
    assert one.problem == "status 404"


def test_the_last_warnings_of_kvbm_are_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    lines = [f"12:00:0{second} kvbm: metrics at http://x" for second in range(3)]
    lines += ["(EngineCore pid=1) WARNING 11-27 12:00:00 [x.py:1] kvbm: the disk tier is off until a read has ended"]
    lines += ["WARNING something of the engine", "12:00:05 kvbm: exception 1 in `step`; continuing"]
    log.write_text("x" * 100_000 + "\n" + "\n".join(lines) + "\n")
    found = last_warnings(MetricsTarget("a", "", logs=(log, tmp_path / "absent")))
    assert [line.partition("kvbm: ")[2][:13] for line in found] == ["the disk tier", "exception 1 i"]
