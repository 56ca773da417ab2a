"""kill -9 of each process of a running `kvbm serve` in turn: nothing of it is left, and the next start works.

A round kills every one of VICTIMS, each in an engine of its own with a disk tier and a worker process, at the same port
and in the same directories as all before. `pytest -m soak tests/cli/test_kill_rounds.py` does ROUNDS rounds, in the
foreground and detached by turns; with KVBM_WRITE_RESULTS=1 the result is written to bench/results.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from terminal import HANGS_S, kvbm
from test_serve import started
from test_serve_embedded import ask
from waiting import eventually, is_gone

from kvbm.tiers.disk.directory import InstanceLock
from kvbm_cli.engine.process import choose_port
from kvbm_cli.system.guard_process import GUARD

pytest.importorskip("torch")

VICTIMS = {
    "launcher": "serve",
    "guard": str(GUARD),
    "engine": "kvbm.engines.embedded",
    "worker": "spawn_main",
    "disk": "kvbm.tiers.disk.service.server",
}
ENDS_WITH = ("launcher", "engine")  # an engine that loses another one goes on
MODES = ("foreground", "detached")
ROUNDS = 20
RESULTS = Path(__file__).parents[2] / "bench" / "results"
PROFILE = """\
extends: demo-disk
engine:
  arguments: {{num_blocks: 64, max_model_len: 512, worker_process: true}}
tiers:
  host: {{capacity: 16MiB}}
  disk: {{capacity: 32MiB, directory: {disk}, drain_s: 2.0}}
offload: {{to_disk: always}}
server: {{port: {port}}}
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "kill.yaml").write_text(PROFILE.format(disk=tmp_path / "disk", port=choose_port("127.0.0.1", 0)))
    yield tmp_path
    kvbm("stop", "--all", "-t", "0", home=tmp_path)


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that a running `kvbm serve` has: its processes by name, and what they hold."""

    members: dict[str, psutil.Process]
    everyone: list[psutil.Process]
    shared_files: set[Path]
    directory: Path

    @classmethod
    def of(cls, launcher: psutil.Process) -> Family:
        everyone = [one for one in (launcher, *launcher.children(recursive=True)) if not is_gone(one.pid)]
        found = {name: _only(everyone, word) for name, word in VICTIMS.items()}
        held = {Path(path) for process in everyone for path in _shared_files(process)}
        return cls(found, everyone, held, Path(found["engine"].environ()["TMPDIR"]))

    def left(self, home: Path, port: int) -> list[object]:
        """What is still there of it, or would keep the next one from starting."""
        alive: list[object] = [process for process in self.everyone if not is_gone(process.pid)]
        alive += [process for process in psutil.process_iter() if _has_home(process, home)]
        files = [path for path in (*self.shared_files, self.directory) if path.exists()]
        return [*alive, *files, *_locked(home / "disk"), *([f"port {port}"] if _is_taken(port) else [])]


def _only(processes: list[psutil.Process], word: str) -> psutil.Process:
    found = [process for process in processes if any(word in part for part in process.cmdline()[1:])]
    if word == "serve":
        found = found[:1]
    assert len(found) == 1, (word, [process.cmdline()[:4] for process in processes])
    return found[0]


def _shared_files(process: psutil.Process) -> Iterator[str]:
    opened = (os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd"))
    mapped = (region.path for region in process.memory_maps())
    yield from (path for path in (*opened, *mapped) if path.startswith("/dev/shm/") and Path(path).exists())


def _has_home(process: psutil.Process, home: Path) -> bool:
    """Whatever holds a memfd of this engine was started by it, and has its environment."""
    try:
        return process.environ().get("HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _locked(directory: Path) -> list[str]:
    """Caches on disk that somebody still holds."""
    held = []
    for cache in (path for path in directory.glob("*/*") if path.is_dir()):
        if (lock := InstanceLock.take(cache)) is None:
            held.append(f"locked: {cache}")
        else:
            lock.release()
    return held


def _guards(launcher: psutil.Process) -> list[int]:
    return [one.pid for one in launcher.children() if not is_gone(one.pid) and str(GUARD) in one.cmdline()]


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


@contextmanager
def serving(home: Path, mode: str) -> Iterator[tuple[subprocess.Popen[str] | None, psutil.Process, str]]:
    """(the foreground program if it is one, the launcher, the URL)"""
    if mode == "detached":
        outcome = kvbm("serve", "-p", "./kill.yaml", "--json", "-d", home=home, timeout_s=120)
        assert outcome.exit_code == 0, outcome.stderr
        (seen,) = json.loads(kvbm("status", "--json", home=home).stdout)
        yield None, psutil.Process(seen["pid"]), seen["url"]
        return
    with (
        (home / "stderr").open("w") as stderr,
        started(home, "--json", profile="./kill.yaml", stderr=stderr) as program,
    ):
        ready = "".join(_until_brace(program.stdout))
        assert ready, (home / "stderr").read_text()
        yield program, psutil.Process(program.pid), json.loads(ready)["url"]


def _until_brace(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line
        if line == "}\n":
            return


PROMPT = "once upon a time there was a block " * 8


def answer_of(url: str) -> str:
    return ask(url, PROMPT)["choices"][0]["text"]


def kill(home: Path, victim: str, mode: str) -> dict[str, object]:
    """One start, one kill, and what was seen of it. Raises if anything is left, or an answer is wrong."""
    began = time.monotonic()
    with serving(home, mode) as (program, launcher, url):
        started_s = time.monotonic() - began
        port = int(url.rpartition(":")[2])
        answer = answer_of(url)
        assert answer_of(url) == answer
        family = Family.of(launcher)
        assert family.left(home, port), "it looks in the right places"
        killed = time.monotonic()
        os.kill(family.members[victim].pid, signal.SIGKILL)
        if victim not in ENDS_WITH:
            assert answer_of(url) == answer
            eventually(lambda: answer_of(url) == answer)
            if victim == "guard":
                eventually(lambda: _guards(launcher) not in ([], [family.members["guard"].pid]))
            stopped = kvbm("stop", home=home)
            assert stopped.exit_code == 0, (stopped, (home / "stderr").read_text() if program else "")
        if program is not None:
            code = program.wait(timeout=HANGS_S)
            assert code == {"launcher": -signal.SIGKILL, "engine": 128 + signal.SIGKILL}.get(victim, 0)
        eventually(lambda: not family.left(home, port))
        gone_s = time.monotonic() - killed
    assert json.loads(kvbm("status", "--json", home=home).stdout) == []
    return {"victim": victim, "mode": mode, "start_s": round(started_s, 2), "gone_s": round(gone_s, 2), "left": 0}


@pytest.mark.soak
def test_many_rounds(home):
    kills = [kill(home, victim, MODES[number % 2]) for number in range(ROUNDS) for victim in VICTIMS]
    with serving(home, "foreground") as (_, _, url):
        assert answer_of(url) == answer_of(url)
    if os.environ.get("KVBM_WRITE_RESULTS"):
        machine = f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"
        result = {
            "command": "KVBM_WRITE_RESULTS=1 pytest tests/cli/test_kill_rounds.py -m soak",
            "machine": machine,
            "time_unix_s": int(time.time()),
            "rounds": ROUNDS,
            "kills": len(kills),
            "left": sum(int(str(one["left"])) for one in kills),
            "longest_until_all_is_gone_s": max(float(str(one["gone_s"])) for one in kills),
            "each": kills,
        }
        (RESULTS / f"{machine}-serve-kills.json").write_text(json.dumps(result, indent=1) + "\n")
