"""Resolves the profile of a command: file, parents, DYN_KVBM_* variables, --set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from kvbm.config.document import together
from kvbm.config.load import Examined, ResolvedProfile
from kvbm.engines.table import examine
from kvbm.errors import ProfileError
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.system.answering import require_all_answer
from kvbm_cli.terminal.show_error import show_warning


def resolve(
    *references: str, overrides: Sequence[str] = (), options: Mapping[str, tuple[str, str]] | None = None
) -> ResolvedProfile:
    """Load a profile with the DYN_KVBM_* variables of this process. A later file overrides the earlier ones. Prints a
    warning for each variable without effect."""
    found = examined(*references, overrides=overrides, options=options)
    return _valid(found, found.mistakes)


def resolve_to_start(
    *references: str,
    overrides: Sequence[str] = (),
    options: Mapping[str, tuple[str, str]] | None = None,
    has_cache: bool = True,
) -> ResolvedProfile:
    """Like `resolve`. If the profile has mistakes, the error has also those that only this machine can find."""
    found = examined(*references, overrides=overrides, options=options)
    mistakes: Sequence[ProfileError] = found.mistakes
    if mistakes:
        from kvbm_cli.profile.preflight import all_mistakes

        _, mistakes = all_mistakes(found, has_cache=has_cache)
    return _valid(found, mistakes)


def examined(
    *references: str, overrides: Sequence[str], options: Mapping[str, tuple[str, str]] | None = None
) -> Examined:
    """Read a profile. Raises EnvironmentProblem if the model, the interpreter or the secret is on a file system that
    hangs. One that hangs below a tier is not an error: an engine starts without the tier."""
    found = examine(
        *references, directories=[profiles_directory()], variables=os.environ, overrides=overrides, options=options
    )
    if found.resolved is not None:
        require_files_answer(found.resolved)
    return found


def require_files_answer(resolved: ResolvedProfile) -> None:
    """Raise EnvironmentProblem, as `examined`."""
    profile = resolved.profile
    shared = profile.tiers.shared
    named = (profile.engine.model, profile.engine.python, None if shared is None else shared.key_file)
    require_all_answer(str(path) for path in named if path is not None)


def _valid(examined: Examined, mistakes: Sequence[ProfileError]) -> ResolvedProfile:
    """Return the profile, and print its warnings. ProfileError with the mistakes, if there are any."""
    if mistakes:
        raise together(mistakes)
    resolved = examined.resolved
    assert resolved is not None, f"{examined.place} has neither mistakes nor a profile"
    for warning in resolved.warnings:
        show_warning(warning)
    return resolved
