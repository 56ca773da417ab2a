"""The real command on this machine: what it takes, how long, and that nothing stays behind, however it ends."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cpu_time import children_s
from doctor_machine import PATIENT
from filesystems import Unavailable, mounted
from terminal import PROGRAM, environment, kvbm
from waiting import eventually

from kvbm.engines.table import load
from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.doctor.check import OTHER_DIRECTORY
from kvbm_cli.doctor.command import doctor, write_profile
from kvbm_cli.package_data import profiles_directory

QUICK_S = 20
PROFILE = """\
engine:
  model: synthetic:tiny
tiers:
  host: {capacity: 8MiB}
  disk: {capacity: 16MiB, directory: %s}
server:
  port: 0
"""


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE % (tmp_path / "a" / "cache"))
    return path


def patiently(*arguments: str, home: Path, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, *PATIENT, *arguments]
    return subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, timeout=600)


def test_quick_examination_is_quick_and_leaves_nothing(tmp_path, profile):
    before_s = children_s()
    outcome = patiently("doctor", "-p", str(profile), "--quick", "--json", home=tmp_path)
    assert children_s() - before_s < QUICK_S, "on a busy machine, it takes longer by the clock"
    data = json.loads(outcome.stdout)
    assert outcome.returncode == data["exit_code"]
    failed = [
        check for check in data["checks"] if check["state"] == "failure" and check["group"] in ("disk", "self test")
    ]
    assert not failed
    assert {check["name"] for check in data["checks"] if check["group"] == "self test"} >= {"through the disk"}
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_what_is_written_is_a_right_profile(tmp_path, profile):
    patiently("doctor", "-p", str(profile), "--quick", "--write", "./new.yaml", home=tmp_path)
    assert kvbm("profile", "check", "./new.yaml", home=tmp_path).stdout == "new.yaml: no mistakes found\n"
    disk = load(str(tmp_path / "new.yaml"), directories=[]).profile.tiers.disk
    assert (disk.allocator, disk.o_direct, disk.zerofill, disk.capacity) == ("default", True, False, 16 << 20)


ENDS = [(signal.SIGINT, 0.7), (signal.SIGTERM, 1.6), *((signal.SIGKILL, delay_s) for delay_s in (0.1, 0.7, 1.6))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "delay_s"), ENDS, ids=lambda value: getattr(value, "name", value))
def test_nothing_is_left_by_one_that_is_ended(number, delay_s, tmp_path, profile):
    (tmp_path / "a").mkdir()
    command = [*PROGRAM, "doctor", "-p", str(profile), "--quick"]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL)
    _wait_for_work(tmp_path / "a" / "cache", child)
    time.sleep(delay_s)
    child.send_signal(number)
    code = child.wait(60)
    assert code in (130, -number, 0, 1)
    eventually(lambda: not (tmp_path / "a" / "cache").exists())
    assert list((tmp_path / "a").iterdir()) == []
    eventually(lambda: not _helpers_of(tmp_path))


def _wait_for_work(directory: Path, child: subprocess.Popen[bytes]) -> None:
    eventually(lambda: directory.exists() or child.poll() is not None)


def _helpers_of(home: Path) -> list[int]:
    """Processes whose command line has the test's directory in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(home).encode() in line:
                found.append(int(entry.name))
    return found


def test_doctor_needs_no_torch_itself(tmp_path):
    program = (
        "import sys; from kvbm_cli.app import run; run(['doctor', '--quick', '--dir', '.']); "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "nixl"} & set(done.stderr.split())


def test_file_system_that_is_read_only(tmp_path):
    try:
        with mounted("tmpfs", tmp_path) as point:
            subprocess.run(["mount", "-o", "remount,ro", point], check=True)
            done = patiently("doctor", "--quick", "--json", "--dir", str(point / "cache"), home=tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["group"] == "disk"]
    assert (done.returncode, check["finding"]) == (1, "not writable: read-only file system")
    assert check["remedy"] == f"its file system is mounted read-only: mount it writable, or {OTHER_DIRECTORY}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("below", ["", "cache", "a/b/cache"])
