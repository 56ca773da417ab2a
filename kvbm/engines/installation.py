"""Installation: an engine as it is installed in a Python interpreter, and comparison of versions. Imports no engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Release = tuple[int, int]

_RELEASE = re.compile(r"v?(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Installation:
    """`script` is the path of the engine's command, None if it does not work. `has_kvbm`: the interpreter has the
    connector. `rival` is the version of NVIDIA's distribution `kvbm`, whose modules have the same names as ours.
    `has_interface`: the engine can load a connector. `flags`: of its command, with underscores; empty if unknown."""

    version: str
    distribution: str
    script: str | None
    has_kvbm: bool
    rival: str | None = None
    has_interface: bool = True
    flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ProbedPackage:
    """An engine to detect: its name, its module and its command. `interface` are files below the module, one of which
    an engine with connectors has; empty if every version has them. `parsers` are those that add the command's flags."""

    title: str
    module: str
    command: str
    interface: tuple[str, ...] = ()
    parsers: tuple[str, ...] = ()


def release_of(version: str) -> Release | None:
    """Return (major, minor) of a version, None if it does not start with them."""
    match = _RELEASE.match(version)
    return (int(match[1]), int(match[2])) if match else None


def is_between(version: str, bounds: tuple[Release, Release]) -> bool:
    """Whether a version belongs to one of the releases from the first to the second one."""
    release = release_of(version)
    return release is not None and bounds[0] <= release <= bounds[1]


def requirement(bounds: tuple[Release, Release]) -> str:
    """`>=0.27,<0.33`"""
    (major, minor), (last_major, last_minor) = bounds
    return f">={major}.{minor},<{last_major}.{last_minor + 1}"


def shown(bounds: tuple[Release, Release]) -> str:
    """`0.27 to 0.32`"""
    return " to ".join(f"{major}.{minor}" for major, minor in bounds)
