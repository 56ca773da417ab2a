"""`profile check`, `serve --dry-run`, `serve` and `bench` find the same in a profile and on the machine.

A mistake in the profile ends all four with 2. A problem of the machine is a warning of the first two, and ends the
others with 1 before anything is started.
"""

import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import NOBODY, facts, own
from terminal import assert_entry, steps_of, stored_entries, transcript
from test_mistakes import LOCK
from test_mistakes import tools as tools  # the fixture
from test_runs import begin, begun

from kvbm.config.load import ResolvedProfile
from kvbm.engines.table import load
from kvbm.errors import EnvironmentProblem
from kvbm.host.machine_memory import HostMemory
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.machine_check import Severity, require_none
from kvbm_cli.profile.machine_problems import memory_check
from kvbm_cli.runs.reservations import pending_bytes, require_port, taken_ports
from kvbm_cli.runs.run_directory import EngineRun, Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.system.filesystem import missing_mount
from kvbm_cli.system.process_identity import ProcessIdentity


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", stored_entries("preflight"))
def test_all_commands_find_the_same(name, tmp_path, tools, monkeypatch):
    (tmp_path / "mnt").mkdir()
    monkeypatch.setattr("kvbm_cli.system.filesystem._FOR_MOUNTS", (tmp_path / "mnt",))
    entries = stored_entries("preflight")
    shown = transcript(entries[name], tmp_path, tools=tools)
    assert_entry("preflight", name, shown, names=entries)
    answers = [text for line, text in steps_of(shown) if line.startswith("kvbm")]
    assert [messages(answer) for answer in answers] == [messages(answers[0])] * len(answers)
    codes = [int(answer[len("exit code: ")]) for answer in answers]
    assert codes in ([2] * 4, [0, 0, 1, 1][: len(codes)]), "a mistake in the profile, or a problem of the machine"
    made = {path.name for path in tmp_path.rglob("*")} - {*LOCK, "mnt", "mine.yaml"}
    assert made <= {"loop", "broken", "link", "there"}, "something was started"


def messages(answer: str) -> list[str]:
    """The errors and warnings with their excerpts, without hints."""
    blocks = re.split(r"^(?:error|warning): ", answer.partition("----- stderr -----\n")[2], flags=re.MULTILINE)[1:]
    return [block.partition("\n\n")[0].rstrip("\n") for block in blocks]


FSTAB = (
    "# a comment\nUUID=1 / ext4 defaults 0 1\n/dev/sdb1 {home}/data\\040drive xfs noauto 0 0\nnone none swap sw 0 0\n"
)


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        ("{home}/data drive", "{home}/data drive is a mount point in {home}/fstab, but nothing is mounted there"),
        ("{home}/data drive/a/b", "{home}/data drive is a mount point in {home}/fstab, but nothing is mounted there"),
        ("{home}/data", None),
        ("{home}/a/b", None),
        ("/kvbm-absent", "/kvbm-absent does not exist: the drive may not be mounted"),
        ("/mnt/kvbm-absent/a/b", "/mnt/kvbm-absent does not exist: the drive may not be mounted"),
        ("/proc", None),
        ("/usr/kvbm-absent/a", None),
    ],
)
def test_missing_mount(tmp_path, directory, reason):
    (tmp_path / "fstab").write_text(FSTAB.format(home=tmp_path))
    (tmp_path / "data drive").mkdir()
    found = missing_mount(Path(directory.format(home=tmp_path)), fstab=tmp_path / "fstab")
    assert found == (None if reason is None else reason.format(home=tmp_path))


def test_no_fstab_is_no_problem(tmp_path):
    assert missing_mount(tmp_path / "a", fstab=tmp_path / "none") is None


MIB = 1 << 20
TOUCHER = "import mmap, sys; m = mmap.mmap(-1, 64 << 20); m.write(bytes(64 << 20)); print(flush=True); sys.stdin.read()"


def run(name: str, launcher: ProcessIdentity | None = None, **changes: object) -> EngineRun:
    return EngineRun(Path("/none"), facts(name, launcher, **changes), is_living=True)


def require_memory(
    resolved: ResolvedProfile,
    needed_bytes: int,
    living: list[EngineRun],
    *,
    memory: HostMemory,
    is_forced: bool | None = None,
) -> None:
    found = memory_check(resolved, needed_bytes, 1, living, memory=memory)
    require_none(resolved, [] if found.severity is Severity.OK else [found], is_forced=is_forced)


@pytest.fixture
def memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemAvailable: 1048576 kB\n")
    return HostMemory(proc=tmp_path, sys=tmp_path)


@pytest.fixture
def resolved():
    return load("demo", directories=[profiles_directory()])


