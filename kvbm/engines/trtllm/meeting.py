"""Meeting: how the ranks find the leader's side.

Rank 0 has both sides in one process, so that a variable of this module joins them. The other ranks are MPI processes.
Their reports reach rank 0 through a collective operation of TensorRT-LLM, in which every rank takes part once, when it
registers its KV cache; also a rank that failed, because the others wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from kvbm.engines.trtllm.leader_side import LeaderSide

_T = TypeVar("_T")

leader_of_this_process: LeaderSide | None = None


def attend(leader: LeaderSide) -> None:
    """Register the leader's side of this process. It replaces the leader's side of an earlier engine."""
    global leader_of_this_process
    leader_of_this_process = leader


def rank() -> int:
    """Return the rank of the calling process."""
    from tensorrt_llm._utils import mpi_rank

    return int(mpi_rank())


def gather(value: _T, *, rank_count: int) -> list[_T]:
    """Return the values of all ranks, in the order of the ranks. Every rank must call it."""
    if rank_count == 1:
        return [value]
    from tensorrt_llm._utils import mpi_allgather

    return list(mpi_allgather(value))
