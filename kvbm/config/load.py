"""From a name or a file to one frozen `Profile`, with the origin of every key.

Layers, each over the one before: defaults < the profile named by `extends` < the file < `DYN_KVBM_*` variables <
`--set key=value`. Reads files and the mapping of variables that it is given, never the process's environment. Every
mistake is a ProfileError that shows where the offending text was written and, for a name, the nearest right one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from kvbm.config.document import Document, Entry, Source, entry_at, located, plain_scalar, plain_values, read_file
from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.flags import flag_name, refuse_flags
from kvbm.config.mistakes import first_mistake, profile_file, refuse_not_built
from kvbm.config.schema import Profile, keys
from kvbm.config.variables import drop_idle_disk, put, read_variables
from kvbm.errors import ProfileError

DEFAULT = "default"
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A profile and where it came from. `origins` has every key: `default`, `file:line`, a variable or `--set`."""

    name: str
    path: Path
    profile: Profile
    origins: Mapping[str, str]
    sources: Mapping[str, Source]
    warnings: tuple[str, ...]

    def mistake(self, key: str, message: str, *, hint: str | None = None) -> ProfileError:
        """The error of a value that only the machine can judge, at the place where `key` was written."""
        if key in self.sources:
            return located(message, self.sources[key], hint=hint)
        return ProfileError(f"{message}\n  {self.path}", hint=hint)


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
    and win over everything.
    """
    path = find(reference, directories=directories)
    merged = _read_with_parents(path, directories, children=())
    from_variables, warnings = read_variables(variables or {})
    from_options = [_option(key, *written) for key, written in (options or {}).items()]
    for layer in (from_variables, *map(_override, overrides), *from_options):
        merged = _merge(merged, layer)
    warnings += drop_idle_disk(merged)
    profile = _validate(merged, path)
    sources = _sources(profile, merged)
    origins = {key: source.origin if source else DEFAULT for key, source in sources.items()}
    written = {key: source for key, source in sources.items() if source}
    return ResolvedProfile(path.stem, path, profile, origins, written, warnings)


def find(reference: str, *, directories: Sequence[Path]) -> Path:
    """The file of a profile. What contains a slash or ends in .yaml is a path, anything else a name."""
    if _is_path(reference):
        return Path(reference)
    candidates = [directory / f"{reference}{SUFFIXES[0]}" for directory in directories]
    existing = next((candidate for candidate in candidates if candidate.is_file()), None)
    if existing is None:
        names = shipped(directories)
        raise ProfileError(f"no profile is named `{reference}`", hint=_nearest_name(reference, names))
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


def _read_with_parents(path: Path, directories: Sequence[Path], *, children: tuple[Path, ...]) -> Document:
    document = _read(path)
    extends = document.pop("extends", None)
    if extends is None:
        return document
    if not isinstance(extends.value, str) or not extends.value:
        raise located("`extends` must be the name or the path of a profile", extends.source)
    parent = _parent(extends, path, directories)
    chain = (*children, path.resolve())
    if parent.resolve() in chain:
        raise located(f"`extends` leads back to `{parent}`", extends.source)
    return _merge(_read_with_parents(parent, directories, children=chain), document)


def _parent(extends: Entry, path: Path, directories: Sequence[Path]) -> Path:
    """A path is relative to the file that says `extends`."""
    reference = str(extends.value)
    try:
        parent = path.parent / reference if _is_path(reference) else find(reference, directories=directories)
    except ProfileError as error:
        raise located(error.message, extends.source, hint=error.hint) from None
    if not parent.is_file():
        raise located(f"there is no file `{parent}`", extends.source)
    return parent


def _read(path: Path) -> Document:
    return _merge({}, read_file(path, noun="profile"))


def _override(text: str) -> Document:
    """The document of one `--set key=value`. The value is a plain scalar, or text in quotes."""
    path, equals, raw = text.partition("=")
    shown = f"--set {text}"
    names = path.strip().split(".")
    if not equals or not all(names):
        source = Source("--set", shown, len("--set "), len(text))
        raise located("`--set` takes KEY=VALUE, such as `tiers.host.capacity=2GB`", source)
    key = Source("--set", shown, len("--set "), len(path))
    document: Document = {}
    put(document, names, Entry(key, Source("--set", shown, len(shown) - len(raw), len(raw)), _typed(raw)))
    return document


def _option(key: str, option: str, text: str) -> Document:
    source = Source(option, f"{option} {text}", len(option) + 1, len(text))
    document: Document = {}
    put(document, key.split("."), Entry(source, source, _typed(text)))
    return document


def _typed(raw: str) -> object:
    text = raw.strip()
    is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else plain_scalar(text)


def _merge(base: Document, over: Document, *, path: str = "") -> Document:
    """`over` laid over `base`, section by section; a section without keys says nothing. Consumes neither."""
    merged = dict(base)
    if path == _ARGUMENTS:
        over = _one_spelling(over)
    for name, entry in over.items():
        below, here = merged.get(name), f"{path}{name}"
        if entry.value is None and here in _SECTIONS:
            continue
        if entry.section is not None:
            under = dict((below.section if below is not None else None) or {})
            entry = Entry(entry.key, entry.source, _merge(under, dict(entry.section), path=f"{here}."))
        merged[name] = entry
    if path in ("tiers.host.", "tiers.disk.") and "capacity" in over and "blocks" not in over:
        merged.pop("blocks", None)  # `blocks` wins inside a layer; a later layer's capacity must not lose to it
    return merged


def _one_spelling(arguments: Document) -> Document:
    """Flags by the names that they have in the schema, whichever way they were written."""
    document: Document = {}
    written: dict[str, str] = {}
    for name, entry in arguments.items():
        spelled = flag_name(name)
        if spelled in document:
            raise located(f"`{name}` and `{written[spelled]}` are the same flag", entry.key)
        document[spelled], written[spelled] = entry, name
    return document


_ARGUMENTS = "engine.arguments."
_SECTIONS = frozenset(
    {"engine.environment", *(key.path for kind in ENGINE_KINDS for key in keys(engine=kind) if key.is_section)}
)


def _validate(document: Document, path: Path) -> Profile:
    refuse_not_built(document)
    kind = _engine_kind(document)
    if kind == "vllm":
        refuse_flags(document)
    try:
        return Profile.model_validate(plain_values(document))
    except ValidationError as error:
        raise first_mistake(error, document, path, profile_file(kind)) from None


def _engine_kind(document: Document) -> str:
    entry = entry_at(document, ["engine", "kind"])
    return str(entry.value) if entry is not None else ENGINE_KINDS[0]


def _sources(profile: Profile, document: Document) -> dict[str, Source | None]:
    """Of every key, None for a default.

    Flags that are only passed on come after the declared ones, and every variable of `engine.environment` in the place
    of that key.
    """
    engine = profile.engine
    more = [f"{_ARGUMENTS}{name}" for name in engine.arguments.model_extra or ()]
    variables = [f"engine.environment.{name}" for name in engine.environment]
    paths: list[str] = []
    for key in keys(engine=engine.kind):
        if key.path == "engine.environment":
            paths += [*more, *(variables or [key.path])]
        elif not key.is_section:
            paths.append(key.path)
    entries = {path: entry_at(document, path.split(".")) for path in paths}
    return {path: entry.source if entry else None for path, entry in entries.items()}
