"""Resolves a name or a file to one frozen `Profile`, with the origin of every key.

Layers, each over the one before: defaults < the profiles named by `extends` < the file, or several files in their order
< `DYN_KVBM_*` variables < `--set key=value` (layers.py). Variables are passed in as a mapping; the environment of the
process is never read. Every mistake is a ProfileError with the place of the text and, for a name, the nearest valid
one. All mistakes are reported together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from kvbm.config.document import Document, Entry, Mistake, Source, entry_at, plain_values, together
from kvbm.config.engine import ACCEPTS_EVERY_FLAG, ENGINE_KINDS, FIRST_KIND
from kvbm.config.findings import Findings, is_within, remove_mistaken
from kvbm.config.interpolation import Interpolation
from kvbm.config.key_list import keys
from kvbm.config.layers import ARGUMENTS, TIERS, files_with_parents, find, merge, with_layers
from kvbm.config.mistakes import invalid_text, mistakes_in, not_built, profile_file
from kvbm.config.relative_paths import with_absolute_paths
from kvbm.config.schema import Profile
from kvbm.config.variables import other_variables
from kvbm.errors import ProfileError

DEFAULT = "default"


class Refuses(Protocol):
    def refused(self, document: Document) -> Iterable[Mistake]:
        """Return the mistakes that only a kind of engine knows."""


Refused = Mapping[str, Refuses]  # by engine kind


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedProfile:
    """A profile and the origins of its values. Equal only to itself, so that what follows from it can be cached.

    `values` has every key as `kvbm profile show` prints it; a missing tier is one key without a value. `origins` has
    the same keys: `default`, `file:line`, a variable or `--set`. `extends` has the `extends` values of the chain of
    files. `chosen` says by tier, as G2, how kvbm chose the size that `profile` has in place of `auto`.
    """

    paths: tuple[Path, ...]
    profile: Profile
    values: Mapping[str, object]
    origins: Mapping[str, str]
    sources: Mapping[str, Source]
    extends: tuple[Source, ...]
    warnings: tuple[str, ...]
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The names of its files."""
        return "-".join(path.stem for path in self.paths)

    @property
    def place(self) -> str:
        """The paths of its files, for messages."""
        return place_of(self.paths)

    def mistake(self, key: str, message: str, *, hint: str | None = None) -> Mistake:
        """Make the error of a value that is invalid on this machine, at the place of `key`."""
        return Mistake(message, self.sources.get(key, self.place), hint=hint, key=key)


@dataclass(frozen=True, slots=True)
class Examined:
    """All mistakes of a profile, in the order of its layers, and the profile without them if that is valid."""

    place: str
    mistakes: tuple[ProfileError, ...]
    resolved: ResolvedProfile | None


def place_of(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def load(
    *references: str,
    directories: Sequence[Path],
    variables: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, tuple[str, str]] | None = None,
    refused: Refused,
) -> ResolvedProfile:
    """Resolve the profile of `references`, each a path or a name in one of `directories`. A later one overrides the
    earlier ones.

    `overrides` are texts of `--set`. `options` are keys set by other options, as `{key: (option, text)}`; they override
    everything. `refused` finds the arguments that an engine refuses; `engines/table.py` has it for every engine.
    ProfileError for a mistake, ProfileMistakes for several.
    """
    examined = examine(
        *references, directories=directories, variables=variables, overrides=overrides, options=options, refused=refused
    )
    if examined.mistakes:
        raise together(examined.mistakes)
    assert examined.resolved is not None, f"{examined.place} has neither mistakes nor a profile"
    return examined.resolved


def examine(
    *references: str,
    directories: Sequence[Path],
    variables: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, tuple[str, str]] | None = None,
    refused: Refused,
) -> Examined:
    """Like `load`, but returns the mistakes. ProfileError only if there is no such file."""
    paths = tuple(find(reference, directories=directories) for reference in references)
    findings = Findings(references)
    document = files_with_parents(paths, directories, findings)
    return _examined(paths, document, variables or {}, overrides, options or {}, findings, refused)


def examine_written(
    path: Path,
    written: Document,
    *,
    directories: Sequence[Path],
    parents: Sequence[Path] = (),
    variables: Mapping[str, str] | None = None,
    refused: Refused,
) -> Examined:
    """Resolve the document `written` as if it were the file `path` and extended `parents`."""
    findings = Findings()
    below = files_with_parents(parents, directories, findings)
    return _examined((path,), merge(below, written), other_variables(variables or {}), (), {}, findings, refused)


