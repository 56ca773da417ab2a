"""Machine: everything that a check asks of this machine, in one value that a test can replace.

Whatever may hang, or needs torch, is asked of a process of its own, which is given up after its time; the kernel kills
it if the doctor dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm_cli.doctor.probe import Report
from kvbm_cli.system import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
PROBES = Path(__file__).with_name("probes")
DEVICES = Path("/dev")
NVIDIA_DIRECTORY = Path("/tmp")  # where NVIDIA's block manager keeps blocks unless it is told otherwise
END_TIMEOUT_S = 1.0

Say = Callable[[str], None]


class NoAnswer(Exception):
    """A process did not answer; the text says why, in a few words."""


def ask(python: str, program: str, arguments: Sequence[str] = (), *, timeout_s: float) -> dict[str, Any]:
    """The answer of `probes/<program>.py`, run by `python`. Raises NoAnswer."""
    command = [python, "-P", str(PROBES / f"{program}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if python == sys.executable else os.environ
    return _run(command, timeout_s=timeout_s, environment=environment, say=lambda text: None)


def probe(directory: Path, *, block_bytes: int | None, phase_s: float, timeout_s: float, say: Say) -> Report:
    """What `kvbm_cli.doctor.probe` finds, by a process of its own: a filesystem can hang. Raises NoAnswer."""
    command = [sys.executable, "-P", "-m", "kvbm_cli.doctor.probe", str(directory), "--seconds", str(phase_s)]
    command += [] if block_bytes is None else ["--block-bytes", str(block_bytes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return Report.from_json(_run(command, timeout_s=timeout_s, environment=environment, say=say)["report"])


def _run(command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str], say: Say) -> dict[str, Any]:
    """The last object that a program prints, after `{"phase": ...}` as often as it likes."""
    try:
        child = subprocess.Popen(
            die_with_parent.command_line(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    except OSError as error:
        raise NoAnswer((error.strerror or str(error)).lower()) from None
    try:
        answer = _read(child, time.monotonic() + timeout_s, timeout_s, say)
    finally:
        child.kill()
        for stream in (child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel cannot end
            child.wait(END_TIMEOUT_S)
    return answer


def _read(child: subprocess.Popen[bytes], deadline: float, timeout_s: float, say: Say) -> dict[str, Any]:
    assert child.stdout is not None
    assert child.stderr is not None
    texts = {child.stdout.fileno(): b"", child.stderr.fileno(): b""}
    waited = set(texts)
    while waited:
        ready, _, _ = select.select(waited, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise NoAnswer(f"no answer within {timeout_s:.0f} s")
        for fd in ready:
            chunk = os.read(fd, 1 << 16)
            texts[fd] += chunk
            if not chunk:
                waited.discard(fd)
            elif fd == child.stdout.fileno():
                _tell(chunk, say)
    return _answer(texts[child.stdout.fileno()], texts[child.stderr.fileno()])


def _tell(chunk: bytes, say: Say) -> None:
    for line in chunk.splitlines():
        found = _object(line)
        if found is not None and "phase" in found:
            say(str(found["phase"]))


def _answer(out: bytes, err: bytes) -> dict[str, Any]:
    objects = [found for line in out.splitlines() if (found := _object(line)) is not None and "phase" not in found]
    if objects:
        return objects[-1]
    lines = err.decode(errors="replace").strip().splitlines()
    raise NoAnswer(lines[-1] if lines else "it ended without an answer")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def touch_rate(byte_count: int) -> float:
    """Bytes per second at which host memory is taken as a segment of G2 takes it. Raises EnvironmentProblem."""
    from kvbm.host.shared_memory import SharedMemory

    started = time.monotonic()
    memory = SharedMemory.allocate(
        "kvbm-doctor", byte_count, who="doctor", node=None, memory=THIS_MACHINE, progress=None
    )
    taken_s = time.monotonic() - started
    memory.close()
    return byte_count / taken_s


def lockable_bytes() -> int | None:
    """RLIMIT_MEMLOCK, None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def rival() -> str | None:
    """The version of NVIDIA's distribution `kvbm` beside this command."""
    try:
        return version("kvbm")
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Machine:
    """See the module's text. `memory` reads /proc and /sys, `devices` is /dev; of `rival` see the function."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    memory: HostMemory = THIS_MACHINE
    devices: Path = DEVICES
    nvidia_directory: Path = NVIDIA_DIRECTORY
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)
    lockable_bytes: int | None = field(default_factory=lockable_bytes)
    rival: str | None = field(default_factory=rival)
    ask: Callable[..., dict[str, Any]] = ask
    probe: Callable[..., Report] = probe
    touch_rate: Callable[[int], float] = touch_rate
