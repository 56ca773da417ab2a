"""Reads workloads: shipped ones by name, others from YAML files."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvbm.config.document import Document, Mistake, entry_at, plain_values, read_file, together
from kvbm.config.files import is_missing, reason_not_readable
from kvbm.config.keys import Key, keys
from kvbm.config.mistakes import FileKind, mistakes_in
from kvbm.errors import UsageError
from kvbm_cli.package_data import workloads_directory
from kvbm_cli.workload.other_formats import other_format
from kvbm_cli.workload.schema import DEFAULT_KIND, KINDS, Workload

HEAD_BYTES = 1 << 20
AnyWorkload = TypeVar("AnyWorkload", bound=Workload)


def workload_keys(kind: str = DEFAULT_KIND) -> tuple[Key, ...]:
    return keys(KINDS[kind])


def shipped_workloads() -> dict[str, Path]:
    """Paths of the shipped workloads by name."""
    return {path.stem: path for path in sorted(workloads_directory().glob("*.yaml"))}


def load_workload(name_or_path: str) -> Workload:
    """Load a shipped workload by name, or a file. UsageError if it does not exist, ProfileError if it is invalid."""
    shipped = shipped_workloads()
    path = shipped.get(name_or_path, Path(name_or_path))
    names = ", ".join(f"`{name}`" for name in shipped)
    if is_missing(path):
        raise UsageError(
            f"no workload and no file is named `{name_or_path}`",
            hint=f"shipped workloads: {names}; docs/reference/workload.md describes the file format",
        )
    if (reason := reason_not_readable(path)) is not None:
        raise UsageError(f"cannot read the workload `{name_or_path}`: {reason}", hint=f"shipped workloads: {names}")
    if path.suffix not in WORKLOAD_SUFFIXES and (other := other_format(_head(path))) is not None:
        raise UsageError(f"`{name_or_path}` {other.what}", hint=other.hint)
    if _is_trace(path):
        raise UsageError(
            f"`{name_or_path}` is a trace, not a workload",
            hint=f"write `kind: trace` and `file: {path.name}` into a workload file, such as `{_stem(path)}.yaml`",
        )
    return _with_absolute_file(_validated(read_file(path, noun="workload"), path), path)


WORKLOAD_SUFFIXES = (".yaml", ".yml")
TRACE_SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".json.gz", ".parquet")


def _is_trace(path: Path) -> bool:
    """Whether the file has the name of a trace, or more than one line of JSON."""
    if path.name.endswith(TRACE_SUFFIXES):
        return True
    first, _, rest = _head(path).partition(b"\n")
    return first.startswith(b"{") and first.rstrip().endswith(b"}") and rest.startswith(b"{")


def _head(path: Path) -> bytes:
    """Return the beginning of the file; nothing if it cannot be read, which the caller reports."""
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def _stem(path: Path) -> str:
    return path.name.partition(".")[0] or "mine"


def _with_absolute_file(workload: AnyWorkload, path: Path) -> AnyWorkload:
    """Return the same workload; files that it names are relative to its own."""
    named = {key: getattr(workload, key, None) for key in ("file", "warm_up_file")}
    return workload.model_copy(
        update={key: str(path.resolve().parent / file) for key, file in named.items() if file is not None}
    )


def _validated(document: Document, path: Path) -> Workload:
    kind = _kind(document)
    try:
        return KINDS[kind].model_validate(plain_values(document))
    except ValidationError as error:
        raise together(mistakes_in(error, document, path, _file_kind(kind))) from None


def _kind(document: Document) -> str:
    """ProfileError for a kind that does not exist."""
    entry = entry_at(document, ["kind"])
    if entry is None:
        return DEFAULT_KIND
    if isinstance(entry.value, str) and entry.value in KINDS:
        return entry.value
    near = difflib.get_close_matches(str(entry.value), KINDS)
    hint = f"did you mean `{near[0]}`?" if near else "kinds: " + ", ".join(f"`{name}`" for name in KINDS)
    raise together([Mistake(f"no kind of workload is named `{entry.value}`", entry.source, hint=hint, key="kind")])


def _file_kind(kind: str) -> FileKind:
    known = workload_keys(kind)
    required = tuple(key.path for key in known if key.is_required)
    text = f"a workload of kind `{kind}` requires {', '.join(f'`{name}`' for name in required)}"
    return FileKind("workload", known, dict.fromkeys(required, text))
