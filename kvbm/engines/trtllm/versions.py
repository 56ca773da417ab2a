"""TensorRT-LLM versions: the supported ones, and how one is found in an interpreter. Imports no TensorRT-LLM."""

from __future__ import annotations

from kvbm.engines.installation import ProbedPackage, Release, is_between

CONTRACT_TESTED: tuple[Release, Release] = ((1, 1), (1, 4))  # against their interface; none has been run
INSTALL = "pip install 'kvbm-cli[tensorrt-llm]'"

# Where versions keep the interface of connectors, below the package.
INTERFACE_FILES = (
    "_torch/pyexecutor/connectors/kv_cache_connector.py",
    "_torch/pyexecutor/kv_cache_connector.py",
)
PACKAGE = ProbedPackage("TensorRT-LLM", "tensorrt_llm", "trtllm-serve", INTERFACE_FILES)


def is_known(version: str) -> bool:
    """Return whether the connector was tested against the interface of this version."""
    return is_between(version, CONTRACT_TESTED)
