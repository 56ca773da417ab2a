"""`kvbm profile list`, `kvbm profile show`, and the formatting of values and their origins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvbm.config.document import read_file
from kvbm.config.layers import find, shipped, shipped_halves
from kvbm.config.load import ResolvedProfile, load
from kvbm.text.outside import without_secret_value
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.terminal.console import labelled, noted, print_data, print_json

KEY_WIDTH = 48
VALUE_WIDTH = 16


def list_profiles(*, as_json: bool) -> None:
    directories = [profiles_directory()]  # of which no profile has a refused argument: no engine is asked
    found = [_listed(load(name, directories=directories, refused={})) for name in shipped(directories)]
    found += [_listed_half(name, find(name, directories=directories)) for name in shipped_halves(directories)]
    if as_json:
        print_json(found)
    else:
        width = max(len(str(one["name"])) for one in found)
        for one in found:
            print_data("\n".join(labelled(str(one["name"]), str(one["description"]), label_width=width)))


def _listed(resolved: ResolvedProfile) -> dict[str, object]:
    profile = resolved.profile
    about = {"name": resolved.name, "path": resolved.place, "description": profile.description}
    return {**about, "engine": profile.engine.kind}


def _listed_half(name: str, path: Path) -> dict[str, object]:
    description = read_file(path, noun="profile")["description"].value
    return {"name": name, "path": str(path), "description": f"to add to another profile: {description}", "engine": None}


def show_profile(references: Sequence[str], overrides: Sequence[str], *, as_json: bool) -> None:
    """Print every key with its value and origin, and `***` for secrets among the engine's variables."""
    from kvbm_cli.profile.resolve import resolve

    resolved = resolve(*references, overrides=overrides)
    values = {key: without_secret_value(key, value) for key, value in resolved.values.items()}
    if as_json:
        shown_keys = {key: {"value": value, "origin": resolved.origins[key]} for key, value in values.items()}
        if resolved.extends:
            origin = resolved.extends[0].origin
            named = [parent.written for parent in resolved.extends if parent.origin == origin]
            shown_keys = {"extends": {"value": named if named[1:] else named[0], "origin": origin}, **shown_keys}
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
    """Return an origin without the directories of its file."""
    place, space, variables = origin.partition(" ")
    return f"{place.rpartition('/')[2]}{space}{variables}"


def shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict | list) or (isinstance(value, str) and not value.isprintable()):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
