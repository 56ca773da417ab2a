"""From a name or a file to one frozen `Profile`, with the origin of every key.

Layers, each over the one before: defaults < the profile named by `extends` < the file < `DYN_KVBM_*` variables <
`--set key=value`. Mappings are merged key by key; anything else, lists included, replaces what was there. Reads files
and the mapping of variables that it is given, never the process's environment. Every mistake is a ProfileError that
shows where the offending text was written and, for a name, the nearest right one; all of them are found at once, each
layer being read on without what is wrong in it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from kvbm.config.document import (
    Document,
    Entry,
    Mistake,
    Source,
    entry_at,
    located,
    parse_file,
    parse_value,
    plain_scalar,
    plain_values,
    together,
)
from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.flags import flag_name, refused_flags
from kvbm.config.interpolation import Interpolation
from kvbm.config.mistakes import NOT_BUILT_PROFILES, mistakes_in, no_sections, not_built, profile_file
from kvbm.config.schema import Key, Profile, keys
from kvbm.config.variables import PREFIX, drop_idle_disk, put, read_variables
from kvbm.errors import ProfileError

DEFAULT = "default"
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A profile and where it came from.

    `values` has every key as `show` prints it, a tier that is left out as one key without a value. `origins` has the
    same keys: `default`, `file:line`, a variable or `--set`. `extends` has what each file of the chain extends.
    """

    name: str
    path: Path
    profile: Profile
    values: Mapping[str, object]
    origins: Mapping[str, str]
    sources: Mapping[str, Source]
    extends: tuple[Source, ...]
    warnings: tuple[str, ...]

    def mistake(self, key: str, message: str, *, hint: str | None = None) -> Mistake:
        """The error of a value that only the machine can judge, at the place where `key` was written."""
        return Mistake(message, self.sources.get(key, self.path), hint=hint, key=key)


@dataclass(frozen=True, slots=True)
class Examined:
    """All mistakes of a profile in the order of its layers, and what it amounts to without them, if that is one."""

    path: Path
    mistakes: tuple[ProfileError, ...]
    resolved: ResolvedProfile | None


def load(
    reference: str,
    *,
    directories: Sequence[Path],
    variables: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, tuple[str, str]] | None = None,
) -> ResolvedProfile:
    """Resolves the profile that `reference` names, a file or a name in one of `directories`.

    `overrides` are texts of `--set`; `options` are keys that a command has an option for, as `{key: (option, text)}`,
    and win over everything. ProfileError for a mistake, ProfileMistakes for several.
    """
    examined = examine(reference, directories=directories, variables=variables, overrides=overrides, options=options)
    if examined.mistakes:
        raise together(examined.mistakes)
    assert examined.resolved is not None, f"{examined.path} has neither mistakes nor a profile"
    return examined.resolved


def examine(
    reference: str,
    *,
    directories: Sequence[Path],
    variables: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, tuple[str, str]] | None = None,
) -> Examined:
    """What `load` resolves, with its mistakes beside it. ProfileError only where there is no such file."""
    path, environment = find(reference, directories=directories), variables or {}
    findings = _Findings()
    document = _file_with_parents(path, directories, findings)
    return _examined(path, document, environment, overrides, options or {}, findings)


