"""Full disks, closed streams, hangups, noise: what surrounds the command must not make it lie, hang or crash."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from bench_rig import WORKLOAD, MockEngines
from kvbm_cli.bench.output_directory import OutputDirectory
from terminal import PROGRAM, environment
from test_bench_command import measure, summary_of
from test_bench_verdict import GOOD
from test_serve import home, serving  # noqa: F401

from kvbm.embedded.http.server import Server
from kvbm.errors import EnvironmentProblem
from kvbm_cli.bench.analysis.paired import paired_ratio
from kvbm_cli.bench.verdicts.verdict import Verdict, judge
from kvbm_cli.engine.process import _open_log


@pytest.mark.parametrize(("users", "turns"), [(1, 2), (1, 4), (2, 4), (6, 4)])
def test_noise_alone_is_hardly_ever_called_faster(users: int, turns: int) -> None:
    said = 0
    for seed in range(300):
        noise = random.Random(seed).gauss
        pairs = {
            user: [(100 * math.exp(noise(0, 0.2)), 100 * math.exp(noise(0, 0.2))) for _ in range(turns - 1)]
            for user in range(users)
        }
        ours, theirs = (median(pair[side] for user in pairs.values() for pair in user) for side in (1, 0))
        evidence = replace(GOOD, ratio=paired_ratio({1: pairs}), reference_ttft_ms=theirs, measured_ttft_ms=ours)
        said += judge(evidence).verdict is Verdict.FASTER
    assert said <= 0.05 * 300


def test_slower_by_its_median_is_never_faster() -> None:
    ratio = paired_ratio({1: {user: [(100.0, 110.0), (100.0, 110.0), (3000.0, 100.0)] for user in range(6)}})
    assert judge(replace(GOOD, ratio=ratio, reference_ttft_ms=100.0, measured_ttft_ms=110.0)).verdict is Verdict.SAME


def test_hangup_that_the_parent_ignores_does_not_stop_serve(home: Path) -> None:  # noqa: F811
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with serving(home) as program:
            program.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                program.wait(timeout=1.5)
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_closed_stderr_and_a_poor_encoding_are_no_bug(home: Path) -> None:  # noqa: F811
    command = [*PROGRAM, "profile", "show", "demo", "--set", "description=日本"]
    ascii_only = {**environment(home), "PYTHONIOENCODING": "ascii"}
    assert subprocess.run(command, env=ascii_only, capture_output=True).returncode == 0
    closed = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *PROGRAM, "profile", "show", "nope"], env=environment(home), capture_output=True
    )
    assert closed.returncode == 2


def test_a_log_must_be_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/full"), tmp_path / "fifo", tmp_path):
        with pytest.raises(EnvironmentProblem):
            _open_log(path)
    _open_log(Path("/dev/null")).close()


def test_brackets_in_names_are_text_and_40_columns_lose_nothing(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert measure(tmp_path, MockEngines(), as_json=False, workload=WORKLOAD.model_copy(update={"name": "[/x]"})) == 0
    page = capsys.readouterr().out
    assert "[/x]" in page
    assert "…" not in page


def test_a_full_disk_is_no_bug_and_leaves_a_marked_run(tmp_path, monkeypatch, caplog) -> None:
    def full(self, row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OutputDirectory, "append_request", full)
    with pytest.raises(EnvironmentProblem, match="no space left"):
        measure(tmp_path, MockEngines())
    assert summary_of(tmp_path)["complete"] is False
    gc.collect()
    assert caplog.records == [], "asyncio logs the exceptions of tasks that nobody looked at"


@pytest.mark.parametrize("content", [b"\xff", b"a: " + b"[" * 5000])
def test_a_workload_that_cannot_be_read_is_the_users_mistake(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.yaml").write_bytes(content)
    command = [*PROGRAM, "bench", "--profile", "demo", "--workload", str(tmp_path / "w.yaml")]
    outcome = subprocess.run(command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert outcome.returncode == 2
    assert "bug" not in outcome.stderr


def test_a_server_whose_log_is_full_goes_on(monkeypatch) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Full())
    Server._say(None, "stopping")  # type: ignore[arg-type]
