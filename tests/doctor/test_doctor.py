"""`kvbm doctor` on machines whose facts are written down: the whole text, the exit code, and the same as JSON."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import ANSWERS, GOOD, MEMINFO, machine, write
from recorded_runs import facts
from terminal import Outcome, assert_entry, assert_snapshot, ways

from kvbm.engines.sglang.kind import SglangKind
from kvbm.engines.table import load
from kvbm.host.mounts import Mount
from kvbm_cli.doctor import command
from kvbm_cli.doctor.check import DoctorContext
from kvbm_cli.doctor.command import doctor
from kvbm_cli.doctor.engine import checks as engine_checks
from kvbm_cli.doctor.environment import with_variables
from kvbm_cli.doctor.memory import checks, tier_checks
from kvbm_cli.doctor.probes.disk import RecommendedSettings
from kvbm_cli.doctor.probes.disk_file import DirectIO, ProbeOutcome
from kvbm_cli.doctor.probes.engine import PROBES as ENGINE_PROBES
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.auto_capacity import with_capacities
from kvbm_cli.profile.size import order_checks, size_of
from kvbm_cli.runs.run_directory import Runs
from kvbm_cli.system.filesystem import state_directory
from kvbm_cli.system.process_identity import ProcessIdentity
from kvbm_cli.terminal import progress

PROFILE = """\
engine:
  model: synthetic:tiny
  arguments: {num_blocks: 64}
tiers:
  host: {capacity: 64MiB}
  disk:
    capacity: 1GiB       # on the drive of the node
    directory: %s
server:
  port: 0
"""
REFUSED = DirectIO(False, "EINVAL")
ENOTSUP = ProbeOutcome(False, "ENOTSUP")
MACHINES: dict[str, Callable[[], dict[str, Any]]] = {
    "good": dict,
    "gpus": lambda: {"gpus": {"0000:1b:00.0": 0, "0000:9a:00.0": 1}, "nodes": 2},
    "poor_disk": lambda: {
        "report": replace(
            GOOD,
            mount=Mount("fuse.sshfs", "host:/data", "/data"),
            free_bytes=10**8,
            fallocate=ENOTSUP,
            by_open=REFUSED,
            by_fcntl=DirectIO(True, None, 512, False),
            settings=RecommendedSettings("default", False, True),
            speed=None,
            reason="a tenth of the free space holds 2 blocks of 131072 bytes",
        )
    },
    "hanging_disk": lambda: {"report": "no answer within 9 s"},
    "little_memory": lambda: {
        "meminfo": MEMINFO.replace("48828125", "32768"),
        "shmem": "always [never]",
        "lockable_bytes": 2**23,
        "is_root": False,
        "prefault_rate": 1e6,
    },
    "broken_engine": lambda: {
        "answers": {
            "round_trip": "ModuleNotFoundError: No module named 'kvbm'",
            "connector": {"seconds": 0.1, "error": "ModuleNotFoundError: No module named 'torch'"},
            "cuda": {"torch": "2.13.0", "cuda": "13.0", "driver": "470.1", "devices": 0, "error": None},
            "nixl": {"version": "1.5.1", "plugins": {"POSIX (io_uring)": "EPERM", "POSIX (aio)": "EPERM"}},
        },
        "gpus": {"0000:1b:00.0": -1},
        "nodes": 2,
        "nvidia_kvbm": "1.6.1",
    },
    "variables": lambda: {
        "environment": {
            "DYN_KVBM_DISK_CACHE_GBB": "1",
            "DYN_KVBM_CPU_CACHE_GB": "0.05",
            "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "false",
            "DYN_KVBM_METRICS_PORT": "6880",
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "many",
        }
    },
}
FAILING = {"poor_disk", "hanging_disk", "little_memory", "broken_engine", "variables"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A busy machine would be told of as one that takes long."""
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 60.0)


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE % (tmp_path / "cache"))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> Outcome:
    chosen = {"directory": None, "as_json": False, "is_quick": False, "write": None, **options}
    code = doctor([str(one) for one in arguments if one is not None], [], **chosen)
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


AFTER_A_PATH = re.compile(r"`\[PYTHON\]`:(?:\s+\S+)+? 'kvbm'")  # how long it is decides where the line breaks


def test_runs_of_the_user_who_runs_the_tests_are_not_seen():
    """They use memory and ports, so that an engine that runs would change the reports below."""
    assert not state_directory().is_relative_to(Path.home())


