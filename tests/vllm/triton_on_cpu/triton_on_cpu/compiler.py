"""What Triton asks a backend for, if it were to compile."""

from __future__ import annotations

from types import ModuleType

from triton.backends import compiler


class Compiler(compiler.BaseBackend):
    @staticmethod
    def supports_target(target: compiler.GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict) -> object:
        raise NotImplementedError("kernels are interpreted")

    def add_stages(self, stages: dict, options: object, language: compiler.Language) -> None:
        raise NotImplementedError("kernels are interpreted")

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError("kernels are interpreted")

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
