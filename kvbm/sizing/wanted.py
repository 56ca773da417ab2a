"""Wanted: what sizes are computed for, beyond a profile and the configuration of its model."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm.sizing.gpu import MemoryEstimate


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU with the flags that /proc/cpuinfo lists, and the release of the engine on it; None stands for the newest
    one."""

    flags: frozenset[str] = frozenset()
    release: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """`sequence_tokens` is the length for which sequences are counted, by default the maximum length. `memory` and
    `capability` describe the GPUs, `cpu` the CPU of a CPU build."""

    sequence_tokens: int | None = None
    memory: MemoryEstimate | None = None
    capability: int | None = None
    cpu: Cpu = Cpu()