@pytest.mark.parametrize("name", MACHINES)
def test_report(name, tmp_path, profile, capsys):
    outcome = run(capsys, str(profile), machine=machine(tmp_path / "machine", **MACHINES[name]()))
    assert outcome.exit_code == (name in FAILING)
    text = outcome.text("kvbm doctor --profile ./mine.yaml")
    assert_snapshot(f"doctor_{name}", AFTER_A_PATH.sub(lambda found: " ".join(found[0].split()), text))
    assert not (tmp_path / "cache").exists()


def test_without_a_profile(tmp_path, capsys):
    outcome = run(capsys, None, directory=tmp_path, machine=machine(tmp_path / "machine"))
    assert outcome.exit_code == 0
    assert_snapshot("doctor_without_a_profile", outcome.text("kvbm doctor --dir ."))


@pytest.mark.parametrize("name", MACHINES)
def test_json_says_the_same(name, tmp_path, profile, capsys):
    outcome = run(capsys, str(profile), as_json=True, machine=machine(tmp_path / "machine", **MACHINES[name]()))
    data = json.loads(outcome.stdout)
    assert outcome.exit_code == data["exit_code"] == (name in FAILING)
    assert any(check["state"] == "failure" for check in data["checks"]) == (name in FAILING)
    assert all(set(check) == {"group", "name", "state", "finding", "remedy", "facts"} for check in data["checks"])
    assert all(check["remedy"] for check in data["checks"] if check["state"] == "failure")


def test_leftovers_of_others_are_named(tmp_path, profile, capsys):
    write(tmp_path / "cache" / "dynamo-kvbm-disk-cache-a1b2c3", "x" * 8192)
    outcome = run(capsys, str(profile), machine=machine(tmp_path / "machine"))
    finding = f"left by NVIDIA's block manager in {tmp_path}/cache: 8.0 KiB, files: 1"
    assert finding in " ".join(outcome.stdout.split())
    assert f"remedy: `rm -r {tmp_path}/cache/dynamo-kvbm-disk-cache-*` while none is running\n" in outcome.stdout
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["dynamo-kvbm-disk-cache-a1b2c3"]
    assert outcome.exit_code == 0


def test_variables_that_the_profile_refers_to_are_known(tmp_path, profile, capsys):
    profile.write_text(PROFILE % "${CACHE}")
    known = machine(tmp_path / "machine", environment={"CACHE": str(tmp_path / "cache")})
    outcome = run(capsys, str(profile), machine=known)
    assert f"disk: {tmp_path}/cache\n" in outcome.stdout
    assert outcome.exit_code == 0


def test_variables_say_which_tiers_there_are(tmp_path, capsys):
    variables = {
        "DYN_KVBM_CPU_CACHE_GB": "1",
        "DYN_KVBM_DISK_CACHE_GB": "2000",
        "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path / "cache"),
    }
    outcome = run(capsys, None, machine=machine(tmp_path / "machine", environment=variables))
    assert outcome.exit_code == 1
    assert f"disk: {tmp_path}/cache\n" in outcome.stdout
    assert "failure free space 931.3 GiB of 1.8 TiB free, the tier requires 1.8 TiB" in " ".join(outcome.stdout.split())
    assert "remedy: set `DYN_KVBM_DISK_CACHE_GB=900`, or use another `DYN_KVBM_DISK_CACHE_DIR`" in outcome.stdout
    assert "\n  DYN_KVBM_DISK_DISABLE_O_DIRECT=false\n" in outcome.stdout


