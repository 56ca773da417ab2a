"""`kvbm doctor --write`: writes a copy of a profile with the recommended settings.

The copy keeps the text and the comments of the original. If the text cannot be edited to mean exactly the wanted
profile, the copy is a few lines that extend the original. Each copy is read back and compared with the wanted profile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.document import Document, Source, entry_at, read_file
from kvbm.config.files import real_path
from kvbm.config.layers import shipped_name
from kvbm.config.load import ResolvedProfile
from kvbm.config.relative_paths import PATHS, absolute_path
from kvbm.config.variables import other_variables
from kvbm.engines.table import load
from kvbm.errors import InvariantError, KvbmError, UsageError
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.text import extends_value, scalar
from kvbm_cli.system.filesystem import write_new

if TYPE_CHECKING:
    from kvbm.config.schema import Profile

SECTION = "tiers.disk"

Value = str | bool


def require_disk_tier(resolved: ResolvedProfile | None) -> None:
    """UsageError for a profile without a disk tier."""
    if resolved is None or resolved.profile.tiers.disk is None:
        raise UsageError("the profile has no `tiers.disk`, so there is nothing to write", hint="remove `--write`")


def write_profile(resolved: ResolvedProfile, recommended: Mapping[str, Value], target: Path) -> None:
    """Write `target`, which must not exist. EnvironmentProblem if it cannot be written."""
    require_disk_tier(resolved)
    keys = {**_from_elsewhere(resolved), **recommended}
    wanted = _load(resolved.paths, keys)
    for text in _texts(resolved, keys):
        write_new(target, text)
        if _means(target, wanted):
            return
        target.unlink()
    raise InvariantError(f"no copy of {resolved.place} has the values {keys}")


def _texts(resolved: ResolvedProfile, keys: Mapping[str, Value]) -> Iterator[str]:
    if not resolved.paths[1:] and (text := _edited(resolved.paths[0], keys)) is not None:
        yield text
    yield _extending(resolved, keys)


def _from_elsewhere(resolved: ResolvedProfile) -> dict[str, Value]:
    """Return the keys of the tier that come from the command line or a variable."""
    disk = resolved.profile.tiers.disk
    assert disk is not None
    values = disk.model_dump(mode="json")
    return {
        key: values[key.rpartition(".")[2]]
        for key, source in resolved.sources.items()
        if key.startswith(f"{SECTION}.") and source.line is None
    }


def _load(paths: Sequence[Path], keys: Mapping[str, Value]) -> Profile:
    """Load files with `keys` as options and without DYN_KVBM_* variables."""
    options = {key: (key, value if isinstance(value, str) else scalar(value)) for key, value in keys.items()}
    places = [profiles_directory()]
    variables = other_variables(os.environ)
    return load(*map(_as_path, paths), directories=places, variables=variables, options=options).profile


def _as_path(path: Path) -> str:
    return str(real_path(path))


def _means(target: Path, wanted: Profile) -> bool:
    try:
        return _load([target], {}) == wanted
    except KvbmError:
        return False


def _extending(resolved: ResolvedProfile, keys: Mapping[str, Value]) -> str:
    parents = [shipped_name(path, [profiles_directory()]) or _as_path(path) for path in resolved.paths]
    lines = [f"    {key.rpartition('.')[2]}: {scalar(value)}" for key, value in keys.items()]
    return "\n".join([f"extends: {extends_value(parents)}", "", "tiers:", "  disk:", *lines, ""])


def _edited(path: Path, keys: Mapping[str, Value]) -> str | None:
    """Return the text of the file with the keys set, None if it has no section for them."""
    document = read_file(path, noun="profile")
    section = entry_at(document, SECTION.split("."))
    if section is None or not section.section:
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    changes = list(_absolute_paths(document, path))
    added: list[str] = []
    for key, value in keys.items():
        entry = section.section.get(key.rpartition(".")[2])
        if entry is None:
            added.append(f"{key.rpartition('.')[2]}: {scalar(value)}")
        else:
            changes.append((entry.source, scalar(value)))
    first = next(iter(section.section.values())).key
    for source, text in sorted(changes, key=lambda change: (change[0].line, change[0].column), reverse=True):
        _replace(lines, source, text)
    if first.line == section.key.line:
        _insert_in_line(lines, first, added)
    else:
        _insert_above(lines, first, added)
    return "\n".join([*lines, ""])


def _absolute_paths(document: Document, path: Path) -> Iterator[tuple[Source, str]]:
    """Make `extends` and the paths absolute, because the copy may be in another directory."""
    extends = document.get("extends")
    named = None if extends is None else extends.value  # a list stays: if it then names no files, the copy extends
    if extends is not None and isinstance(named, str) and ("/" in named or named.endswith((".yaml", ".yml"))):
        yield extends.source, scalar(_as_path(path.parent / os.path.expanduser(named)))
    for key in PATHS:
        entry = entry_at(document, key.split("."))
        if entry is None or not isinstance(entry.value, str) or "${" in entry.value:
            continue
        absolute = absolute_path(key, entry.value, entry.source)
        if absolute != entry.value:
            yield entry.source, scalar(absolute)


def _replace(lines: list[str], source: Source, text: str) -> None:
    assert source.line is not None
    line = lines[source.line - 1]
    lines[source.line - 1] = line[: source.column] + text + line[source.column + source.width :]


def _insert_in_line(lines: list[str], first: Source, added: list[str]) -> None:
    """Insert keys into a section in braces, such as `disk: {capacity: 1TB}`."""
    assert first.line is not None
    line = lines[first.line - 1]
    lines[first.line - 1] = line[: first.column] + "".join(f"{text}, " for text in added) + line[first.column :]


def _insert_above(lines: list[str], first: Source, added: list[str]) -> None:
    assert first.line is not None
    lines[first.line - 1 : first.line - 1] = [" " * first.column + text for text in added]
