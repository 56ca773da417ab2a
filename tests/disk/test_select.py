"""Which I/O a tier gets, and a NIXL that hangs, crashes, lies, or is not there."""

from __future__ import annotations

import importlib.util
import logging
import mmap
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from fake_nixl import FakeNixl

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.io import select as module
from kvbm.tiers.disk.io.nixl import GDS, NixlIO
from kvbm.tiers.disk.io.select import GPU, MODULES, Choice, Rates, benchmark_nixl, choose_io, open_io, try_nixl
from kvbm.tiers.disk.io.threads import IoRun

HAS_NIXL = importlib.util.find_spec("nixl_cu13") or importlib.util.find_spec("nixl_cu12")


class Trials:
    """Answers of the trial by queue; notes which were asked."""

    def __init__(self, **complaints: str | None) -> None:
        self.complaints, self.asked = complaints, []

    def __call__(self, directory: Path, queue: str) -> str | None:
        self.asked.append(queue)
        return self.complaints[queue]


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    fake = FakeNixl()
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", fake.api)
    monkeypatch.setitem(sys.modules, "nixl_cu13._bindings", fake.bindings)
    return fake


NIXL_WINS, THREADS_WIN, TIE = (4e9, 5e9), (5e9, 4e9), (5e9, 5.2e9)


def choose(wanted: str, trials: Trials, *, rates: Rates | str = NIXL_WINS, o_direct: bool = True) -> Choice:
    def benchmark(directory: Path, queue: str, block_bytes: int) -> Rates | str:
        assert (directory, block_bytes) == (Path("/nowhere"), 4096)
        return rates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "try_nixl", trials)
        patch.setattr(module, "benchmark_nixl", benchmark)
        return choose_io(wanted, Path("/nowhere"), block_bytes=4096, o_direct=o_direct)


@pytest.mark.parametrize("wanted", ["nixl", "auto"])
def test_better_queue_is_taken_where_it_works(wanted: str) -> None:
    trials = Trials(uring=None, aio=None)
    choice = choose(wanted, trials)
    assert (choice.queue, trials.asked) == ("uring", ["uring"])


@pytest.mark.parametrize("wanted", ["nixl", "auto"])
def test_second_queue_is_taken_where_the_first_is_denied(wanted: str) -> None:
    choice = choose(wanted, Trials(uring="it is denied", aio=None))
    assert choice.queue == "aio"
    assert (
        choice.reason
        == {
            "nixl": "the test of aio passed; uring: it is denied",
            "auto": "benchmark: 5.00 GB/s by NIXL with aio, 4.00 GB/s by threads",
        }[wanted]
    )


def test_auto_without_a_working_nixl_takes_threads_and_says_why() -> None:
    choice = choose("auto", Trials(uring="it is denied", aio="it hangs"))
    assert choice == Choice(None, "NIXL does not work on this machine (uring: it is denied; aio: it hangs)")


def test_wanted_nixl_that_does_not_work_is_an_error_that_names_the_key() -> None:
    with pytest.raises(EnvironmentProblem) as raised:
        choose("nixl", Trials(uring="it is denied", aio="it hangs"))
    assert raised.value.message == (
        "`tiers.disk.io: nixl` does not work on this machine: uring: it is denied; aio: it hangs"
    )
    assert "`tiers.disk.io: auto`" in (raised.value.hint or "")


@pytest.fixture
def gds_may_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPU", "MODULES"):
        (tmp_path / name).touch()
        monkeypatch.setattr(module, name, tmp_path / name)


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [("GPU", "no GPU ({} does not exist)"), ("MODULES", "its driver hangs without {}")],
)
def test_gds_is_not_even_tried_where_it_cannot_work(
    gds_may_be_tried: None, tmp_path: Path, missing: str, complaint: str
) -> None:
    (tmp_path / missing).unlink()
    trials = Trials(gds=None)
    with pytest.raises(EnvironmentProblem) as raised:
        choose("gds", trials)
    said = complaint.format(tmp_path / missing)
    assert raised.value.message == f"`tiers.disk.io: gds` does not work on this machine: gds: {said}"
    assert trials.asked == []


