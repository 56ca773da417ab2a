"""The temporary directory of an engine whose launcher and guard were killed together is removed by the next start."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from terminal import FAKE_ENGINE
from test_process import fake_plan
from waiting import eventually, is_gone

from kvbm_cli.engine.process import EngineProcess
from kvbm_cli.system.engine_tmpdir import PREFIX, SETTLED_S, EngineTmpdir, sweep

LAUNCHER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from test_process import fake_plan
from kvbm_cli.engine.process import EngineProcess
engine = EngineProcess.start(fake_plan(), log_path=Path(sys.argv[3]))
engine.wait_healthy(30)
print(engine.guard_pid, engine.pid, flush=True)
sys.stdin.read()
"""


def age(path: str | Path, seconds: float = SETTLED_S + 1) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def directories(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if path.name.startswith(PREFIX)]


def test_directory_of_a_launcher_killed_with_its_guard_is_removed_by_the_next_start(tmp_path, monkeypatch, request):
    holder = tempfile.TemporaryDirectory(prefix="t-", dir="/tmp")  # a longer name would not be used
    request.addfinalizer(holder.cleanup)
    temporary = Path(holder.name)
    paths = [str(FAKE_ENGINE.parent), str(FAKE_ENGINE.parent.parent), str(tmp_path / "log")]
    env = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *paths], env=env, stdout=subprocess.PIPE, text=True
    ) as launcher:
        guard, engine = map(int, launcher.stdout.readline().split())
        pids = (launcher.pid, guard)
        for pid in pids:
            psutil.Process(pid).suspend()  # neither sees the end of the other
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: is_gone(engine))
    (left,) = directories(temporary)
    age(temporary / left)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with EngineProcess.start(fake_plan(), log_path=tmp_path / "log") as process:
        process.wait_healthy(30)
        assert left not in directories(temporary)
        assert len(directories(temporary)) == 1
    assert directories(temporary) == []


def test_directory_in_use_or_new_or_of_something_else_is_kept(tmp_path):
    used, new, full, public = (EngineTmpdir(str(tmp_path)) for _ in range(4))
    abandoned = EngineTmpdir(str(tmp_path))
    for one in (new, full, public, abandoned):
        one.release()
    (Path(full.path) / "socket").touch()
    os.chmod(public.path, 0o755)
    other = tmp_path / "kvbm-notes"
    other.mkdir(0o700)
    (tmp_path / f"{PREFIX}link").symlink_to(other)
    for path in (used.path, full.path, public.path, abandoned.path, other):
        age(path)
    sweep(str(tmp_path))
    kept = {used.path, new.path, full.path, public.path, str(other), str(tmp_path / f"{PREFIX}link")}
    assert {str(path) for path in tmp_path.iterdir()} == kept
    used.release()


def test_directory_that_cannot_be_listed_is_no_error():
    sweep("/nonexistent")
