"""Directories of the shipped profiles and workloads: in the package of a wheel, in the root of a checkout."""

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
