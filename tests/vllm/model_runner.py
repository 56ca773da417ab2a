"""Which of vLLM's two model runners computes here.

vLLM takes V2 where Triton works, as on every GPU. `nox -s vllm_v2` installs `triton_on_cpu`, with which Triton works on
a CPU too. Elsewhere on CPUs, vLLM takes V1. Every engine of these tests is asked which one it has.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

IS_V2 = any(point.value == "triton_on_cpu" for point in metadata.entry_points(group="triton.backends"))
NEEDS_TOP_K = pytest.mark.skipif(IS_V2, reason="Triton's interpreter cannot run vLLM's kernel for top_k and top_p")
LOG_LINE = "Using V2 Model Runner"


def assert_in_log(log: str) -> None:
    assert (LOG_LINE in log) is IS_V2, f"V{1 + IS_V2} was expected\n{log[-4000:]}"


def assert_in_config(vllm_config: Any) -> None:
    assert vllm_config.use_v2_model_runner is IS_V2, vllm_config._get_v2_model_runner_unsupported_features()
