"""Files and directories have their modes under every umask, and parents of a cache that others can change are named."""

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
from recorded_runs import facts
from terminal import FAKE_ENGINE, HANGS_S, PROGRAM, environment

from kvbm.host.directories import make_private_directories
from kvbm.host.machine_memory import THIS_MACHINE
from kvbm.host.shared_memory import SharedMemory
from kvbm.identity import digest_cache
from kvbm.identity.content import Signature
from kvbm.identity.digest_cache import NAME, DigestCache
from kvbm.tiers.disk.files import require_usable_parent
from kvbm_cli.runs.run_directory import Runs
from kvbm_cli.system.filesystem import unsafe_parents

PROFILE = f"""\
engine: {{model: ./model, python: {FAKE_ENGINE}, arguments: {{num_blocks: 64}}}}
tiers: {{host: {{capacity: 64MiB}}}}
server: {{port: auto}}
"""
UMASKS = (0o000, 0o022, 0o077)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def run(home: Path, umask: int, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = environment(home, **extra)
    return subprocess.run(
        [*PROGRAM, *arguments], cwd=home, env=env, umask=umask, text=True, capture_output=True, timeout=HANGS_S
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_run_is_private_under_every_umask(tmp_path, umask):
    (tmp_path / "model").mkdir()
    model = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    (tmp_path / "model/config.json").write_text(str(model).replace("'", '"'))
    (tmp_path / "mine.yaml").write_text(PROFILE)
    started = run(tmp_path, umask, "serve", "-p", "./mine.yaml", "--detach", "--log", "./logs/engine.log")
    assert started.returncode == 0, started.stderr
    try:
        runs = tmp_path / ".local/state/kvbm/runs"
        directories = {path: mode(path) for path in (runs, runs / "mine-1", runs.parent, runs.parents[1])}
        assert set(directories.values()) == {0o700}, directories
        files = {path.name: mode(path) for path in (runs / "mine-1").iterdir()}
        assert {"run.json", "profile.yaml", "lock", "kvbm.log", "admin-token"} <= set(files)
        assert set(files.values()) == {0o600}, files
        assert mode(tmp_path / "logs/engine.log") == 0o600
        assert mode(tmp_path / "logs") & 0o022 == 0
    finally:
        assert run(tmp_path, umask, "stop", "--all").returncode == 0


@pytest.mark.parametrize("umask", UMASKS, ids=oct)
def test_no_other_user_can_change_what_a_command_writes(tmp_path, umask):
    """A profile names the interpreter of the engine."""
    command = "profile new ./new.yaml --engine embedded --model synthetic:tiny --host 1GiB"
    new = run(tmp_path, umask, *command.split())
    assert new.returncode == 0, new.stderr
    exported = run(tmp_path, umask, "profile", "import-env", "--output", "./env.yaml", DYN_KVBM_CPU_CACHE_GB="1")
    assert exported.returncode == 0, exported.stderr
    stats = run(tmp_path, umask, "cache", "export-stats", "--dir", str(tmp_path), "--output", "./stats.json")
    assert stats.returncode == 0, stats.stderr
    written = [path for path in tmp_path.iterdir() if path.is_file()]
    assert len(written) == 3
    assert all(mode(path) & 0o022 == 0 for path in written)


@pytest.fixture(params=UMASKS, ids=oct)
def umask(request):  # type: ignore[no-untyped-def]
    previous = os.umask(request.param)
    yield request.param
    os.umask(previous)


def test_cache_directory_and_its_parents_are_private(tmp_path, umask):
    directory = tmp_path / "a/b/cache"
    require_usable_parent(directory)
    assert {mode(path) for path in (directory, *directory.parents[:2])} == {0o700}


def test_digest_cache_and_its_parents_are_private(tmp_path, umask, monkeypatch):
    """An engine writes it, with the umask of its user."""
    monkeypatch.setattr(digest_cache, "shows_changes", lambda *facts: True)  # whatever file system this machine has
    path = tmp_path / "a/kvbm" / NAME
    cache = DigestCache(path)
    cache.put(Path("/model"), Signature(1, 2, 3, 4, 5), "0" * 32, time.time_ns())
    cache.save()
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o600, 0o700, 0o700)


def test_crash_report_is_private(tmp_path, umask, monkeypatch):
    from kvbm_cli.terminal.crash_report import save_report

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a"))
    saved = save_report(ValueError("a"), [])
    assert saved is not None
    assert mode(saved) == 0o600
    assert {mode(path) for path in saved.parents[:3]} == {0o700}


def test_state_directory_that_others_could_change_is_made_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for path in (tmp_path / "kvbm", tmp_path / "kvbm/runs"):
        path.mkdir()
        path.chmod(0o777)
    runs = Runs.writable()
    assert runs is not None
    assert {mode(tmp_path / "kvbm"), mode(tmp_path / "kvbm/runs")} == {0o755}
    run = runs.create("demo")
    run.begin(facts("demo-1"))
    run.close()


def test_file_in_place_of_a_parent_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_private_directories(tmp_path / "file/a")


def test_parents_that_others_can_change_are_found_through_links(tmp_path):
    safe, group, everyone, sticky = (tmp_path / name for name in ("safe", "group", "everyone", "sticky"))
    for path, bits in ((safe, 0o755), (group, 0o775), (everyone, 0o777), (sticky, 0o1777)):
        (path / "cache").mkdir(parents=True)
        path.chmod(bits)
    (safe / "link").symlink_to(everyone / "cache")

    def found(directory: Path) -> dict[str, str]:
        return {path.name: reason for path, reason in unsafe_parents(directory) if path.is_relative_to(tmp_path)}

    assert found(safe / "cache") == found(sticky / "cache") == found(safe / "missing/cache") == {}
    assert "by group" in found(group / "cache")["group"]
    assert "by everyone" in found(everyone / "cache")["everyone"]
    assert "by everyone" in found(safe / "link/cache")["everyone"]
    assert found(everyone / "missing/deeper")
    if os.geteuid() == 0:
        os.chown(safe, 4711, -1)
        assert found(safe / "cache") == {"safe": "belongs to user 4711"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")
def test_host_memory_is_closed_to_other_users():
    memory = SharedMemory.allocate("kvbm-test", 4096, who="test", memory=THIS_MACHINE, progress=None)
    try:
        memory.mapping[:7] = b"KV data"
        command = ["head", "-c", "7", f"/proc/{os.getpid()}/fd/{memory.fd}"]
        own, other = (subprocess.run(command, capture_output=True, user=user) for user in (None, 65534))
        assert own.stdout == b"KV data"
        assert (other.stdout, other.returncode != 0) == (b"", True)
    finally:
        memory.close()
