"""Resolves the profile of a command: file, parents, DYN_KVBM_* variables, --set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from kvbm.config.document import together
from kvbm.config.load import Examined, ResolvedProfile, examine
from kvbm.errors import ProfileError
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.terminal.show_error import show_warning


def resolve(
    reference: str, overrides: Sequence[str] = (), options: Mapping[str, tuple[str, str]] | None = None
) -> ResolvedProfile:
    """Load a profile with the DYN_KVBM_* variables of this process. Prints a warning for each without effect."""
    examined = _examined(reference, overrides, options)
    return _valid(examined, examined.mistakes)


def resolve_to_start(
    reference: str,
    overrides: Sequence[str] = (),
    options: Mapping[str, tuple[str, str]] | None = None,
    *,
    has_cache: bool = True,
) -> ResolvedProfile:
    """Like `resolve`. If the profile has mistakes, the error has also those that only this machine can find."""
    examined = _examined(reference, overrides, options)
    mistakes: Sequence[ProfileError] = examined.mistakes
    if mistakes:
        from kvbm_cli.profile.preflight import all_mistakes

        _, mistakes = all_mistakes(examined, has_cache=has_cache)
    return _valid(examined, mistakes)


def _examined(reference: str, overrides: Sequence[str], options: Mapping[str, tuple[str, str]] | None) -> Examined:
    return examine(
        reference, directories=[profiles_directory()], variables=os.environ, overrides=overrides, options=options
    )


def _valid(examined: Examined, mistakes: Sequence[ProfileError]) -> ResolvedProfile:
    """Return the profile, and print its warnings. ProfileError with the mistakes, if there are any."""
    if mistakes:
        raise together(mistakes)
    resolved = examined.resolved
    assert resolved is not None, f"{examined.path} has neither mistakes nor a profile"
    for warning in resolved.warnings:
        show_warning(warning)
    return resolved
