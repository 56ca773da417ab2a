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
from pydantic_core import ErrorDetails

from kvbm.config.document import Document, Entry, Source, located, plain_scalar, plain_values, read_document
from kvbm.config.schema import Profile, keys
from kvbm.config.variables import put, read_variables
from kvbm.errors import ProfileError

DEFAULT = "default"
SUFFIXES = (".yaml", ".yml")
NOT_BUILT = {
    "tiers.disk": "this version keeps blocks in host memory; use `tiers.host`",
    "tiers.object": "this version keeps blocks in host memory; use `tiers.host`",
    "filters": "this version offloads every full block; leave the section out",
    "metrics": "kvbm_* metrics are always at /metrics of the engine's server; leave the section out",
}
NOT_BUILT_ENGINES = ("vllm", "tensorrt-llm", "sglang")


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A profile and where it came from. `origins` has every key: `default`, `file:line`, a variable or `--set`."""

    name: str
    path: Path
    profile: Profile
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


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
    profile = _validate(merged, path)
    return ResolvedProfile(path.stem, path, profile, _origins(profile, merged), warnings)


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
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ProfileError(f"`{path}` is not a text file in UTF-8") from None
    except OSError as error:
        raise ProfileError(f"cannot read the profile `{path}`: {(error.strerror or str(error)).lower()}") from None
    return read_document(text, label=str(path))


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
    """`over` laid over `base`, section by section. Consumes neither."""
    merged = dict(base)
    for name, entry in over.items():
        below, here = merged.get(name), f"{path}{name}"
        if entry.value is None and here in _SECTIONS:
            continue
        if below is not None and below.section is not None and entry.section is not None:
            section = _merge(dict(below.section), dict(entry.section), path=f"{here}.")
            entry = Entry(entry.key, entry.source, section)
        merged[name] = entry
    if path == "tiers.host." and "capacity" in over and "blocks" not in over:
        merged.pop("blocks", None)  # `blocks` wins inside a layer; a later layer's capacity must not lose to it
    return merged


_KEYS = keys()
_SECTIONS = frozenset(key.path for key in _KEYS if key.is_section)


def _validate(document: Document, path: Path) -> Profile:
    _refuse_not_built(document)
    try:
        return Profile.model_validate(plain_values(document))
    except ValidationError as error:
        details = error.errors(include_url=False)
        unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
        raise _explain((unknown or details)[0], document, path) from None


def _refuse_not_built(document: Document) -> None:
    for name, hint in NOT_BUILT.items():
        entry = _entry_at(document, name.split("."))
        if entry is not None:
            raise located(f"`{name}` is not in this version", entry.key, hint=hint)
    kind = _entry_at(document, ["engine", "kind"])
    if kind is not None and kind.value in NOT_BUILT_ENGINES:
        raise located(
            f"engine kind `{kind.value}` is not in this version", kind.source, hint="the only one is `embedded`"
        )


def _entry_at(document: Mapping[str, Entry], names: Sequence[object]) -> Entry | None:
    """The entry at `names`, or None where the document does not go that far."""
    entry: Entry | None = None
    section: Mapping[str, Entry] | None = document
    for name in names:
        entry = section.get(str(name)) if section is not None else None
        if entry is None:
            return None
        section = entry.section
    return entry


def _explain(detail: ErrorDetails, document: Document, path: Path) -> ProfileError:
    """Pydantic's finding in our words, at its place."""
    names = [name for name in detail["loc"] if name != "[key]"]
    dotted = ".".join(map(str, names))
    entry = _entry_at(document, names)
    if detail["type"] == "extra_forbidden":
        assert entry is not None
        return located(f"unknown key `{dotted}`", entry.key, hint=_nearest_key(dotted))
    if detail["type"] == "missing":
        return ProfileError(f"`{dotted}` is missing\n  {path}", hint=_MISSING[dotted.partition(".")[0]])
    message = f"`{dotted}` {_complaint(detail)}"
    if entry is None:
        return ProfileError(f"{message}\n  {path}")
    return located(message, entry.key if entry.section is not None or "[key]" in detail["loc"] else entry.source)


_MISSING = {
    "engine": "add `engine.model`, such as `synthetic:tiny`",
    "tiers": "add `tiers.host.capacity`, such as `64GiB`",
}


def _complaint(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    template = _COMPLAINTS.get(detail["type"])
    if detail["type"] == "value_error":
        return str(context["error"])
    if template is None:
        return f"is not valid: {detail['msg']}"
    return template.format(**context) + _but_is(detail["input"])


_COMPLAINTS = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be a name of letters, digits and underscores",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "dict_type": "must be a section with keys of its own",
    "model_type": "must be a section with keys of its own",
}


def _but_is(value: object) -> str:
    if value is None:
        return ", not empty"
    if isinstance(value, dict | list):
        return f", not a {'section' if isinstance(value, dict) else 'list'}"
    if isinstance(value, bool):
        return f", not {str(value).lower()}"
    shown = f"the text `{value}`" if isinstance(value, str) else f"`{value}`"
    return f", not {shown}" if value != "" else ""


def _nearest_key(dotted: str) -> str:
    """Siblings first, then keys of that name elsewhere, then all that the section has."""
    prefix, _, leaf = dotted.rpartition(".")
    siblings = [key.path.rpartition(".")[2] for key in _KEYS if key.path.rpartition(".")[0] == prefix]
    elsewhere = {key.path.rpartition(".")[2]: key.path for key in reversed(_KEYS)}
    close = difflib.get_close_matches(leaf, siblings, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    far = difflib.get_close_matches(leaf, elsewhere, n=1, cutoff=0.8)
    if far:
        return f"did you mean `{elsewhere[far[0]]}`?"
    where = f"`{prefix}`" if prefix else "a profile"
    return f"{where} has {', '.join(f'`{name}`' for name in siblings)}"


def _origins(profile: Profile, document: Document) -> dict[str, str]:
    """Of every key, and of every variable of `engine.environment` in the place of that key."""
    paths = [key.path for key in _KEYS if not key.is_section]
    if profile.engine.environment:
        at = paths.index("engine.environment")
        paths[at : at + 1] = [f"engine.environment.{name}" for name in profile.engine.environment]
    entries = {path: _entry_at(document, path.split(".")) for path in paths}
    return {path: entry.source.origin if entry else DEFAULT for path, entry in entries.items()}
