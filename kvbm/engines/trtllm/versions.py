"""TensorRT-LLM versions: the supported ones, and the installation found in an interpreter. Imports no TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm.engines.installation import Installation, ProbedPackage, Release, is_between

CONTRACT_TESTED: tuple[Release, Release] = ((1, 1), (1, 4))  # against their interface; none has been run
INSTALL = "pip install 'kvbm-cli[tensorrt-llm]'"

# Where versions keep the interface of connectors, below the package.
INTERFACE_FILES = (
    "_torch/pyexecutor/connectors/kv_cache_connector.py",
    "_torch/pyexecutor/kv_cache_connector.py",
)
PACKAGE = ProbedPackage("TensorRT-LLM", "tensorrt_llm", "trtllm-serve", INTERFACE_FILES)


@dataclass(frozen=True, slots=True)
class TrtllmInstallation(Installation):
    """The TensorRT-LLM installation of one interpreter. `has_interface`: it can load a connector."""

    has_interface: bool = True


def is_known(version: str) -> bool:
    """Return whether the connector was tested against the interface of this version."""
    return is_between(version, CONTRACT_TESTED)
