"""Machine: every access of a check to this machine, in one value that tests replace.

A probe that may hang or that needs torch runs in a process of its own with a timeout. The kernel kills that process if
the doctor dies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvbm.child.run import last_line, run
from kvbm.child.start import our_environment
from kvbm.errors import reason_of
from kvbm.host.directories import make_private_directories
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm.text.reading import parse_json
from kvbm_cli.system.guard_process import GuardProcess
from kvbm_cli.system.leftovers import Leftovers

PROBES = Path(__file__).with_name("probes")
DEVICES = Path("/dev")
NVIDIA_DIRECTORY = Path("/tmp")  # NVIDIA's block manager keeps blocks there by default
SCRATCH_PREFIX = ".kvbm-doctor-"
REMOVAL_TIMEOUT_S = 5.0

PhaseCallback = Callable[[str], None]


class ProbeFailed(Exception):
    """A probe gave no answer. The text is the reason."""


class NoAnswerInTime(ProbeFailed):
    """It took too long."""


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
    reported: list[str] = []

    def report(out: str) -> None:
        phases = [str(found["phase"]) for found in _objects(out) if "phase" in found]
        for phase in phases[len(reported) :]:
            on_phase(phase)
        reported[:] = phases

    try:
        ended = run(
            [python, "-P", str(PROBES / f"{program}.py"), *arguments],
            timeout_s=timeout_s,
            environment={
                **(our_environment() if python == sys.executable else os.environ),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            dies_with_parent=True,
            on_output=report,
        )
    except TimeoutError:
        raise NoAnswerInTime(f"no answer within {timeout_s:.0f} s") from None
    except OSError as error:
        raise ProbeFailed(reason_of(error)) from None
    answers = [found for found in _objects(ended.out) if "phase" not in found]
    if not answers:
        raise ProbeFailed(last_line(ended.err, "the process ended without an answer"))
    return answers[-1]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found = parse_json(line)
            if isinstance(found, dict):
                yield found


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
