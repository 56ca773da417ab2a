"""SGLang versions: the tested ones, and the installation found in an interpreter. Imports no SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm.config.installation import Installation

TESTED = ("0.5.23",)  # its interfaces change with every patch release
INSTALL = "pip install 'kvbm-cli[sglang]'"


@dataclass(frozen=True, slots=True)
class SglangInstallation(Installation):
    """The SGLang installation of one interpreter."""


def is_known(version: str) -> bool:
    """Return whether the storage was tested with this version. A local label, as of a build, does not count."""
    return version.partition("+")[0] in TESTED
