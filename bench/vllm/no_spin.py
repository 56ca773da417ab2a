"""A vLLM plugin that makes processes sleep at once while they wait; without it they spin for one second first.

With it, the CPU time of a server's processes is their work and not their waiting time. `install` enables it for one
server, with a directory for its PYTHONPATH that looks like an installed distribution.
"""

from __future__ import annotations

from pathlib import Path

RECHECK_MS = 20
ENTRY_POINT = "[vllm.general_plugins]\nno_spin = no_spin:stop_spinning\n"


def stop_spinning() -> None:
    """Called by vLLM in each of its processes, before it makes its queues."""
    from vllm.distributed.device_communicators import shm_broadcast

    constructor = shm_broadcast.SpinCondition.__init__
    assert constructor.__defaults__ in ((1,), (0.0,)), constructor.__defaults__
    constructor.__defaults__ = (0.0,)  # its only default is `busy_loop_s`
    # Without spinning a reader sometimes misses a notification; vLLM rechecks only after five seconds.
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS


def install(directory: Path) -> str:
    """Returns the directory for PYTHONPATH."""
    information = directory / "no_spin-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: no-spin\nVersion: 0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINT)
    return f"{Path(__file__).resolve().parent}:{directory}"
