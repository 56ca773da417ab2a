"""`kvbm profile schema`: prints the JSON Schema for editors, or the description of a key."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator

from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.key_list import keys
from kvbm.errors import UsageError
from kvbm_cli.profile.json_schema import json_schema
from kvbm_cli.profile.show import shown
from kvbm_cli.terminal.console import WIDTH, print_data, print_json


def show_schema(key: str | None) -> None:
    """Print the JSON Schema, or the description of a key or section. UsageError for an unknown key."""
    if key is None:
        print_json(json_schema())
        return
    lines = list(_lines(key))
    if not lines:
        raise UsageError(f"unknown key `{key}`", hint=_nearest(key))
    print_data("\n".join(lines))


def _lines(wanted: str) -> Iterator[str]:
    """Describe the key and all keys below it; once per engine kind if the descriptions differ."""
    seen = set()
    for kind in ENGINE_KINDS:
        for key in keys(engine=kind):
            is_below = key.path == wanted or key.path.startswith(f"{wanted}.")
            if not is_below or (about := (key.path, key.kind, key.description)) in seen:
                continue
            seen.add(about)
            default = "" if key.is_section else ", required" if key.is_required else f", default {_shown(key.default)}"
            engine = f" ({kind})" if key.path.startswith("engine.") and _differs_by_engine(key.path) else ""
            yield f"{key.path}{engine}: {key.kind.replace('`', '')}{default}"
            yield from textwrap.wrap(key.description, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _differs_by_engine(path: str) -> bool:
    found = {(key.kind, key.description) for kind in ENGINE_KINDS for key in keys(engine=kind) if key.path == path}
    return len(found) > 1


def _shown(default: object) -> str:
    return "none" if default in (None, "", {}) else shown(default)


def _nearest(wanted: str) -> str:
    paths = [key.path for kind in ENGINE_KINDS for key in keys(engine=kind)]
    by_name = {path.rpartition(".")[2]: path for path in reversed(paths)}
    nearest = difflib.get_close_matches(wanted, paths, n=1) or [
        by_name[name] for name in difflib.get_close_matches(wanted.rpartition(".")[2], by_name, n=1)
    ]
    return f"did you mean `{nearest[0]}`?" if nearest else "`kvbm profile schema tiers` lists the keys of a section"