@pytest.mark.usefixtures("gds_may_be_tried")
def test_gds_is_taken_only_when_asked_for_and_after_a_trial() -> None:
    trials = Trials(gds=None, uring=None)
    assert choose("gds", trials) == Choice("gds", "the test of gds passed")
    assert choose("auto", trials).queue == choose("nixl", trials).queue == "uring"
    assert trials.asked == ["gds", "uring", "uring"]
    with pytest.raises(EnvironmentProblem, match="gds: it moved nothing"):
        choose("gds", Trials(gds="it moved nothing"))


@pytest.mark.skipif(not HAS_NIXL, reason="needs nixl")
@pytest.mark.skipif(GPU.exists() and MODULES.exists(), reason="GPUDirect Storage may work here")
def test_real_trial_of_gds_without_a_gpu_says_that_it_does_not_load(tmp_path: Path) -> None:
    complaint = try_nixl(tmp_path, GDS)
    assert complaint is not None
    assert "NIXL cannot use gds on this machine" in complaint or "no answer in" in complaint


@pytest.mark.parametrize(
    ("rates", "queue", "reason"),
    [
        (NIXL_WINS, "uring", "benchmark: 5.00 GB/s by NIXL with uring, 4.00 GB/s by threads"),
        (THREADS_WIN, None, "benchmark: 4.00 GB/s by NIXL with uring, 5.00 GB/s by threads"),
        (TIE, None, "benchmark: 5.20 GB/s by NIXL with uring, 5.00 GB/s by threads"),
        ("no answer in 20 s", None, "the benchmark of NIXL failed: no answer in 20 s"),
    ],
)
def test_auto_takes_nixl_only_where_it_is_faster(rates: Rates | str, queue: str | None, reason: str) -> None:
    choice = choose("auto", Trials(uring=None), rates=rates)
    assert (choice.queue, choice.reason) == (queue, reason)
    assert choose("nixl", Trials(uring=None), rates=rates).queue == "uring"


def test_auto_takes_threads_for_the_page_cache() -> None:
    assert choose("auto", Trials(), o_direct=False).queue is None
    assert choose("nixl", Trials(uring=None), o_direct=False).queue == "uring"


@pytest.mark.parametrize(
    ("wanted", "rates", "name"),
    [("nixl", THREADS_WIN, "nixl"), ("auto", NIXL_WINS, "nixl"), ("auto", THREADS_WIN, "threads"), ("gds", TIE, "gds")],
)
@pytest.mark.usefixtures("gds_may_be_tried")
def test_opened_io_moves_bytes_of_the_arena_and_is_one_line_of_the_log(
    nixl: FakeNixl,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    rates: Rates,
    name: str,
) -> None:
    """GPUDirect Storage is a plugin of NIXL, which moves host memory too."""
    caplog.set_level(logging.INFO, module.__name__)
    monkeypatch.setattr(module, "try_nixl", Trials(uring=None, gds=None))
    monkeypatch.setattr(module, "benchmark_nixl", lambda directory, queue, block_bytes: rates)
    shards = [np.frombuffer(mmap.mmap(-1, 2 * 4096), np.uint8).reshape(2, 4096)]
    shards[0][0] = 7
    with (tmp_path / "arena").open("w+b") as file:
        io = open_io(wanted, file.fileno(), path=tmp_path / "arena", shards=shards, is_direct=True)
        io.write([IoRun(0, [shards[0][0]])])
        io.read([IoRun(0, [shards[0][1]])])
        assert not isinstance(io, NixlIO) or io.redone_count == 0
        io.close()
    assert io.name == name
    assert (shards[0][1] == 7).all()
    assert [agent.backend[0] for agent in nixl.agents] == {"nixl": ["POSIX"], "gds": ["GDS"]}.get(name, [])
    assert [f"`tiers.disk.io: {wanted}` uses {name}: " in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        (("/bin/sh", "-c", "kill -SEGV $$"), "the test was ended by signal 11"),
        (("/bin/sh", "-c", "echo noise >&2; echo it is broken; exit 1"), "it is broken"),
        (("/bin/false",), "no output"),
        (("/no/such/program",), "cannot run the test: No such file or directory"),
    ],
)
def test_trial_that_fails_is_a_complaint_its_last_line_if_it_has_one(
    tmp_path: Path, program: tuple[str, ...], complaint: str
) -> None:
    assert try_nixl(tmp_path, "uring", program=program) == complaint


