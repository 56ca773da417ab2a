"""What Triton and vLLM ask of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton._C.libtriton import interpreter
from triton.backends import driver
from triton.backends.compiler import GPUTarget


class Driver(driver.DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise NotImplementedError("nothing is tuned here")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("kernels are interpreted")


def with_bools(load: Callable[..., Any]) -> Callable[..., Any]:
    """The masks of vLLM's kernel for n-grams become integers in the interpreter, which its own `load` refuses."""
    return lambda pointers, mask, *others: load(pointers, mask.astype(np.bool_), *others)


interpreter.load = with_bools(interpreter.load)
