"""SGLang versions: the tested ones, and the installation found in an interpreter. Imports no SGLang."""

from __future__ import annotations

from kvbm.engines.installation import ProbedPackage

TESTED = ("0.5.23",)  # its interfaces change with every patch release
INSTALL = "pip install 'kvbm-cli[sglang]'"
# For the extension that hashes pages.
TO_COMPILE = "a C++ compiler, ninja, and the headers of Python and OpenSSL (`g++ ninja-build python3-dev libssl-dev`)"
PACKAGE = ProbedPackage("SGLang", "sglang", "sglang")


def is_known(version: str) -> bool:
    """Return whether the storage was tested with this version. A local label, as of a build, does not count."""
    return version.partition("+")[0] in TESTED
