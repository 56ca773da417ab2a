"""Layers of a profile and how they are merged: files with their parents, variables, overrides.

Mappings are merged key by key; any other value, also a list, replaces the earlier one. Wrong entries are removed from a
layer and reading continues, so that all mistakes are found.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvbm.config.document import (
    Document,
    Entry,
    Mistake,
    Source,
    entry_at,
    parse_file,
    parse_value,
    plain_scalar,
)
from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.files import is_missing, real_path, reason_not_readable
from kvbm.config.findings import Findings, remove_mistaken
from kvbm.config.flags import flag_name
from kvbm.config.key_list import keys
from kvbm.config.mistakes import not_sections
from kvbm.config.variables import drop_unused, overridden_values, put, read_variables, valid_variables
from kvbm.errors import ProfileError

SUFFIXES = (".yaml", ".yml")
HALVES = "storage"  # the directory of shipped profiles that have tiers and no engine; their names begin with it
NEAR = 0.75  # similarity of file names; the intended file may not exist
ARGUMENTS = "engine.arguments."
_ALL_KEYS = {key.path: key for kind in ENGINE_KINDS for key in keys(engine=kind)}
_SECTIONS = frozenset({"engine.environment", *(path for path, key in _ALL_KEYS.items() if key.is_section)})
TIERS = frozenset(path for path in _SECTIONS if path.startswith("tiers."))


def find(reference: str, *, directories: Sequence[Path], inside: Path | None = None) -> Path:
    """Return the file of a profile. A reference with a slash or with .yaml at its end is a path, else a name; so is
    `storage/NAME`.

    If no profile has the name, it is a file in the current directory; not if `inside` is given, the directory of the
    file that contains the reference. ProfileError for an unknown name.
    """
    if _is_path(reference):
        path = Path(os.path.expanduser(reference))
        if is_missing(path) and (hint := _instead_of(path, directories)) is not None:
            raise ProfileError(f"cannot read the profile `{reference}`: no such file or directory", hint=hint)
        return path
    candidates = [directory / f"{reference}{SUFFIXES[0]}" for directory in directories]
    existing = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
    if existing is None and inside is None and os.path.isfile(reference):
        return Path(reference)
    if existing is None:
        hint = _nearest_name(reference, directories, inside or Path())
        raise ProfileError(f"no profile is named `{reference}`", hint=hint)
    return existing


def _is_path(reference: str) -> bool:
    return "/" in reference.removeprefix(f"{HALVES}/") or reference.endswith(SUFFIXES)


def shipped(directories: Sequence[Path]) -> tuple[str, ...]:
    """Names of the profiles in `directories`, sorted."""
    return tuple(sorted({path.stem for directory in directories for path in directory.glob(f"*{SUFFIXES[0]}")}))


def shipped_halves(directories: Sequence[Path]) -> tuple[str, ...]:
    """Names of the profiles in `directories` that have no engine, sorted."""
    return tuple(f"{HALVES}/{name}" for name in shipped([directory / HALVES for directory in directories]))


def shipped_name(path: Path, directories: Sequence[Path]) -> str | None:
    """Return the name of a shipped profile or half, None for another file."""
    place = real_path(path.parent)
    for directory in map(real_path, directories):
        if place in (directory, directory / HALVES):
            return str((place / path.stem).relative_to(directory))
    return None


def _nearest_name(reference: str, directories: Sequence[Path], inside: Path) -> str:
    file = next((name for suffix in ("", *SUFFIXES) if os.path.isfile(inside / (name := f"{reference}{suffix}"))), None)
    if file is not None:
        return f"use `./{file}` for the file in this directory"
    is_half = reference.startswith(f"{HALVES}/")
    names = shipped_halves(directories) if is_half else shipped(directories)
    nearest = difflib.get_close_matches(reference, names, n=1, cutoff=NEAR if is_half else 0.6)
    if nearest:
        return f"did you mean `{nearest[0]}`? For a file, give its path: `./{reference}.yaml`"
    return f"shipped profiles: {', '.join(f'`{name}`' for name in names)}; for a file, give its path"


def _instead_of(path: Path, directories: Sequence[Path]) -> str | None:
    """Suggests the shipped profile of that name, or a file with a similar name."""
    name = str(path.with_suffix(""))
    if name in (*shipped(directories), *shipped_halves(directories)):
        return f"use `{name}`, without suffix, for the shipped profile"
    return _nearest_file(path, [])


def _nearest_file(path: Path, children: Sequence[Path]) -> str | None:
    """Suggests a file with a similar name in the same directory, except files that extend `path`."""
    if not os.path.isdir(path.parent):
        return None
    candidates = [file for suffix in SUFFIXES for file in path.parent.glob(f"*{suffix}")]
    names = {file.stem: file.name for file in candidates if real_path(file) not in children}
    nearest = difflib.get_close_matches(path.stem, names, n=1, cutoff=NEAR)
    return f"did you mean `{path.with_name(names[nearest[0]])}`?" if nearest else None


def files_with_parents(paths: Sequence[Path], directories: Sequence[Path], findings: Findings) -> Document:
    """Merge files, each over its parents and over the earlier ones, like a file whose `extends` lists `paths`.
    ProfileError if one of them cannot be read."""
    merged: Document = {}
    read: set[Path] = set()
    for path in (one for one in paths if real_path(one) not in read):
        for document in _parents_and_file(path, directories, findings, read):
            merged = merge(merged, document)
    return merged


def _parents_and_file(
    path: Path, directories: Sequence[Path], findings: Findings, read: set[Path]
) -> Iterator[Document]:
    """Yield a file below all that it extends: parents first. A parent of several files counts once, below all of them.

    `family` begins with `path`, and each member extends the next one: path, real path, document, and the references
    that are not yet followed. Parents that are `read` are skipped; those of `path` are added."""
    family = [_opened(path, directories, findings)]
    while family:
        file, real, document, references = family[-1]
        read.add(real)
        for reference, source in references:
            try:
                parent = _parent(reference, source, file, directories, [one[1] for one in family])
            except Mistake as mistake:
                findings.mistakes.append(mistake)
                findings.is_incomplete = True
                continue
            findings.extends.append(replace(source, text=reference, column=0, width=len(reference)))
            if real_path(parent) not in read:
                family.append(_opened(parent, directories, findings))
                break
        else:
            yield document
            family.pop()


def _opened(
    path: Path, directories: Sequence[Path], findings: Findings
) -> tuple[Path, Path, Document, Iterator[tuple[str, Source]]]:
    document = _file(path, findings)
    if shipped_name(path, directories) is None:
        findings.own.add(str(path))
    return path, real_path(path), document, _references(document.pop("extends", None), findings)


def _references(extends: Entry | None, findings: Findings) -> Iterator[tuple[str, Source]]:
    """Yield what `extends` names: one profile, or each of a list."""
    if extends is None:
        return
    named = extends.value if isinstance(extends.value, list) and extends.value else [extends.value]
    for reference in named:
        if isinstance(reference, str) and 0 < len(reference) < 4096 and "\0" not in reference:
            yield reference, extends.source
        else:
            text = "`extends` must be the name or path of a profile, or a list of them"
            findings.mistakes.append(Mistake(text, extends.source, key="extends"))
            findings.is_incomplete = True


def _parent(reference: str, source: Source, path: Path, directories: Sequence[Path], files: Sequence[Path]) -> Path:
    """Return the parent file of `path`; a relative path is relative to `path`. Mistake if it cannot be read. `files`
    are `path` and those that extend it."""
    try:
        parent = (
            path.parent / os.path.expanduser(reference)
            if _is_path(reference)
            else find(reference, directories=directories, inside=path.parent)
        )
    except ProfileError as error:
        raise Mistake(error.message, source, hint=error.hint, key="extends") from None
    if (found := real_path(parent)) in files:
        cycle = " -> ".join(file.name for file in [*files[files.index(found) :], parent])
        raise Mistake(f"`extends` forms a cycle: {cycle}", source, key="extends")
    if (reason := reason_not_readable(parent)) is not None:
        hint = _nearest_file(parent, files) if is_missing(parent) else None
        raise Mistake(f"`extends`: cannot read `{parent}`: {reason}", source, hint=hint, key="extends")
    return parent


def _file(path: Path, findings: Findings) -> Document:
    document, mistakes = parse_file(path, noun="profile")
    findings.labels.append(str(path))
    findings.mistakes += mistakes
    findings.is_incomplete |= bool(mistakes) and not document
    return merge({}, _valid_layer(document, findings))


def _valid_layer(document: Document, findings: Findings) -> Document:
    """Return a layer that can be merged: no value in place of a section, flags with underscores."""
    document = dict(document)
    remove_mistaken(document, findings.add(not_sections(document, _SECTIONS)))
    return _one_spelling(_variables_as_written(document), findings)


def _variables_as_written(document: Document) -> Document:
    """Replace the numbers in `engine.environment` by their text: a variable of `12.10` is not `12.1`."""
    variables, engine = entry_at(document, ["engine", "environment"]), document.get("engine")
    if engine is None or variables is None or variables.section is None:
        return document
    texts = {
        name: replace(entry, value=entry.source.written.strip()) if _is_number(entry.value) else entry
        for name, entry in variables.section.items()
    }
    inside = {**(engine.section or {}), "environment": replace(variables, value=texts)}
    return {**document, "engine": replace(engine, value=inside)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_spelling(document: Document, findings: Findings) -> Document:
    """Rename the flags to their names in the schema."""
    arguments = entry_at(document, ["engine", "arguments"])
    if arguments is None or arguments.section is None:
        return document
    spelled: Document = {}
    written: dict[str, str] = {}
    for name, entry in arguments.section.items():
        flag = flag_name(name)
        if flag in spelled:
            message = f"`{name}` and `{written[flag]}` are the same flag"
            findings.mistakes.append(Mistake(message, entry.key, key=f"{ARGUMENTS}{flag}"))
        else:
            spelled[flag], written[flag] = entry, name
    engine = document["engine"]
    inside = {**(engine.section or {}), "arguments": Entry(arguments.key, arguments.source, spelled)}
    return {**document, "engine": Entry(engine.key, engine.source, inside)}


def with_layers(
    document: Document,
    environment: Mapping[str, str],
    overrides: Sequence[str],
    options: Mapping[str, tuple[str, str]],
    findings: Findings,
) -> tuple[Document, tuple[str, ...]]:
    """Merge variables, overrides and options over the document. Returns it with warnings."""
    variables, mistakes = valid_variables(environment)
    findings.mistakes += mistakes
    from_variables, warnings = read_variables(variables)
    layers = [from_variables]
    for text in overrides:
        try:
            layers.append(_override(text))
        except Mistake as mistake:
            findings.mistakes.append(mistake)
    layers += [_option(key, *written) for key, written in options.items()]
    merged = document
    for layer in layers:
        merged = merge(merged, _valid_layer(layer, findings))
    warnings += drop_unused(merged, variables, below=document)
    return merged, (*warnings, *overridden_values(from_variables, merged, document, findings.own))


def _override(text: str) -> Document:
    """Parse one `--set key=value`. The value is one line of YAML."""
    path, equals, raw = text.partition("=")
    shown = f"--set {text}"
    names = path.strip().split(".")
    if not equals or not all(names):
        source = Source("--set", shown, len("--set "), len(text))
        raise Mistake(
            f"`--set` requires KEY=VALUE, not `{text}`", source, hint="for example `--set tiers.host.capacity=2GB`"
        )
    if names == ["extends"]:
        source = Source("--set", shown, len("--set "), len(path))
        hint = "write `extends` into a profile file"
        raise Mistake("`--set` cannot set `extends`", source, hint=hint, key="extends")
    key = Source("--set", shown, len("--set "), len(path))
    document: Document = {}
    source = Source("--set", shown, len(shown) - len(raw), len(raw))
    value, mistakes = parse_value(raw, source) if raw[:1] in ("[", "{") else (_typed(raw), [])
    if mistakes:
        raise mistakes[0]
    put(document, names, Entry(key, source, value))
    return document


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


def merge(base: Document, over: Document, *, path: str = "") -> Document:
    """Merge `over` over `base`, section by section, into a new document.

    An empty section changes nothing; a tier that is `null` removes that of `base`.
    """
    merged = dict(base)
    for name, entry in over.items():
        below, here = merged.get(name), f"{path}{name}"
        if entry.value is None and here in _SECTIONS and not (here in TIERS and entry.source.written.strip()):
            merged.setdefault(name, Entry(entry.key, entry.source, {}))
            continue
        if entry.section is not None:
            under = dict((below.section if below is not None else None) or {})
            entry = Entry(entry.key, entry.source, merge(under, dict(entry.section), path=f"{here}."))
        merged[name] = entry
    if path[:-1] in TIERS and "capacity" in over and "blocks" not in over:
        merged.pop("blocks", None)  # within a layer `blocks` has priority, but a later layer's `capacity` replaces it
    return merged
