"""Versions of installed packages, as facts of an identity."""

from __future__ import annotations

import re
from importlib import metadata

RELEASE = re.compile(r"(\d+\.\d+)(?:\.\d+)*(?:\.post\d+)?(\+.*)?")


def version_of(distribution: str) -> str:
    """Return the installed version, empty if the distribution is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def release_of(version: str) -> str:
    """Return what of a version counts: major and minor of a release, with its local label, such as `2.12+cpu`.

    A pre-release or development version counts completely: two of them may compute differently.
    """
    found = RELEASE.fullmatch(version)
    return version if found is None else found[1] + (found[2] or "")
