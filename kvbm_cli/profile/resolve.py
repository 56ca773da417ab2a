"""Commands about profiles, and the one way in which a command resolves the profile it was given."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import ProfileError
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.terminal.console import labelled, noted, print_data, print_json
from kvbm_cli.terminal.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import Examined, ResolvedProfile

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
    from kvbm.config.layers import shipped
    from kvbm.config.load import load

    directories = [profiles_directory()]
    found = [load(name, directories=directories) for name in shipped(directories)]
    if as_json:
        print_json([_listed(one) for one in found])
    else:
        width = max(len(one.name) for one in found)
        for one in found:
            print_data("\n".join(labelled(one.name, one.profile.description, label_width=width)))


def _listed(resolved: ResolvedProfile) -> dict[str, str]:
    profile = resolved.profile
    about = {"name": resolved.name, "path": str(resolved.path), "description": profile.description}
    return {**about, "engine": profile.engine.kind}


def show_profile(reference: str, overrides: Sequence[str], *, as_json: bool) -> None:
    """Every key with its value and where that came from."""
    resolved = resolve(reference, overrides)
    values = resolved.values
    if as_json:
        shown_keys = {key: {"value": value, "origin": resolved.origins[key]} for key, value in values.items()}
        for parent in resolved.extends[:1]:
            shown_keys = {"extends": {"value": parent.written, "origin": parent.origin}, **shown_keys}
        print_json(shown_keys)
        return
    width = min(max(map(len, values)), KEY_WIDTH)
    for source in resolved.extends:
        print_data(_line("extends", source.written, source.origin, width))
    for key, value in values.items():
        print_data(_line(key, shown(value), resolved.origins[key], width))


def _line(key: str, value: str, origin: str, width: int) -> str:
    *above, last = labelled(key, value, label_width=width)
    return "\n".join([*above, noted(last.ljust(width + 2 + VALUE_WIDTH), f"# {short_origin(origin)}")])


def short_origin(origin: str) -> str:
    """A file without its directories."""
    place, space, variables = origin.partition(" ")
    return f"{place.rpartition('/')[2]}{space}{variables}"


def check_profile(reference: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """Finds all that can be found without starting an engine, and loads the workload of `kvbm bench` too."""
    from kvbm.config.document import together
    from kvbm.config.load import Examined, examine

    try:
        examined = examine(reference, directories=[profiles_directory()], variables=os.environ, overrides=overrides)
    except ProfileError as error:
        examined = Examined(Path(reference), (error,), None)
    mistakes = [*examined.mistakes, *_mistakes_here(examined)]
    warnings = examined.resolved.warnings if examined.resolved is not None else ()
    if as_json:
        file = str(examined.path)
        print_json({"file": file, "mistakes": list(map(_as_data, mistakes)), "warnings": list(warnings)})
        return ProfileError.exit_code if mistakes else 0
    for warning in warnings:
        show_warning(warning)
    if mistakes:
        raise together(mistakes)
    print_data(f"{examined.path}: no mistake found")
    return 0


def _mistakes_here(examined: Examined) -> list[ProfileError]:
    """What this machine finds wrong with the keys that are right by themselves."""
    from kvbm_cli.profile.check import examine_here, require_workload

    if examined.resolved is None:
        return []
    _, mistakes = examine_here(examined.resolved)
    try:
        require_workload(examined.resolved)
    except ProfileError as mistake:
        mistakes.append(mistake)
    known = {getattr(one, "key", "") for one in examined.mistakes}
    return [one for one in mistakes if getattr(one, "key", None) not in known]


def _as_data(mistake: ProfileError) -> dict[str, object]:
    from kvbm.config.document import Mistake

    if not isinstance(mistake, Mistake):
        nowhere = dict.fromkeys(("key", "file", "line", "column", "text"))
        return {"message": mistake.message, **nowhere, "hint": mistake.hint}
    source = mistake.source
    place: dict[str, object] = {"file": mistake.file, "line": None, "column": None, "text": None}
    if source is not None:
        column = None if source.line is None else source.column + 1
        place |= {"line": source.line, "column": column, "text": source.written}
    return {"message": mistake.text, "key": mistake.key or None, **place, "hint": mistake.hint}


def shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict | list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