def test_directory_that_may_not_be_written(below, tmp_path):
    """Root gives up its privileges for this."""
    if shutil.which("setpriv") is None or os.geteuid() != 0:
        pytest.skip("needs root and setpriv")
    place = tmp_path / "a place"
    place.mkdir(mode=0o500)
    check = check_of(place / below, tmp_path)
    assert check["finding"] == "not writable: permission denied"
    shown = shlex.quote(str(place / below))
    assert check["remedy"] == f"check the permissions with `namei -l {shown}`, or {OTHER_DIRECTORY}"


def check_of(directory: Path, home: Path) -> dict[str, Any]:
    powerless = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
    done = patiently("doctor", "--quick", "--json", "--dir", str(directory), home=home, before=powerless)
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["group"] == "disk"]
    assert (done.returncode, check["state"]) == (1, "failure")
    found: dict[str, Any] = check
    return found


NEEDED = {"tiers.disk.allocator": "open-direct", "tiers.disk.o_direct": True, "tiers.disk.zerofill": True}
PARENT = "engine: {model: synthetic:tiny}\ntiers: {disk: {capacity: 1TB, directory: /data}}\n"


def written(tmp_path: Path, text: str, **how: object) -> str:
    """The text of the new profile, which means what the original means, and what is needed besides."""
    (tmp_path / "parent.yaml").write_text(PARENT)
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    resolved = load(str(tmp_path / "mine.yaml"), directories=[profiles_directory()], **how)  # type: ignore[arg-type]
    target = tmp_path / "elsewhere" / "new.yaml"
    write_profile(resolved, NEEDED, target)
    copy = load(str(target), directories=[profiles_directory()]).profile
    disk = copy.tiers.disk
    assert disk is not None
    assert {f"tiers.disk.{name}": getattr(disk, name) for name in ("allocator", "o_direct", "zerofill")} == NEEDED
    same = {"allocator": None, "o_direct": None, "zerofill": None}
    assert resolved.profile.tiers.disk is not None
    assert disk.model_copy(update=same) == resolved.profile.tiers.disk.model_copy(update=same)
    assert copy.engine == resolved.profile.engine
    return target.read_text()


def test_section_of_a_parent_is_extended(tmp_path: Path) -> None:
    text = written(tmp_path, "extends: ./parent.yaml\n")
    assert text.startswith(f"extends: {tmp_path / 'mine.yaml'}\n\ntiers:\n  disk:\n    allocator: open-direct\n")


def test_several_profiles_are_extended(tmp_path: Path) -> None:
    (tmp_path / "storage.yaml").write_text("tiers: {disk: {capacity: 1TB}}\n")
    files = "demo", "storage/lustre", str(tmp_path / "storage.yaml")
    resolved = load(*files, directories=[profiles_directory()])
    write_profile(resolved, NEEDED, tmp_path / "new.yaml")
    copy = load(str(tmp_path / "new.yaml"), directories=[profiles_directory()])
    assert [source.written for source in copy.extends] == list(files)
    assert {key: copy.values[key] for key in NEEDED} == NEEDED
    assert copy.profile.engine == resolved.profile.engine


def test_what_a_variable_and_the_command_line_say_is_written_too(tmp_path: Path) -> None:
    variables = {"DYN_KVBM_DISK_CACHE_GB": "0.5", "DYN_KVBM_DISK_CACHE_DIR": "/scratch: 1"}
    text = written(tmp_path, "extends: demo\n", variables=variables, overrides=["tiers.disk.threads=8"])
    assert '    capacity: 500MB\n    directory: "/scratch: 1"\n    threads: 8\n' in text


def test_variable_that_the_profile_refers_to_stays_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(PARENT.replace("/data", '"${CACHE}"'))
    resolved = load(str(tmp_path / "mine.yaml"), directories=[], variables={"CACHE": "/data"})
    write_profile(resolved, NEEDED, tmp_path / "new.yaml")
    copy = load(str(tmp_path / "new.yaml"), directories=[], variables={"CACHE": "/other"})
    assert copy.profile.tiers.disk.directory == "/other"


def test_profile_without_a_disk_tier(tmp_path: Path) -> None:
    options = {"directory": None, "as_json": False, "is_quick": True, "write": tmp_path / "new.yaml"}
    with pytest.raises(UsageError, match=r"has no `tiers\.disk`"):
        doctor(["demo"], [], **options)


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(PARENT)
    resolved = load(str(tmp_path / "mine.yaml"), directories=[])
    with pytest.raises(EnvironmentProblem, match="no such file or directory"):
        write_profile(resolved, NEEDED, tmp_path / "none" / "new.yaml")
