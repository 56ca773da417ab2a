"""Gpus: utilisation, memory and energy of NVIDIA's GPUs, if the Python module `pynvml` is installed.

Only the GPUs on which the engine's processes run count. Inside a container NVML may not know their process ids; then
all visible GPUs count.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any


class Gpus:
    """`nvml` is the module pynvml, None if it is missing or finds no driver."""

    def __init__(self, nvml: Any | None) -> None:
        self._nvml = nvml

    @classmethod
    def open(cls) -> Gpus:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return cls(None)
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return cls(None)
        return cls(nvml)

    def sample(self, pids: Collection[int]) -> list[dict[str, float | int | None]]:
        """Return one entry per GPU. What a GPU does not report is None."""
        if self._nvml is None:
            return []
        nvml = self._nvml
        count = self._ask(nvml.nvmlDeviceGetCount) or 0
        asked = [(index, self._ask(nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
        handles = [(index, handle) for index, handle in asked if handle is not None]
        used = [(index, handle) for index, handle in handles if self._processes(handle) & set(pids)]
        return [self._state(index, handle) for index, handle in used or handles]

    def _processes(self, handle: Any) -> set[int]:
        assert self._nvml is not None
        return {process.pid for process in self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()}

    def _state(self, index: int, handle: Any) -> dict[str, float | int | None]:
        assert self._nvml is not None
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        energy_mj = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return {
            "index": index,
            "utilisation": None if rates is None else rates.gpu / 100,
            "memory_bytes": None if memory is None else int(memory.used),
            "energy_j": None if energy_mj is None else energy_mj / 1e3,
        }

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """None if the GPU does not answer this question."""
        assert self._nvml is not None
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None
