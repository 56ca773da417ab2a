"""Where the files that ship with kvbm lie: inside the package in a wheel, at the repository's root in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def profiles_directory() -> Path:
    return _directory("_profiles", "profiles")


def workloads_directory() -> Path:
    return _directory("_workloads", "bench/workloads")


def _directory(in_wheel: str, in_checkout: str) -> Path:
    packaged = _PACKAGE / in_wheel
    return packaged if packaged.is_dir() else _PACKAGE.parent / in_checkout
