"""Commands about profiles, and the one way in which a command resolves the profile it was given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvbm_cli.console import print_data, print_json, table
from kvbm_cli.shipped import profiles_directory
from kvbm_cli.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

VALUE_WIDTH = 16


def resolve(
    reference: str, overrides: Sequence[str] = (), options: Mapping[str, tuple[str, str]] | None = None
) -> ResolvedProfile:
    """The profile under this process's DYN_KVBM_* variables. Prints a warning for each that has no effect."""
    from kvbm.config.load import load

    resolved = load(
        reference,
        directories=[profiles_directory()],
        variables=os.environ,
        overrides=overrides,
        options=options,
    )
    for warning in resolved.warnings:
        show_warning(warning)
    return resolved


def list_profiles(*, as_json: bool) -> None:
    from kvbm.config.load import load, shipped

    directories = [profiles_directory()]
    found = [load(name, directories=directories) for name in shipped(directories)]
    if as_json:
        print_json([{"name": one.name, "path": str(one.path), "description": one.profile.description} for one in found])
    else:
        print_data(table([(one.name, one.profile.description) for one in found]))


def show_profile(reference: str, overrides: Sequence[str], *, as_json: bool) -> None:
    """Every key with its value and where that came from."""
    resolved = resolve(reference, overrides)
    values = {key: _value_at(resolved.profile.model_dump(mode="json"), key) for key in resolved.origins}
    if as_json:
        print_json({key: {"value": value, "origin": resolved.origins[key]} for key, value in values.items()})
    else:
        width = max(map(len, values))
        for key, value in values.items():
            print_data(f"{key.ljust(width)}  {_shown(value).ljust(VALUE_WIDTH)}  # {resolved.origins[key]}")


def check_profile(reference: str, overrides: Sequence[str]) -> None:
    resolved = resolve(reference, overrides)
    print_data(f"{resolved.path}: no mistake found")


def _value_at(dumped: Mapping[str, object], key: str) -> object:
    value: object = dumped
    for name in key.split("."):
        assert isinstance(value, Mapping)
        value = value[name]
    return value


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
