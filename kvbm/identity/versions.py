"""Versions of installed packages, as facts of an identity."""

from __future__ import annotations

from importlib import metadata


def version_of(distribution: str) -> str:
    """Return the installed version, empty if the distribution is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