def test_trial_that_hangs_is_ended_in_time(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = ("/bin/sh", "-c", f"sleep 60 & echo $! > {pid}; wait")
    before = time.monotonic()
    assert try_nixl(tmp_path, "uring", timeout_s=0.5, program=program) == "no answer in 0.5 s"
    assert time.monotonic() - before < 10
    assert not is_running(int(pid.read_text()))


def is_running(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.01)
    return True


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: `pip install 'kvbm-cli[nixl]'`")
def test_real_trial_passes_and_leaves_nothing(tmp_path: Path) -> None:
    assert None in [try_nixl(tmp_path, queue) for queue in ("uring", "aio")]
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed: `pip install 'kvbm-cli[nixl]'`")
def test_real_race_times_both_and_leaves_nothing(tmp_path: Path) -> None:
    queue = next(queue for queue in ("uring", "aio") if try_nixl(tmp_path, queue) is None)
    rates = benchmark_nixl(tmp_path, queue, 256 << 10)
    assert not isinstance(rates, str), rates
    assert all(1e6 < rate < 1e12 for rate in rates)
    assert os.listdir(tmp_path) == []


def test_race_on_a_full_disk_says_so(nixl: FakeNixl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["choose_io", str(tmp_path), "uring", "4096"])
    monkeypatch.setattr(module, "_move_all", lambda io, rows: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert module.main() == 1


def test_race_that_hangs_or_complains_is_none(tmp_path: Path) -> None:
    hangs = ("/bin/sh", "-c", "sleep 60")
    assert benchmark_nixl(tmp_path, "uring", 4096, timeout_s=0.3, program=hangs) == "no answer in 0.3 s"
    complains = ("/bin/sh", "-c", "echo it is broken; exit 1")
    assert benchmark_nixl(tmp_path, "uring", 4096, program=complains) == "it is broken"


@pytest.mark.parametrize("said", ["a plugin says goodbye", "1e9 2e9 3e9", "1e9"])
def test_race_that_says_something_else_is_a_complaint(tmp_path: Path, said: str) -> None:
    assert benchmark_nixl(tmp_path, "uring", 4096, program=("/bin/echo", said)) == f"unexpected output `{said}`"


def test_race_whose_last_word_is_not_its_own_takes_threads(tmp_path: Path) -> None:
    program = ("/bin/sh", "-c", "echo 1e9 2e9; echo an agent is destroyed >&2")
    choice = choose("auto", Trials(uring=None), rates=benchmark_nixl(tmp_path, "uring", 4096, program=program))
    assert choice == Choice(None, "the benchmark of NIXL failed: unexpected output `an agent is destroyed`")


def test_trial_needs_no_place_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_get_default_tempdir", lambda: (_ for _ in ()).throw(FileNotFoundError(2, "none")))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert try_nixl(tmp_path, "uring", program=("/bin/true",)) is None


def test_trial_ends_itself_when_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(sys, "argv", ["choose_io", str(tmp_path / "gone"), "uring"])
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(SystemExit):
        runpy.run_module(module.__name__, run_name="__main__")
    assert alarms == [module.LONGEST_S]
    assert module.LONGEST_S > module.TRIAL_TIMEOUT_S


def test_interrupted_trial_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        pids.append(process.pid)
        if len(pids) == 1:
            raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        try_nixl(tmp_path, "uring", program=("/bin/sleep", "60"))
    assert not is_running(pids[0])


def test_real_trial_without_nixl_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nixl_cu13", "nixl_cu12"):
        (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('gone', name={package!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert try_nixl(tmp_path, "uring") == "NIXL is not installed"


def test_trial_in_a_directory_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert try_nixl(tmp_path / "gone", "uring") == f"{tmp_path / 'gone'}: No such file or directory"


def trial_here(directory: Path) -> str:
    return module._try_here(directory, "uring") or ""  # what the process of a trial does


@pytest.mark.parametrize(
    ("lies", "refused", "complaint"),
    [
        (True, set(), "past the end of a file"),
        (True, {"end"}, "bytes read differ"),
        (False, {"end"}, "NIXL could not move the bytes"),
    ],
)
def test_trial_finds_a_nixl_that_lies_or_moves_nothing(
    nixl: FakeNixl, tmp_path: Path, lies: bool, refused: set[str], complaint: str
) -> None:
    assert trial_here(tmp_path) == ""
    nixl.lies, nixl.refused = lies, refused
    assert complaint in trial_here(tmp_path)