def examine_written(
    path: Path,
    written: Document,
    *,
    directories: Sequence[Path],
    parent: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Examined:
    """What a file at `path` would amount to that says what `written` says and extends `parent`."""
    findings = _Findings()
    below = _file_with_parents(parent, directories, findings) if parent is not None else {}
    environment = {name: value for name, value in (variables or {}).items() if not name.startswith(PREFIX)}
    return _examined(path, _merge(below, written), environment, (), {}, findings)


def written_by(
    overrides: Sequence[str], options: Mapping[str, tuple[str, str]]
) -> tuple[Document, tuple[ProfileError, ...]]:
    """What `--set` and options say, as a file would, and their mistakes."""
    findings = _Findings()
    document, _ = _with_layers({}, {}, overrides, options, findings)
    return document, findings.in_order()


@dataclass(slots=True)
class _Findings:
    """What was found while layers were read. `labels` are the files in the order in which mistakes are told."""

    mistakes: list[ProfileError] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)  # keys that were taken away, and what unknown ones stood for
    extends: list[Source] = field(default_factory=list)
    is_incomplete: bool = False  # a file could not be read, and what is missing may be in it

    def add(self, found: Iterable[Mistake]) -> list[Mistake]:
        """Adds and returns those that do not follow from earlier ones."""
        new = [one for one in found if not self._is_consequence(one)]
        self.mistakes += new
        self.wrong |= {key for one in new for key in (one.key, one.meant) if key}
        return new

    def _is_consequence(self, mistake: Mistake) -> bool:
        """A section is said to lack what was taken away from it, and what a key needs may have been taken away."""
        return any(_is_within(mistake.key, key) or _is_within(key, mistake.key) for key in self.wrong)

    def in_order(self) -> tuple[ProfileError, ...]:
        """Those of files by file and line; then variables and the command line, which have no lines."""
        return tuple(sorted({one.message: one for one in self.mistakes}.values(), key=self._place))

    def _place(self, mistake: ProfileError) -> tuple[int, float, int]:
        file = mistake.file if isinstance(mistake, Mistake) else ""
        rank = self.labels.index(file) if file in self.labels else len(self.labels)
        source = mistake.source if isinstance(mistake, Mistake) else None
        line = source.line if source is not None else None
        return rank, float("inf") if line is None else line, source.column if source is not None and line else 0


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _examined(
    path: Path,
    document: Document,
    environment: Mapping[str, str],
    overrides: Sequence[str],
    options: Mapping[str, tuple[str, str]],
    findings: _Findings,
) -> Examined:
    merged, warnings = _with_layers(document, environment, overrides, options, findings)
    interpolation = Interpolation(environment, [])
    merged = interpolation.document(merged)
    _take_away(merged, findings.add(interpolation.mistakes))
    profile = _validated(merged, path, findings)
    mistakes = findings.in_order()
    if profile is None:
        return Examined(path, mistakes, None)
    values, sources = _values(profile), _sources(profile, merged)
    origins = {key: source.origin if source else DEFAULT for key, source in sources.items()}
    written = {key: source for key, source in sources.items() if source}
    extends = tuple(findings.extends)
    return Examined(
        path, mistakes, ResolvedProfile(path.stem, path, profile, values, origins, written, extends, warnings)
    )


def _with_layers(
    document: Document,
    environment: Mapping[str, str],
    overrides: Sequence[str],
    options: Mapping[str, tuple[str, str]],
    findings: _Findings,
) -> tuple[Document, tuple[str, ...]]:
    """The document under what is no file, and warnings."""
    from_variables, warnings = read_variables(_without_mistakes(environment, findings))
    layers = [from_variables]
    for text in overrides:
        try:
            layers.append(_override(text))
        except Mistake as mistake:
            findings.mistakes.append(mistake)
    layers += [_option(key, *written) for key, written in options.items()]
    for layer in layers:
        document = _merge(document, _sound(layer, findings))
    return document, warnings + drop_idle_disk(document)


def _without_mistakes(environment: Mapping[str, str], findings: _Findings) -> dict[str, str]:
    usable = {}
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        try:
            read_variables({name: environment[name]})
        except ProfileError as mistake:
            findings.mistakes.append(mistake)
        else:
            usable[name] = environment[name]
    return usable


def find(reference: str, *, directories: Sequence[Path]) -> Path:
    """The file of a profile. What contains a slash or ends in .yaml is a path, anything else a name.

    ProfileError for a name that is none.
    """
    if _is_path(reference):
        return Path(reference)
    candidates = [directory / f"{reference}{SUFFIXES[0]}" for directory in directories]
    existing = next((candidate for candidate in candidates if candidate.is_file()), None)
    if existing is None:
        if reference.lower() in NOT_BUILT_PROFILES:
            about = NOT_BUILT_PROFILES[reference.lower()]
            raise ProfileError(f"there is no profile `{reference}`: {about}", hint="`kvbm profile list`")
        raise ProfileError(f"no profile is named `{reference}`", hint=_nearest_name(reference, shipped(directories)))
    return existing


def _is_path(reference: str) -> bool:
    return "/" in reference or reference.endswith(SUFFIXES)


def shipped(directories: Sequence[Path]) -> tuple[str, ...]:
    """Names of the profiles in `directories`, sorted."""
    return tuple(sorted({path.stem for directory in directories for path in directory.glob(f"*{SUFFIXES[0]}")}))


