"""Estimate of the GPU memory that vLLM uses for blocks (G1). vLLM measures it at start-up.

bytes of one rank = memory x gpu_memory_utilization - weights / ranks - allowance for activations
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbm.config.sizes import format_size
from kvbm.errors import ProfileError

DEFAULT_UTILIZATION = 0.92  # of vLLM 0.32
ACTIVATION_BYTES = 2 * 2**30  # activations and CUDA graphs of models with 8 to 70 billion parameters need 1 to 3 GiB
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_bytes` as `nvidia-smi` shows it; `capability` is the compute capability times 10."""

    memory_bytes: int
    capability: int | None


GPUS: Mapping[str, Gpu] = {
    "a100-40gb": Gpu(40960 * _MIB, 80),
    "a100": Gpu(81920 * _MIB, 80),
    "l4": Gpu(23034 * _MIB, 89),
    "l40s": Gpu(46068 * _MIB, 89),
    "h100": Gpu(81559 * _MIB, 90),
    "h200": Gpu(143771 * _MIB, 90),
    "b200": Gpu(183359 * _MIB, 100),
}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What is known of the GPUs. `weight_bytes` is the sum over all ranks."""

    memory_bytes: int
    weight_bytes: int
    utilization: float = DEFAULT_UTILIZATION

    def cache_bytes(self, ranks: int) -> int:
        """Bytes for blocks on one rank. ProfileError if the weights leave none."""
        left = self._left(ranks)
        if left <= 0:
            raise ProfileError(f"the weights leave no GPU memory for blocks: {self.formula(ranks)}")
        return left

    def formula(self, ranks: int) -> str:
        """Return the estimate as a formula with its numbers."""
        left = self._left(ranks)
        return (
            f"{self.utilization} x {format_size(self.memory_bytes)} of GPU memory "
            f"- {format_size(self.weight_bytes)} of weights / {ranks} rank{'s' * (ranks != 1)} "
            f"- {format_size(ACTIVATION_BYTES)} for activations = {format_size(max(left, 0))} on each rank"
        )

    def _left(self, ranks: int) -> int:
        return int(self.memory_bytes * self.utilization) - self.weight_bytes // ranks - ACTIVATION_BYTES
