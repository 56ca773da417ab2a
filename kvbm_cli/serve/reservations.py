"""What other engines of this user that live on this machine have taken, or will: their ports, and host memory.

An engine that still starts has neither yet, so that the kernel does not know of them; its run directory does.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvbm.config.launch_plan import reachable
from kvbm.errors import EnvironmentProblem
from kvbm_cli.runs.run_directory import Run, Runs, State

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.host.machine_memory import HostMemory


def living_runs() -> list[Run]:
    try:
        return Runs.of_user().living()
    except (RuntimeError, OSError):  # there is no home, or it cannot be read
        return []


def require_port(host: str, port: int, living: Sequence[Run]) -> None:
    """EnvironmentProblem, with the run's name, if one of the living has the port at this address."""
    for run in living:
        if port and port in run.facts.ports and urlsplit(run.facts.url).netloc.startswith(f"{reachable(host)}:"):
            hint = f"`--port 0` chooses a free port; `kvbm stop {run.facts.name}` stops the other"
            raise EnvironmentProblem(f"port {port} is that of `{run.facts.name}`, which is {run.state}", hint=hint)


def taken_ports(living: Sequence[Run]) -> set[int]:
    return {port for run in living for port in run.facts.ports}


def require_memory(
    resolved: ResolvedProfile, needed_bytes: int, living: Sequence[Run], *, memory: HostMemory | None = None
) -> None:
    """EnvironmentProblem if this engine, with those that live beside it, does not fit into memory."""
    from kvbm.config.sizes import format_size
    from kvbm.host.machine_memory import THIS_MACHINE
    from kvbm_cli.profile.preflight import too_much_memory
    from kvbm_cli.profile.size import size_key

    room, owed = (memory or THIS_MACHINE).room(), sum(map(owed_bytes, living))
    left_bytes = room.available_bytes - owed
    if needed_bytes <= left_bytes:
        return
    if not living:
        hint = f"lower `{size_key(resolved)}`; `--force` starts it all the same"
        raise EnvironmentProblem(too_much_memory(resolved, needed_bytes, room).message, hint=hint)
    key, needed, left = size_key(resolved), format_size(needed_bytes), format_size(max(0, left_bytes))
    lines = [f"`{key}` takes {needed}, and the engines that run leave {left}"]
    lines += [f"  {run.facts.name}, {run.state}, takes {format_size(run.facts.memory_bytes)}" for run in living]
    hint = f"`kvbm stop {living[-1].facts.name}`, or lower `{key}`; `--force` starts it all the same"
    raise EnvironmentProblem("\n".join(lines), hint=hint)


def owed_bytes(run: Run) -> int:
    """Host memory that a starting run has not taken yet; one that is healthy has all that it will have."""
    if run.state is not State.STARTING:
        return 0
    has_bytes = 0 if run.is_elsewhere else _shared_memory_bytes(run)
    return max(0, run.facts.memory_bytes - has_bytes)


def _shared_memory_bytes(run: Run) -> int:
    """What the run's processes have of shared memory, where a segment is mapped by more than one of them."""
    return max(map(_shared_bytes_of, _family(run)), default=0)


def _shared_bytes_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"^RssShmem:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def _family(run: Run) -> Iterator[int]:
    """Living processes of the run, by descent from its launcher."""
    known = [run.facts.launcher.pid]
    for pid in known:
        yield pid
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                known += map(int, (thread / "children").read_text().split())