def _nearest_name(reference: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(reference, names, n=1)
    if nearest:
        return f"did you mean `{nearest[0]}`? A file is given with its path: `./{reference}.yaml`"
    return f"there are {', '.join(f'`{name}`' for name in names)}; a file is given with its path"


def _file_with_parents(path: Path, directories: Sequence[Path], findings: _Findings) -> Document:
    """The file's document over those of all that it extends. ProfileError if `path` itself cannot be read."""
    chain: list[Document] = []
    files: list[Path] = []
    while True:
        document = _file(path, findings)
        chain.append(document)
        files.append(path.resolve())
        extends = document.pop("extends", None)
        try:
            parent = _parent(extends, path, directories, files) if extends is not None else None
        except Mistake as mistake:
            findings.mistakes.append(mistake)
            findings.is_incomplete = True
            parent = None
        if extends is None or parent is None:
            break
        findings.extends.append(extends.source)
        path = parent
    merged: Document = {}
    for document in reversed(chain):
        merged = _merge(merged, document)
    return merged


def _parent(extends: Entry, path: Path, directories: Sequence[Path], files: Sequence[Path]) -> Path:
    """The file that `path` extends; a path is relative to the file that says so. Mistake if it cannot be read."""
    reference, source = extends.value, extends.source
    if not isinstance(reference, str) or not reference or not _can_be_a_path(reference):
        raise located("`extends` must be the name or the path of a profile", source, key="extends")
    try:
        parent = path.parent / reference if _is_path(reference) else find(reference, directories=directories)
    except ProfileError as error:
        raise located(error.message, source, hint=error.hint, key="extends") from None
    if parent.resolve() in files:
        raise located(f"`extends` leads back to `{parent}`", source, key="extends")
    if not parent.is_file():
        raise located(f"there is no file `{parent}`", source, key="extends")
    if not os.access(parent, os.R_OK):
        raise located(f"`{parent}` cannot be read", source, key="extends")
    return parent


def _can_be_a_path(text: str) -> bool:
    return "\0" not in text and len(text) < 4096


def _file(path: Path, findings: _Findings) -> Document:
    document, mistakes = parse_file(path, noun="profile")
    findings.labels.append(str(path))
    findings.mistakes += mistakes
    findings.is_incomplete |= bool(mistakes) and not document
    return _merge({}, _sound(document, findings))


def _sound(document: Document, findings: _Findings) -> Document:
    """A layer that can be laid over others: its sections are sections, its flags spelled in one way."""
    document = dict(document)
    _take_away(document, findings.add(no_sections(document, _SECTIONS)))
    return _one_spelling(document, findings)


def _override(text: str) -> Document:
    """The document of one `--set key=value`. The value is as in a file, on one line."""
    path, equals, raw = text.partition("=")
    shown = f"--set {text}"
    names = path.strip().split(".")
    if not equals or not all(names):
        source = Source("--set", shown, len("--set "), len(text))
        raise located("`--set` takes KEY=VALUE, such as `tiers.host.capacity=2GB`", source)
    if names == ["extends"]:
        source = Source("--set", shown, len("--set "), len(path))
        hint = "write it into a file, whose keys are then laid over those of its parent"
        raise located("`extends` is for files", source, hint=hint, key="extends")
    key = Source("--set", shown, len("--set "), len(path))
    document: Document = {}
    source = Source("--set", shown, len(shown) - len(raw), len(raw))
    put(document, names, Entry(key, source, _bracketed(raw, source) if raw[:1] in ("[", "{") else _typed(raw)))
    return document


def _bracketed(raw: str, source: Source) -> object:
    """A list or a mapping, as a file has it."""
    value, mistakes = parse_value(raw, source)
    if mistakes:
        raise mistakes[0]
    return value


def _option(key: str, option: str, text: str) -> Document:
    source = Source(option, f"{option} {text}", len(option) + 1, len(text))
    document: Document = {}
    value = text if _ALL_KEYS[key].kind == "text" else _typed(text)
    put(document, key.split("."), Entry(source, source, value))
    return document


def _typed(raw: str) -> object:
    text = raw.strip()
    is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else plain_scalar(text)


def _merge(base: Document, over: Document, *, path: str = "") -> Document:
    """`over` laid over `base`, section by section. Consumes neither.

    A section without keys says nothing; a tier that is `null` takes away what was there.
    """
    merged = dict(base)
    for name, entry in over.items():
        below, here = merged.get(name), f"{path}{name}"
        if entry.value is None and here in _SECTIONS and not (here in _TIERS and entry.source.written.strip()):
            merged.setdefault(name, Entry(entry.key, entry.source, {}))
            continue
        if entry.section is not None:
            under = dict((below.section if below is not None else None) or {})
            entry = Entry(entry.key, entry.source, _merge(under, dict(entry.section), path=f"{here}."))
        merged[name] = entry
    if path[:-1] in _TIERS and "capacity" in over and "blocks" not in over:
        merged.pop("blocks", None)  # `blocks` wins inside a layer; a later layer's capacity must not lose to it
    return merged


def _one_spelling(document: Document, findings: _Findings) -> Document:
    """The same with flags by the names that they have in the schema, whichever way they were written."""
    arguments = entry_at(document, ["engine", "arguments"])
    if arguments is None or arguments.section is None:
        return document
    spelled: Document = {}
    written: dict[str, str] = {}
    for name, entry in arguments.section.items():
        flag = flag_name(name)
        if flag in spelled:
            message = f"`{name}` and `{written[flag]}` are the same flag"
            findings.mistakes.append(located(message, entry.key, key=f"{_ARGUMENTS}{flag}"))
        else:
            spelled[flag], written[flag] = entry, name
    engine = document["engine"]
    inside = {**(engine.section or {}), "arguments": Entry(arguments.key, arguments.source, spelled)}
    return {**document, "engine": Entry(engine.key, engine.source, inside)}


_ARGUMENTS = "engine.arguments."
_ALL_KEYS = {key.path: key for kind in ENGINE_KINDS for key in keys(engine=kind)}
_SECTIONS = frozenset({"engine.environment", *(path for path, key in _ALL_KEYS.items() if key.is_section)})
_TIERS = frozenset(path for path in _SECTIONS if path.startswith("tiers."))


def _validated(document: Document, path: Path, findings: _Findings) -> Profile | None:
    """The profile, None if what is left of the document without its mistakes is none. Consumes the document."""
    _take_away(document, findings.add(not_built(document)))
    kind = _engine_kind(document)
    if kind == "vllm":
        _take_away(document, findings.add(refused_flags(document)))
    is_known = "engine.kind" not in findings.wrong
    if not is_known:
        document = _of_any_kind(document)
    while True:
        try:
            profile = Profile.model_validate(plain_values(document))
            return profile if is_known and not findings.is_incomplete else None
        except ValidationError as error:
            file = profile_file(kind)
            found = mistakes_in(error, document, path, file, is_complete=not findings.is_incomplete)
        findings.add(found)
        if not _take_away(document, found):
            return None


def _of_any_kind(document: Document) -> Document:
    """The document with the one kind of engine whose rules refuse nothing that another's allow."""
    engine = document.get("engine")
    if engine is None or engine.section is None:
        return document
    inside = {name: entry for name, entry in engine.section.items() if name != "arguments"}
    inside["kind"] = Entry(engine.key, engine.source, "vllm")
    return {**document, "engine": Entry(engine.key, engine.source, inside)}


def _take_away(document: Document, mistakes: Sequence[Mistake]) -> bool:
    """Removes what mistakes are about from the document; whether there was anything to remove."""
    removed = [_remove(document, mistake.key.split(".")) for mistake in mistakes]
    return any(removed)


def _remove(document: Document, names: Sequence[str]) -> bool:
    """Removes the entry at `names`, or the one above it that is no section. A name may have dots in it."""
    for depth in range(len(names), 0, -1):
        name, below = ".".join(names[:depth]), names[depth:]
        entry = document.get(name)
        if entry is None:
            continue
        if below and entry.section is not None:
            inside = dict(entry.section)
            is_removed = _remove(inside, below)
            document[name] = Entry(entry.key, entry.source, inside)
            return is_removed
        del document[name]
        return True
    return False


def _engine_kind(document: Document) -> str:
    entry = entry_at(document, ["engine", "kind"])
    return str(entry.value) if entry is not None else ENGINE_KINDS[0]


def _sources(profile: Profile, document: Document) -> dict[str, Source | None]:
    """Of every key, None for a default."""
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
    """Every key that the profile has a value for, and a section that is left out as one.

    Flags that are only passed on come after the declared ones, and every variable of `engine.environment` in the place
    of that key.
    """
    engine = profile.engine
    more = [f"{_ARGUMENTS}{name}" for name in engine.arguments.model_extra or ()]
    variables = [f"engine.environment.{name}" for name in engine.environment]
    absent = [name for name in _TIERS if getattr(profile.tiers, name.partition(".")[2]) is None]
    paths: list[str] = []
    for key in keys(engine=engine.kind):
        if key.path == "engine.environment":
            paths += [*more, *(variables or [key.path])]
        elif key.path in absent or _is_shown(key, absent):
            paths.append(key.path)
    return paths


def _is_shown(key: Key, absent: Sequence[str]) -> bool:
    return not key.is_section and not any(_is_within(key.path, section) for section in absent)