def written_by(
    overrides: Sequence[str], options: Mapping[str, tuple[str, str]]
) -> tuple[Document, tuple[ProfileError, ...]]:
    """Convert `--set` and options to a document with absolute paths. Returns it with their mistakes."""
    findings = Findings()
    document, _ = with_layers({}, {}, overrides, options, findings)
    return with_absolute_paths(document), findings.in_order()


def _examined(
    paths: tuple[Path, ...],
    document: Document,
    environment: Mapping[str, str],
    overrides: Sequence[str],
    options: Mapping[str, tuple[str, str]],
    findings: Findings,
    refused: Refused,
) -> Examined:
    merged, warnings = with_layers(document, environment, overrides, options, findings)
    interpolation = Interpolation(environment, [])
    merged = interpolation.document(merged)
    remove_mistaken(merged, findings.add(interpolation.mistakes))
    remove_mistaken(merged, findings.add(invalid_text(merged)))
    merged = with_absolute_paths(merged)
    place = place_of(paths)
    profile = _validated(merged, place, findings, refused)
    mistakes = findings.in_order()
    if profile is None:
        return Examined(place, mistakes, None)
    values, sources = _values(profile), _sources(profile, merged)
    origins = {key: source.origin if source else DEFAULT for key, source in sources.items()}
    written = {key: source for key, source in sources.items() if source}
    extends = tuple(findings.extends)
    return Examined(place, mistakes, ResolvedProfile(paths, profile, values, origins, written, extends, warnings))


def _validated(document: Document, place: str, findings: Findings, refused: Refused) -> Profile | None:
    """Return the profile, None if the document without its mistakes is not valid. Consumes the document."""
    remove_mistaken(document, findings.add(not_built(document)))
    kind = _engine_kind(document)
    if kind in refused:
        remove_mistaken(document, findings.add(refused[kind].refused(document)))
    is_known = "engine.kind" not in findings.wrong
    if not is_known:
        document = _of_any_kind(document)
    while True:
        try:
            profile = Profile.model_validate(plain_values(document))
            return profile if is_known and not findings.is_incomplete else None
        except ValidationError as error:
            file = profile_file(kind, findings.given)
            found = mistakes_in(error, document, place, file, is_complete=not findings.is_incomplete)
        findings.add(found)
        if not remove_mistaken(document, found):
            return None


def _of_any_kind(document: Document) -> Document:
    """Return the document with an engine kind that accepts the keys of every kind."""
    engine = document.get("engine")
    if engine is None or engine.section is None:
        return document
    inside = {name: entry for name, entry in engine.section.items() if name != "arguments"}
    inside["kind"] = Entry(engine.key, engine.source, ACCEPTS_EVERY_FLAG)
    return {**document, "engine": Entry(engine.key, engine.source, inside)}


def _engine_kind(document: Document) -> str:
    """Return the kind whose model reads the engine."""
    entry = entry_at(document, ["engine", "kind"])
    kind = None if entry is None else entry.value
    return kind if isinstance(kind, str) and kind in ENGINE_KINDS else FIRST_KIND


def _sources(profile: Profile, document: Document) -> dict[str, Source | None]:
    """Return the source of every key, None for a default."""
    entries = {path: entry_at(document, path.split(".")) for path in _paths(profile)}
    return {path: entry.source if entry else None for path, entry in entries.items()}


def _values(profile: Profile) -> dict[str, object]:
    dumped = profile.model_dump(mode="json")
    return {path: _value_at(dumped, path) for path in _paths(profile)}


def _value_at(dumped: Mapping[str, object], path: str) -> object:
    value: object = dumped
    for name in path.split("."):
        assert isinstance(value, Mapping)
        value = value[name]
    return value


def _paths(profile: Profile) -> list[str]:
    """Return every key of the profile; a missing tier is one key.

    Undeclared flags come after the declared ones. The variables of `engine.environment` replace that key.
    """
    engine = profile.engine
    more = [f"{ARGUMENTS}{name}" for name in engine.arguments.model_extra or ()]
    variables = [f"engine.environment.{name}" for name in engine.environment]
    absent = [name for name in TIERS if getattr(profile.tiers, name.partition(".")[2]) is None]
    paths: list[str] = []
    for key in keys(engine=engine.kind):
        if key.path == "engine.environment":
            paths += [*more, *(variables or [key.path])]
        elif key.path in absent or not (key.is_section or any(is_within(key.path, tier) for tier in absent)):
            paths.append(key.path)
    return paths