def test_an_engine_that_starts_owes_what_it_has_not_taken():
    assert pending_bytes(run("a-1", state=RunState.HEALTHY, memory_bytes=99 * MIB)) == 0
    elsewhere = run("a-1", NOBODY, state=RunState.STARTING, memory_bytes=99 * MIB)
    assert pending_bytes(elsewhere) == 99 * MIB
    with subprocess.Popen([sys.executable, "-c", TOUCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        seen = run("a-1", ProcessIdentity.of(child.pid), state=RunState.STARTING, memory_bytes=99 * MIB)
        assert 30 * MIB <= pending_bytes(seen) <= 40 * MIB
        child.kill()


def test_engines_that_do_not_fit_together_are_refused(memory, resolved):
    starting = run("other-1", NOBODY, state=RunState.STARTING, memory_bytes=700 * MIB)
    require_memory(resolved, 300 * MIB, [starting], memory=memory)
    with pytest.raises(EnvironmentProblem) as caught:
        require_memory(resolved, 400 * MIB, [starting], memory=memory)
    assert caught.value.message.splitlines() == [
        "`tiers.host.capacity` requires 400.0 MiB, and starting engines another 700.0 MiB, in all 1.1 GiB, but only "
        "1.0 GiB are available (free memory of this machine)",
        "  other-1 (starting, pid 4194305 on another host) uses 700.0 MiB",
    ]


def test_the_sum_is_over_what_living_processes_have_recorded(tmp_path, memory, resolved):
    """Each launcher is a process of its own. One of them is killed: what it has recorded counts no longer."""
    (tmp_path / "runs").mkdir()
    runs = Runs(tmp_path)
    with ExitStack() as stack:
        launchers = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(3)]
        for launcher, mib in zip(launchers, (300, 400, 0), strict=True):
            begin(runs, "demo", ProcessIdentity.of(launcher.pid), memory_bytes=mib * MIB)
        try:
            with runs.starting() as living, pytest.raises(EnvironmentProblem) as caught:
                require_memory(resolved, 400 * MIB, living, memory=memory)
            assert caught.value.message.splitlines() == [
                "`tiers.host.capacity` requires 400.0 MiB, and starting engines another 700.0 MiB, in all 1.1 GiB, but "
                "only 1.0 GiB are available (free memory of this machine)",
                f"  demo-1 (starting, pid {launchers[0].pid}) uses 300.0 MiB",
                f"  demo-2 (starting, pid {launchers[1].pid}) uses 400.0 MiB",
            ]
            assert (caught.value.hint or "").startswith("run `kvbm stop demo-2`, or set `tiers.host.capacity: ")
            launchers[0].kill()
            launchers[0].wait()
            with runs.starting() as living:
                assert [run.name for run in living] == ["demo-2", "demo-3"]
                require_memory(resolved, 400 * MIB, living, memory=memory)
        finally:
            for launcher in launchers:
                launcher.kill()
            while begun:
                begun.pop().close()


def test_one_that_is_healthy_counts_in_what_the_kernel_says(memory, resolved):
    healthy = run("other-1", state=RunState.HEALTHY, memory_bytes=700 * MIB)
    require_memory(resolved, 1000 * MIB, [healthy], memory=memory)
    with pytest.raises(EnvironmentProblem):
        require_memory(resolved, 1025 * MIB, [healthy], memory=memory)


def test_one_without_reservations_is_refused_at_its_key(memory, resolved):
    require_memory(resolved, 1024 * MIB, [], memory=memory)
    with pytest.raises(EnvironmentProblem) as caught:
        require_memory(resolved, 1025 * MIB, [], memory=memory)
    expected = "`tiers.host.capacity` requires 1.0 GiB, but only 1.0 GiB are available (free memory of this machine)"
    assert caught.value.message.splitlines()[0] == expected
    assert caught.value.hint == "set `tiers.host.capacity: 966MB` or less"


def test_where_nothing_fits_no_size_is_advised(tmp_path, memory, resolved, monkeypatch):
    (tmp_path / "meminfo").write_text("MemAvailable: 1024 kB\n")
    for pending, remedy in ((0, "free memory"), (1, "free memory, or stop an engine that is starting")):
        monkeypatch.setattr("kvbm_cli.profile.machine_problems.pending_memory", lambda living, found=pending: found)
        with pytest.raises(EnvironmentProblem) as caught:
            require_memory(resolved, 400 * MIB, [], memory=memory)
        assert caught.value.hint == remedy


def test_only_a_command_that_has_force_names_it(memory, resolved):
    for is_forced, is_named in ((None, False), (False, True)):
        with pytest.raises(EnvironmentProblem) as caught:
            require_memory(resolved, 1025 * MIB, [], memory=memory, is_forced=is_forced)
        assert (caught.value.hint or "").endswith("; `--force` starts it anyway") == is_named


def test_a_port_is_that_of_an_address():
    other = run("other-1", ports=(8000, 9000))
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(EnvironmentProblem, match=r"port 8000 is used by `other-1` \(starting\)"):
            require_port(host, 8000, [other])
    require_port("192.0.2.1", 8000, [other])
    require_port("127.0.0.1", 8001, [other])
    require_port("127.0.0.1", 0, [replace(other, facts=replace(other.facts, ports=(0,)))])
    assert taken_ports([other, run("x-1", own(), ports=(1,))]) == {8000, 9000, 1}
