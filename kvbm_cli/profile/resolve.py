"""Resolves the profile of a command: file, parents, DYN_KVBM_* variables, --set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from kvbm.config.load import ResolvedProfile, load
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.terminal.show_error import show_warning


def resolve(
    reference: str, overrides: Sequence[str] = (), options: Mapping[str, tuple[str, str]] | None = None
) -> ResolvedProfile:
    """Loads a profile with the DYN_KVBM_* variables of this process. Prints a warning for each without effect."""
    resolved = load(
        reference, directories=[profiles_directory()], variables=os.environ, overrides=overrides, options=options
    )
    for warning in resolved.warnings:
        show_warning(warning)
    return resolved
