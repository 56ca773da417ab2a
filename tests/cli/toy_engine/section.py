"""The toy engine, as a profile names it."""

from typing import ClassVar, Literal

from kvbm.config.engine import EngineSection
from kvbm.config.values import Section


class ToyArguments(Section):
    LENGTH: ClassVar[str] = "longest"

    longest: int = 2048
    leaf_tokens: int = 8
    leaf_count: int = 1000
    leaf_type: str = "bf16"
    ring: int = 1
    served_model_name: str | None = None


class ToyEngine(EngineSection):
    kind: Literal["toy"]
    arguments: ToyArguments = ToyArguments()