REMEDIES = {
    "set `tiers.disk.capacity: 47MB`, or use another `tiers.disk.directory`": (
        "set `DYN_KVBM_DISK_CACHE_GB=0.047`, or use another `DYN_KVBM_DISK_CACHE_DIR`"
    ),
    "set `tiers.disk.o_direct: false`": "set `DYN_KVBM_DISK_DISABLE_O_DIRECT=true`",
    "set `tiers.disk.zerofill: true`": "set `DYN_KVBM_DISK_ZEROFILL_FALLBACK=true`",
    "set `tiers.host.blocks: 64` or more": "set `DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=64` or more",
    "for others set `tiers.disk.reclaim: true`": "for others set `tiers.disk.reclaim: true` in a profile",
    "`ulimit -f unlimited`": "`ulimit -f unlimited`",
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_remedy_without_a_profile_names_the_variable(remedy):
    assert with_variables(remedy) == REMEDIES[remedy]


def test_variable_without_effect_is_reported_once(tmp_path, profile, capsys):
    variables = {"DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": "1", "DYN_KVBM_CPU_CACHE_GB": "0"}
    outcome = run(capsys, str(profile), machine=machine(tmp_path / "machine", environment=variables))
    environment = outcome.stdout.partition("\n\n")[0]
    assert environment.count("warning  DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR") == 1
    assert environment.count("warning  DYN_KVBM_CPU_CACHE_GB") == 1, "it removes a tier of the profile"


def test_a_disk_that_host_memory_outgrows_is_no_remedy(tmp_path, profile, capsys):
    for free, remedy in ((10**8, "set `tiers.disk.capacity: 90MB`, or use another"), (7 * 10**7, "use another")):
        known = machine(tmp_path / f"machine-{free}", report=replace(GOOD, free_bytes=free))
        outcome = run(capsys, str(profile), machine=known)
        assert f"remedy: {remedy} `tiers.disk.directory`" in outcome.stdout


def test_copy_is_not_written_where_the_directory_cannot_be_used(tmp_path, profile, capsys):
    known = machine(tmp_path / "machine", report="no answer within 9 s")
    outcome = run(capsys, str(profile), machine=known, write=tmp_path / "new.yaml")
    assert outcome.exit_code == 1
    assert f"new.yaml: {tmp_path}/cache is not usable, so the settings for it are unknown" in outcome.stderr
    assert not (tmp_path / "new.yaml").exists()


def test_memory_is_checked_together_with_engines_that_start(tmp_path, profile, capsys, monkeypatch):
    """What a launcher has recorded counts until it ends, in this case by a signal."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = Runs.writable()
    assert runs is not None
    tiers = {"meminfo": MEMINFO.replace("48828125", str(1 << 20))}  # 1 GiB
    begun = []
    with subprocess.Popen(["sleep", "60"]) as launcher:
        identity = ProcessIdentity.of(launcher.pid)
        for mib in (400, 590, 0):
            begun.append(runs.create("other"))
            begun[-1].begin(facts(begun[-1].name, identity, memory_bytes=mib << 20))
        outcome = run(capsys, str(profile), machine=machine(tmp_path / "a", **tiers))
        text = " ".join(outcome.stdout.split())
        assert "`tiers.host.capacity` requires 64.0 MiB, and starting engines another 990.0 MiB, in all 1.0 GiB" in text
        assert "but only 1.0 GiB are available (free memory of this machine)" in text
        lines = [line.strip() for line in outcome.stdout.splitlines()]
        assert sum(line.startswith(("other-1 (", "other-2 (")) for line in lines) == 2, "each in a line of its own"
        assert "remedy: run `kvbm stop other-2`, or set `tiers.host.capacity: 32MB` or less" in lines
        launcher.kill()
    outcome = run(capsys, str(profile), machine=machine(tmp_path / "b", **tiers))
    assert outcome.exit_code == 0
    assert "starting engines" not in outcome.stdout
    for one in begun:
        one.close()


def test_the_capacity_that_fits_is_that_of_each_engine(tmp_path):
    overrides = ["tiers.host.capacity=64MiB", "engine.arguments.data_parallel_size=2"]
    resolved = load("vllm", directories=[profiles_directory()], overrides=overrides)
    little = machine(tmp_path / "machine", meminfo=MEMINFO.replace("48828125", "100000"))  # 102.4 MB
    tiers = resolved.profile.tiers
    context = DoctorContext(little, None, resolved, tiers, None, is_quick=True, on_phase=lambda text: None)
    found = next(checks(context))
    assert "`tiers.host.capacity` requires 128.0 MiB" in found.finding
    assert found.remedy == "set `tiers.host.capacity: 46MB` or less"


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"DYN_KVBM_DISK_CACHE_DIR": "/x"}, "warning  DYN_KVBM_DISK_CACHE_DIR"),
        ({"DYN_KVBM_DISK_CACHE_DIR": "x", "DYN_KVBM_DISK_CACHE_GB": "1"}, "failure  values"),
        ({"DYN_KVBM_CPU_CACHE_GB": "1", "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "5"}, "warning  priorities"),
        ({"DYN_KVBM_CPU_CACHE_GB": "1"}, "ok       variables          1 DYN_KVBM_* variables, all valid"),
    ],
)
def test_what_variables_amount_to(variables, line, tmp_path, capsys):
    outcome = run(capsys, None, directory=tmp_path, machine=machine(tmp_path / "machine", environment=variables))
    assert f"\n  {line}" in outcome.stdout


@pytest.mark.parametrize(
    ("override", "finding"),
    [
        ("tiers.host.capacity=4MiB", "G2 holds"),
        ("tiers.host.blocks=10", "G2 holds"),
        ("tiers.disk.capacity=16MiB", "G3 holds"),
    ],
)
def test_tier_that_is_smaller_than_the_one_above_gets_a_value_that_is_not(override, finding, tmp_path, profile, capsys):
    options = {"directory": None, "as_json": False, "is_quick": True, "write": None}
    assert doctor([str(profile)], [override], machine=machine(tmp_path / "machine"), **options) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"warning order {finding}" in shown
    key, value = re.search(r"remedy: set `([\w.]+): (\w+)` or more", shown).groups()
    assert key == override.partition("=")[0]
    assert doctor([str(profile)], [f"{key}={value}"], machine=machine(tmp_path / "again"), **options) == 0
    assert " ok order " in " ".join(capsys.readouterr().out.split())


def test_tiers_of_a_model_that_nobody_knows_yet(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "engine: {kind: vllm, model: some/model}\n"
        f"tiers: {{host: {{capacity: 2GB}}, disk: {{capacity: 1GB, directory: {tmp_path}}}}}\n"
    )
    shown = run(capsys, str(tmp_path / "mine.yaml"), is_quick=True, machine=machine(tmp_path / "machine")).stdout
    assert "  skipped  size " in shown
    assert "  skipped  onboarding         tokens/s depend on the block size, which is" in shown


UNUSABLE = {
    "a file": (lambda path: path.write_text(""), "not writable: not a directory"),
    "below a file": (lambda path: path.parent.write_text(""), "not writable: not a directory"),
    "a link": (lambda path: path.symlink_to("/tmp"), "is a symbolic link, which is not followed"),
    "for everyone": (lambda path: path.mkdir() or path.chmod(0o777), "is writable by everyone (mode 0777)"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_directory_that_cannot_be_used(what, tmp_path, capsys):
    make, finding = UNUSABLE[what]
    path = tmp_path / ("parent/cache" if what == "below a file" else "cache")
    make(path)
    outcome = run(capsys, None, directory=path, as_json=True, machine=machine(tmp_path / "machine"))
    data = json.loads(outcome.stdout)
    (check,) = [check for check in data["checks"] if check["group"] == "disk"]
    assert outcome.exit_code == 1
    assert (check["state"], finding in check["finding"], data["recommended"]) == ("failure", True, None)


def test_nixl_is_tried_where_the_disk_tier_will_be(tmp_path, profile, capsys):
    asked = []

    def nixl(python: str, program: str, arguments: list[str], **how: Any) -> dict[str, Any]:
        asked.append(arguments[1])
        return {"version": None, "plugins": {}}

    for name, place in (("a", tmp_path), ("b", tmp_path / "cache")):
        run(capsys, str(profile), machine=machine(tmp_path / name, probes={"nixl": nixl}))
        assert asked.pop() == str(place)
        (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "file").write_text("")
    run(capsys, None, directory=tmp_path / "file", machine=machine(tmp_path / "c", probes={"nixl": nixl}))
    assert asked == [tempfile.gettempdir()], "the disk group says what is wrong with the directory"


def test_a_port_in_use_has_a_remedy_in_the_profile(tmp_path, profile, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        profile.write_text(profile.read_text().replace("port: 0", f"port: {server.getsockname()[1]}"))
        outcome = run(capsys, str(profile), machine=machine(tmp_path / "machine"))
    assert outcome.exit_code == 1
    assert "remedy: set `server.port: 0`\n" in outcome.stdout


def test_transfers_that_fail_are_a_failure(tmp_path, profile, capsys):
    report = replace(GOOD, speed=None, transfers=ProbeOutcome(False, "EDQUOT"))
    outcome = run(capsys, str(profile), machine=machine(tmp_path / "machine", report=report))
    assert outcome.exit_code == 1
    assert "  failure  speed              transferring many blocks fails: EDQUOT\n" in outcome.stdout


def test_caches_that_are_there_count_as_space(tmp_path, profile, capsys):
    instance = tmp_path / "cache" / ("ab" * 8) / "0123456789abcdef"
    instance.mkdir(parents=True, mode=0o700)
    with open(instance / "arena", "wb") as arena:
        arena.write(bytes(1 << 20))
        os.fsync(arena.fileno())
    report = replace(GOOD, free_bytes=2**30 - 2**20)
    outcome = run(capsys, str(profile), machine=machine(tmp_path / "machine", report=report))
    assert outcome.exit_code == 0
    assert "unused caches hold 1.0 MiB" in " ".join(outcome.stdout.split())
    assert "1 cannot be used: superblock missing or damaged" in " ".join(outcome.stdout.split())
    assert sorted(path.name for path in instance.iterdir()) == ["arena"]


class Screen(io.StringIO):
    """Reports when a text is written."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited = awaited
        self.is_shown = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._awaited in text:
            self.is_shown.set()
        return count


def test_what_takes_long_is_named_on_stderr(tmp_path, profile, capsys, monkeypatch):
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 0.2)
    monkeypatch.setattr(progress, "REDRAW_S", 0.05)

    screen = Screen("random reads")
    monkeypatch.setattr(sys, "stderr", screen)

    def slow(*ignored: object, on_phase: Callable[[str], None], **also_ignored: object) -> dict[str, object]:
        on_phase("random reads")
        assert screen.is_shown.wait(60)
        return {"report": asdict(GOOD)}

    run(capsys, str(profile), machine=machine(tmp_path / "machine", probes={"disk": slow}))
    lines = [line for line in screen.getvalue().splitlines() if line.endswith(" s  random reads")]
    assert lines  # on a busy machine other phases take long too
    assert all(line.startswith("checking    ") for line in lines)


