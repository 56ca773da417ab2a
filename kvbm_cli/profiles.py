"""Commands about profiles, and the one way in which a command resolves the profile it was given."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvbm_cli.console import labelled, noted, print_data, print_json
from kvbm_cli.shipped import profiles_directory
from kvbm_cli.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

KEY_WIDTH = 48
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
        width = max(len(one.name) for one in found)
        for one in found:
            print_data("\n".join(labelled(one.name, one.profile.description, label_width=width)))


def show_profile(reference: str, overrides: Sequence[str], *, as_json: bool) -> None:
    """Every key with its value and where that came from."""
    resolved = resolve(reference, overrides)
    dumped = resolved.profile.model_dump(mode="json")
    values = {key: _value_at(dumped, key) for key in resolved.origins if _has_section_of(dumped, key)}
    if as_json:
        print_json({key: {"value": value, "origin": resolved.origins[key]} for key, value in values.items()})
    else:
        width = min(max(map(len, values)), KEY_WIDTH)
        for key, value in values.items():
            origin = resolved.origins[key].rpartition("/")[2]
            *above, last = labelled(key, _shown(value), label_width=width)
            print_data("\n".join([*above, noted(last.ljust(width + 2 + VALUE_WIDTH), f"# {origin}")]))


def check_profile(reference: str, overrides: Sequence[str]) -> None:
    """Finds what can be found without starting an engine, and loads the workload of `kvbm bench` too."""
    from kvbm_cli.check import check, require_workload

    resolved = resolve(reference, overrides)
    check(resolved)
    require_workload(resolved)
    print_data(f"{resolved.path}: no mistake found")


def _has_section_of(dumped: Mapping[str, object], key: str) -> bool:
    """Whether the profile has what the key belongs to: a tier that is left out has no keys."""
    section = key.rpartition(".")[0]
    return not section or _value_at(dumped, section) is not None


def _value_at(dumped: Mapping[str, object], key: str) -> object:
    value: object = dumped
    for name in key.split("."):
        assert isinstance(value, Mapping)
        value = value[name]
    return value


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict | list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
