"""Machine: every access of a check to this machine, in one value that tests replace.

A probe that may hang or that needs torch runs in a process of its own with a timeout. The kernel kills that process if
the doctor dies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvbm.errors import reason_of
from kvbm.host.directories import make_private_directories
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm.text.reading import parse_json
from kvbm_cli.system import die_with_parent
from kvbm_cli.system.guard_process import GuardProcess
from kvbm_cli.system.leftovers import Leftovers

ROOT = Path(__file__).resolve().parents[2]
PROBES = Path(__file__).with_name("probes")
DEVICES = Path("/dev")
NVIDIA_DIRECTORY = Path("/tmp")  # NVIDIA's block manager keeps blocks there by default
END_TIMEOUT_S = 1.0
SCRATCH_PREFIX = ".kvbm-doctor-"
REMOVAL_TIMEOUT_S = 5.0

PhaseCallback = Callable[[str], None]


class ProbeFailed(Exception):
    """A probe gave no answer. The text is the reason."""


def run_probe(
    python: str,
    program: str,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float,
    on_phase: PhaseCallback = lambda text: None,
) -> dict[str, Any]:
    """Run `probes/<program>.py` with the interpreter `python`, because it may hang or need libraries of the engine.

    Return the last object that it prints; call `on_phase` for each `{"phase": ...}`. Raises ProbeFailed."""
    command = [python, "-P", str(PROBES / f"{program}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if python == sys.executable else os.environ
    try:
        child = subprocess.Popen(
            die_with_parent.command_line(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except OSError as error:
        raise ProbeFailed(reason_of(error)) from None
    try:
        answer = _read(child, time.monotonic() + timeout_s, timeout_s, on_phase)
    finally:
        child.kill()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel cannot end
            child.wait(END_TIMEOUT_S)
    return answer


def _read(child: subprocess.Popen[bytes], deadline: float, timeout_s: float, on_phase: PhaseCallback) -> dict[str, Any]:
    assert child.stdout is not None
    assert child.stderr is not None
    texts = {child.stdout.fileno(): b"", child.stderr.fileno(): b""}
    with selectors.PollSelector() as selector:
        for fd in texts:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ProbeFailed(f"no answer within {timeout_s:.0f} s")
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                texts[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                elif key.fd == child.stdout.fileno():
                    _report_phases(chunk, on_phase)
    return _answer(texts[child.stdout.fileno()], texts[child.stderr.fileno()])


def _report_phases(chunk: bytes, on_phase: PhaseCallback) -> None:
    for line in chunk.splitlines():
        found = _object(line)
        if found is not None and "phase" in found:
            on_phase(str(found["phase"]))


def _answer(out: bytes, err: bytes) -> dict[str, Any]:
    objects = [found for line in out.splitlines() if (found := _object(line)) is not None and "phase" not in found]
    if objects:
        return objects[-1]
    lines = err.decode(errors="replace").strip().splitlines()
    raise ProbeFailed(lines[-1] if lines else "the process ended without an answer")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def prefault_rate(byte_count: int) -> float:
    """Measures the rate in bytes/s at which a segment of G2 is allocated and prefaulted. Raises EnvironmentProblem."""
    from kvbm.host.shared_memory import SharedMemory

    started = time.monotonic()
    memory = SharedMemory.allocate("kvbm-doctor", byte_count, who="doctor", memory=THIS_MACHINE, progress=None)
    taken_s = time.monotonic() - started
    memory.close()
    return byte_count / taken_s


@contextlib.contextmanager
def scratch_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty private directory in `directory`, which is created too if it is missing. Raises OSError.

    A guard process starts before anything is made and removes everything: after a normal end, an interrupt, or a kill.
    """
    directory = directory.absolute()
    place = directory / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
    missing = [str(path) for path in (directory, *directory.parents) if not path.exists()]
    guard = GuardProcess(Leftovers(str(place), parents=missing), log=subprocess.DEVNULL)
    try:
        guard.scan()  # once it answers, it survives every signal to the doctor
        make_private_directories(directory)
        os.mkdir(place, 0o700)
        yield place
    finally:
        guard.remove(REMOVAL_TIMEOUT_S)  # the doctor does not wait longer for a disk that hangs


def lockable_bytes() -> int | None:
    """RLIMIT_MEMLOCK in bytes, None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def nvidia_kvbm() -> str | None:
    """Return the version of NVIDIA's distribution `kvbm` in the interpreter of this command, None if it is not
    installed."""
    try:
        return version("kvbm")
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Machine:
    """See the module. `memory` reads /proc and /sys, `devices` is /dev, `nvidia_kvbm` is a version or None."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    memory: HostMemory = THIS_MACHINE
    devices: Path = DEVICES
    nvidia_directory: Path = NVIDIA_DIRECTORY
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)
    lockable_bytes: int | None = field(default_factory=lockable_bytes)
    nvidia_kvbm: str | None = field(default_factory=nvidia_kvbm)
    run_probe: Callable[..., dict[str, Any]] = run_probe
    prefault_rate: Callable[[int], float] = prefault_rate