MISTAKES = {
    "write_without_a_profile": "doctor --write new.yaml",
    "set_without_a_profile": "doctor --set server.port=0",
    "write_over_a_file": "doctor --profile ./mine.yaml --write ./mine.yaml",
    "write_into_nothing": "doctor --profile ./mine.yaml --write ./there/is/none.yaml",
}


@pytest.mark.parametrize(("name", "way"), ways(MISTAKES))
def test_mistake_on_the_command_line(name, way, tmp_path, profile):
    outcome = way(*MISTAKES[name].split(), home=tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert_entry("mistakes/doctor", name, outcome.text(f"kvbm {MISTAKES[name]}"), names=MISTAKES)


def test_profile_without_a_disk_tier(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("extends: demo\nserver: {port: 0}\nmetrics: {port: 0}\n")
    outcome = run(capsys, str(tmp_path / "mine.yaml"), machine=machine(tmp_path / "machine"))
    assert outcome.exit_code == 0
    assert "  skipped  directory          the profile has no `tiers.disk`" in outcome.stdout
    assert "recommended" not in outcome.stdout


def test_interpreter_that_hangs_does_not_delay_a_quick_check(tmp_path, profile, capsys, monkeypatch):
    monkeypatch.setattr(command, "QUICK_WORK_S", 1.0)
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    profile.write_text(f"extends: ./base.yaml\nengine: {{kind: vllm, model: synthetic:vllm-25m, python: {hanging}}}\n")
    (tmp_path / "base.yaml").write_text("tiers: {host: {capacity: 64MiB}}\n")
    started = time.monotonic()
    outcome = run(capsys, str(profile), is_quick=True, machine=machine(tmp_path / "machine"))
    assert time.monotonic() - started < 30, "half of what the interpreter takes"
    assert "  skipped  the rest           the 20 s of --quick are over" in outcome.stdout
    assert outcome.exit_code == 0


def test_answers_cover_every_program():
    from kvbm_cli.doctor.machine import PROBES

    programs = {path.stem for path in PROBES.glob("*.py") if "__main__" in path.read_text()}
    assert programs - {"engine"} | ENGINE_PROBES.keys() == {*ANSWERS, "disk", "store"}


def test_a_profile_of_sglang_on_a_cpu_imports_its_stand_ins_first_and_needs_no_host_tier(tmp_path):
    found = load("sglang-cpu-demo", directories=[profiles_directory()])
    assert SglangKind().imported(found.profile) == ["kvbm.engines.sglang.cpu_server", "kvbm.sglang_integration.storage"]
    shipped = load("sglang", directories=[profiles_directory()]).profile
    assert SglangKind().imported(shipped) == ["kvbm.sglang_integration.storage"]
    sizing = size_of(found)
    context = DoctorContext(machine(tmp_path), None, found, found.profile.tiers, sizing, True, lambda text: None)
    (host,) = [one for one in tier_checks(context) if one.name == "G2"]
    assert (host.state, "SGLang" in host.finding) == ("ok", True)


@pytest.mark.parametrize(
    ("change", "adds_little"),
    [
        ("offload.to_host=auto", False),
        ("offload.to_host=on_evict", False),
        ("offload.to_host=always", True),
        ("tiers.disk.capacity=1TB", True),
        ("engine.arguments.enable_prefix_caching=false", True),
    ],
)
def test_host_memory_below_g1_adds_little_unless_it_takes_what_g1_evicts(tmp_path, change, adds_little):
    sizes = ("tiers.host.capacity=10GB", "engine.arguments.num_gpu_blocks_override=9000")
    found = load("vllm", directories=[profiles_directory()], overrides=[*sizes, change])
    sizing = size_of(found)
    context = DoctorContext(machine(tmp_path), None, found, found.profile.tiers, sizing, True, lambda text: None)
    found = {one.finding for one in tier_checks(context) if one.state == "warning"}
    assert any("of G1, so it adds little" in one for one in found) == adds_little


def test_a_tier_whose_size_kvbm_chose_needs_no_other_size():
    changes = ("tiers.host.capacity=auto", "offload.to_host=always", "engine.arguments.num_gpu_blocks_override=9000000")
    found = load("vllm", directories=[profiles_directory()], overrides=changes)
    remedy = "this machine can spare no more; lower G1, or free memory"
    for resolved in (found, with_capacities(found)):
        assert [one.remedy for one in order_checks(resolved, size_of(found)) if "of G1" in one.finding] == [remedy]


def test_a_size_that_kvbm_chose_for_another_reason_than_room_has_that_reason(monkeypatch):
    monkeypatch.setattr("kvbm_cli.profile.auto_capacity.answers", lambda directory: False)
    changes = ("tiers.host.capacity=10GB", "tiers.disk.capacity=auto", "tiers.disk.directory=/cold")
    found = load("vllm", directories=[profiles_directory()], overrides=changes)
    remedy = "G3 auto: the minimum: /cold does not answer"
    for resolved in (found, with_capacities(found)):
        assert [one.remedy for one in order_checks(resolved, size_of(found)) if "of G2" in one.finding] == [remedy]


@pytest.mark.parametrize(
    ("profile", "override", "finding"),
    [
        (
            "sglang",
            "engine.arguments.hicache_mem_layout=page_first_kv_split",
            "hicache_mem_layout: page_first_kv_split",
        ),
        ("sglang", "engine.arguments.enable_hierarchical_cache=false", "enable_hierarchical_cache: false"),
        ("sglang", "engine.arguments.dcp_size=2", "dcp_size: 2"),
        ("vllm", 'engine.arguments.kv_transfer_config={"kv_connector": "LMCacheConnectorV1"}', "LMCacheConnectorV1"),
    ],
)
def test_arguments_that_serve_would_refuse_fail(profile, override, finding, tmp_path):
    here = machine(tmp_path)

    def found(*overrides):
        resolved = load(profile, directories=[profiles_directory()], overrides=overrides)
        sizing, tiers = size_of(resolved), resolved.profile.tiers
        context = DoctorContext(here, None, resolved, tiers, sizing, True, lambda text: None)
        return [one for one in engine_checks(context) if one.name == "arguments"]

    assert found() == []
    (check,) = found(override)
    assert check.state == "failure"
    assert finding in check.finding


COMPILER = """#!/bin/sh
grep -q "{fails}" "$2" && exit 1
exit 0
"""


@pytest.mark.parametrize(
    ("programs", "fails", "missing"),
    [
        ({"c++", "ninja"}, "nothing", []),
        ({"c++"}, "Python.h", ["ninja", "the headers of Python"]),
        ({"c++", "ninja"}, "openssl/sha.h", ["the headers of OpenSSL"]),
        ({"ninja"}, "", ["a C++ compiler (`c++`)"]),
    ],
)
def test_what_sglang_requires_to_build_its_extension_is_named(programs, fails, missing, tmp_path, monkeypatch):
    for name in programs:
        (tmp_path / name).write_text(COMPILER.format(fails=fails))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "grep").symlink_to(shutil.which("grep"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    answer = ENGINE_PROBES["compiler"]([])
    assert answer == {"missing": missing}

    resolved = load("sglang", directories=[profiles_directory()])
    here = machine(tmp_path / "machine", answers={"compiler": answer})
    context = DoctorContext(here, None, resolved, resolved.profile.tiers, size_of(resolved), True, lambda text: None)
    (check,) = [one for one in engine_checks(context) if one.name == "compiler"]
    assert check.state == ("failure" if missing else "ok")
    if missing:
        assert ", ".join(missing) in check.finding
        assert "ninja-build" in check.remedy
