"""LaunchPlan: what it takes to start an engine, and where it will answer. Made by `launch.py`, run by the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`environment` is added to the caller's, from which every DYN_KVBM_* variable is taken away.

    `libraries` are modules without which the engine cannot start, and `install` is the command that brings them.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    base_url: str
    health_url: str
    model: str
    libraries: tuple[str, ...] = ()
    install: str = ""


_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(host: str) -> str:
    """The host of a URL by which this machine reaches a server that listens on `host`."""
    address = _EVERY_ADDRESS.get(host, host)
    return f"[{address}]" if ":" in address else address
