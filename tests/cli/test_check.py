"""What `kvbm profile check` finds on the machine; mistakes in a profile are in `snapshots/transcripts/check.txt`."""

import errno
import json
import os
from types import SimpleNamespace

import pytest
from terminal import kvbm_here, on_a_terminal

from kvbm.errors import EnvironmentProblem
from kvbm_cli.profile.machine_check import Severity, require_none
from kvbm_cli.profile.machine_problems import _disk, _disk_space  # without the other problems of this machine
from kvbm_cli.profile.preflight import check
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.profile.size import size_of
from kvbm_cli.store.caches import CacheFacts

PROFILE = """\
engine:
  model: synthetic:tiny
  arguments:
    num_blocks: 64
    max_model_len: 1024
tiers:
  host:
    capacity: 64MiB
server:
  host: 127.0.0.1
  port: 8000
bench:
  workload: conversations
"""


@pytest.mark.parametrize(("directory", "is_fatal"), [("/proc", True), ("/sys/a/b", True), ("/dev/shm", False)])
def test_a_disk_tier_in_the_kernel_is_refused_and_one_in_memory_is_reported(directory, is_fatal):
    resolved = resolve("demo-disk", overrides=[f"tiers.disk.directory={directory}"])
    first = next(_disk(resolved.profile.tiers.disk, size_of(resolved)))
    assert first.severity is (Severity.FAILURE if is_fatal else Severity.WARNING)
    assert "filesystem" in first.finding


@pytest.mark.parametrize("fault", ["EIO", "EROFS", "EACCES"])
def test_serve_starts_without_a_disk_that_fails_and_bench_does_not(tmp_path, monkeypatch, capsys, fault):
    def statvfs(path):
        if fault == "EIO":
            raise OSError(errno.EIO, "Input/output error")
        flag = os.ST_RDONLY if fault == "EROFS" else 0
        return SimpleNamespace(f_flag=flag, f_blocks=1 << 40, f_bavail=1 << 40, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    resolved = resolve("demo-disk", overrides=[f"tiers.disk.directory={tmp_path}/cache"])
    sizing = check(resolved)
    monkeypatch.setattr(os, "access", lambda path, mode: fault != "EACCES")
    problems = list(_disk(resolved.profile.tiers.disk, sizing))
    require_none(resolved, problems, may_lack_disk=True)
    assert "warning: `tiers.disk.directory`: " in capsys.readouterr().err
    with pytest.raises(EnvironmentProblem, match=str(tmp_path)):
        require_none(resolved, problems)


def test_a_link_to_a_directory_in_memory_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("/dev/shm")
    resolved = resolve("demo-disk", overrides=[f"tiers.disk.directory={tmp_path}/link/a"])
    assert "uses host memory" in next(_disk(resolved.profile.tiers.disk, size_of(resolved))).finding


SPACE = (1 << 40, 1 << 30)  # of the file system and of it free, in bytes


@pytest.mark.parametrize(
    ("wanted", "is_used", "ends"),
    [
        ("512MiB", False, "fits"),
        ("2GiB", False, "fits in its place"),
        ("2GiB", True, "cannot fit"),
        ("3GiB", False, "cannot fit"),
        ("3TiB", False, "cannot fit"),
    ],
)
def test_a_disk_that_cannot_fit_is_refused_unless_an_unused_cache_makes_room_or_serve_starts_without_it(
    tmp_path, capsys, monkeypatch, wanted, is_used, ends
):
    cache = CacheFacts(tmp_path / "a", "model", is_used, 0.0, 3 << 29, None, None, None, None)
    monkeypatch.setattr("kvbm_cli.store.caches.list_caches", lambda directory: [cache])
    blocks, free = (number // 4096 for number in SPACE)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=blocks, f_bavail=free, f_frsize=4096))
    overrides = [f"tiers.disk.directory={tmp_path}", f"tiers.disk.capacity={wanted}"]
    resolved = resolve("demo-disk", overrides=overrides)
    sizing = size_of(resolved)
    if ends == "cannot fit":
        problems = list(_disk_space(resolved.profile.tiers.disk, sizing))
        with pytest.raises(
            EnvironmentProblem, match=f"`tiers.disk.capacity` requires .* but {tmp_path} has only 1.0 GiB free"
        ):
            require_none(resolved, problems)
        if is_larger := wanted == "3TiB":
            with pytest.raises(EnvironmentProblem, match="has only"):
                require_none(resolved, problems, may_lack_disk=True)
        else:
            require_none(resolved, problems, may_lack_disk=True)
        assert ("warning: " in capsys.readouterr().err) != is_larger
    else:
        require_none(resolved, list(_disk_space(resolved.profile.tiers.disk, sizing)))
        assert ("warning: " in capsys.readouterr().err) == (ends == "fits in its place")


LONG_NAMES = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "47000000"}
LONG_VARIABLE = f"engine.environment.{'LONG_' * 12}=1"


@pytest.mark.parametrize("command", ["size -p demo", f"profile show demo --set {LONG_VARIABLE}", "profile list"])
def test_no_line_is_wider_than_80_columns(tmp_path, command):
    lines = on_a_terminal(*command.split(), home=tmp_path, columns=80, **LONG_NAMES)
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    assert "profile list" in command or "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS" in "\n".join(lines)


@pytest.mark.parametrize("command", ["profile check", "serve --profile"])
def test_very_many_mistakes_are_counted_and_the_first_are_shown(command, tmp_path):
    wrong = "".join(f"  key_{number}: 1\n" for number in range(600))
    (tmp_path / "mine.yaml").write_text(PROFILE + f"transfer:\n{wrong}")
    outcome = kvbm_here(*command.split(), "mine.yaml", home=tmp_path)
    assert outcome.exit_code == 2
    assert outcome.stderr.count("error: ") == 50
    assert outcome.stderr.endswith(
        "600 mistakes; 550 more are not shown: `kvbm profile check PROFILE --json` lists all\n"
    )
    everything = kvbm_here("profile", "check", "mine.yaml", "--json", home=tmp_path)
    assert len(json.loads(everything.stdout)["mistakes"]) == 600
