"""The GPUs of this machine as `nvidia-smi` reports them, and whether their memory is free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvbm.child.run import run
from kvbm.config.sizes import format_size
from kvbm.errors import EnvironmentProblem
from kvbm.sizing.gpu import DEFAULT_UTILIZATION

QUERY = "--query-gpu=index,memory.total,memory.used,compute_cap"
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class GpuState:
    """`capability` is the compute capability times 10."""

    index: str
    memory_bytes: int
    used_bytes: int
    capability: int

    @classmethod
    def parse(cls, line: str) -> GpuState:
        """Read a line of `nvidia-smi`. ValueError for anything else."""
        index, total, used, capability = line.split(", ")
        return cls(index, int(total) << 20, int(used) << 20, round(10 * float(capability)))


def gpus(visible: str | None = None) -> tuple[GpuState, ...]:
    """Return the GPUs that an engine may use; none without `nvidia-smi`, or if it does not report them. `visible`: the
    engine's own CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    chosen = [] if visible is None else ["-i", visible]
    try:
        done = run(["nvidia-smi", QUERY, "--format=csv,noheader,nounits", *chosen], timeout_s=TIMEOUT_S)
        return tuple(map(GpuState.parse, done.out.splitlines())) if done.code == 0 else ()
    except (OSError, TimeoutError, ValueError):
        return ()


def require_free(found: Sequence[GpuState], utilization: float | str | None) -> None:
    """Raise EnvironmentProblem if one of the GPUs has less free memory than an engine takes."""
    for gpu in found:
        free_bytes = gpu.memory_bytes - gpu.used_bytes
        if free_bytes < float(utilization or DEFAULT_UTILIZATION) * gpu.memory_bytes:
            raise EnvironmentProblem(
                f"GPU {gpu.index} is in use: {format_size(free_bytes)} of {format_size(gpu.memory_bytes)} are free, "
                "and `kvbm try` starts engines of its own",
                hint="stop the server that uses it (`nvidia-smi` names it), or choose another GPU with "
                "`CUDA_VISIBLE_DEVICES`",
            )
