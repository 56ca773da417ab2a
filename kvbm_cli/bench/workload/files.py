"""Reads workloads: shipped ones by name, others from YAML files; and the images that they name.

Files that are given as a trace and are something else are recognised by their first bytes.
"""

from __future__ import annotations

import base64
import difflib
import mimetypes
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvbm.config.document import Document, Mistake, entry_at, plain_values, read_file, together
from kvbm.config.files import is_missing, require_file
from kvbm.config.key_list import OWN, Key, keys
from kvbm.config.mistakes import FileKind, mistakes_in
from kvbm.errors import UsageError
from kvbm.text.reading import LFS_HINT, LFS_POINTER
from kvbm_cli.bench.workload.schema import DEFAULT_KIND, KINDS, Conversations, Workload
from kvbm_cli.bench.workload.script import Image
from kvbm_cli.package_data import workloads_directory

HEAD_BYTES = 1 << 20
IMAGE_URLS = ("http://", "https://", "data:image/")
MOST_IMAGE_BYTES = 20 << 20
AnyWorkload = TypeVar("AnyWorkload", bound=Workload)
WORKLOAD_SUFFIXES = (".yaml", ".yml")
TRACE_SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".json.gz", ".parquet")
LINES_HINT = (
    'a trace has one JSON object per line: `{"timestamp": 0, "input_length": 700, "output_length": 50}`, with times in '
    "milliseconds"
)
LIST_HINT = "`jq -c '.[]' FILE > TRACE.jsonl` writes one object per line"
# Beginnings of traces in formats of others, which `kind: trace` reads.
AZURE = b"timestamp,contexttokens,generatedtokens"
BURSTGPT = (
    b"timestamp,model,request tokens,response tokens",
    b"timestamp,session id,elapsed time,model,request tokens",
)
SHAREGPT = re.compile(rb'"(?:conversations|items)"\s*:\s*\[')
SESSION_LISTS = b'"hash_id_scope"'  # a key that only this format has
_MAGIC = {
    b"PAR1": ("Parquet", LINES_HINT),
    b"PK\x03\x04": ("a zip archive", "unpack it with `unzip`"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "decompress it with `zstd -d`"),
    b"\xfd7zXZ\x00": ("compressed with xz", "decompress it with `xz -d`"),
    b"BZh": ("compressed with bzip2", "decompress it with `bzip2 -d`"),
    b"<": ("a web page or XML", "download the raw file"),
}
_OF_LMBENCHMARK = b'"input_from"'
LMBENCHMARK_HINT = "a workload with `kind: lmbenchmark`, `scenario: agentic` and `file` reads it"
LMBENCHMARK_ITSELF = (
    "remove the key; for LMBenchmark's own requests, run it against `kvbm serve`: docs/guide/other-clients.md"
)
_OF_BATCHES = b'"custom_id"'


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
    require_file(path, "workload", hint=f"shipped workloads: {names}")
    if path.suffix not in WORKLOAD_SUFFIXES and (other := other_format(_head(path))) is not None:
        raise UsageError(f"`{name_or_path}` {other.what}", hint=other.hint)
    if _is_trace(path):
        raise UsageError(
            f"`{name_or_path}` is a trace, not a workload",
            hint=f"write `kind: trace` and `file: {path.name}` into a workload file, such as `{_stem(path)}.yaml`",
        )
    return _with_absolute_file(_validated(read_file(path, noun="workload"), path), path)


def _is_trace(path: Path) -> bool:
    """Whether the file has the name of a trace, more than one line of JSON, or a list of ShareGPT's."""
    if path.name.endswith(TRACE_SUFFIXES):
        return True
    head = _head(path)
    if head.startswith(b"[") and SHAREGPT.search(head):
        return True
    first, _, rest = head.partition(b"\n")
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
    directory = path.resolve().parent
    file = getattr(workload, "file", None)
    update: dict[str, object] = {} if file is None else {"file": str(directory / file)}
    if isinstance(workload, Conversations):
        update["images"] = tuple(one if is_url(one) else str(directory / one) for one in workload.images)
    return workload.model_copy(update=update)


def _validated(document: Document, path: Path) -> Workload:
    _require_workload(document, path)
    kind = _kind(document)
    try:
        return KINDS[kind].model_validate(plain_values(document))
    except ValidationError as error:
        raise together(mistakes_in(error, document, path, _file_kind(kind))) from None


def _require_workload(document: Document, path: Path) -> None:
    """Raise UsageError for a file without any key of a workload: it says what the file is, not that each key is
    unknown."""
    if not document or any(key.path in document for kind in KINDS for key in workload_keys(kind)):
        return
    if OWN & document.keys():
        hint = f"name it with `--profile {shlex.quote(str(path))}`"
        raise UsageError(f"`{path}` is a profile, not a workload", hint=hint)
    shipped = "shipped workloads: " + ", ".join(f"`{name}`" for name in shipped_workloads())
    raise UsageError(f"`{path}` has no key of a workload", hint=shipped)


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
    gone = dict.fromkeys(("mode", "sizes"), LMBENCHMARK_ITSELF) if kind == "lmbenchmark" else {}
    return FileKind("workload", known, dict.fromkeys(required, text) | gone)


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """`what` is what follows its name in a message: `is a Git LFS pointer`."""

    what: str
    hint: str


def other_format(head: bytes) -> ForeignFile | None:
    """`head` is the beginning of the file, with at least its first line if that is shorter than 4 KiB."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(LFS_POINTER):
        return ForeignFile("is a Git LFS pointer, not the file that it stands for", LFS_HINT)
    for magic, (what, hint) in _MAGIC.items():
        if text.startswith(magic):
            return ForeignFile(f"is {what}, and this format is not read yet", hint)
    if text[:1] in (b"[", b"{") and SHAREGPT.search(text):
        return None
    if text.startswith(b"[") and text[1:].lstrip().startswith(b"{"):
        return ForeignFile("is one JSON list, and this format is not read yet", LIST_HINT)
    first = text.partition(b"\n")[0].strip().lower()
    if first.startswith((AZURE, *BURSTGPT)) or (first.startswith(b"{") and SESSION_LISTS in first):
        return None
    if first.startswith(b"{") and _OF_BATCHES in first:
        return ForeignFile("is the input of OpenAI's batch API, and this format is not read yet", LINES_HINT)
    if first.startswith(b"{") and _OF_LMBENCHMARK in first:
        return ForeignFile("is the trace of LMBenchmark's agentic scenario", LMBENCHMARK_HINT)
    if first.startswith(b"#"):  # comments, which JSON has not
        first = next((line for line in text.splitlines() if not line.startswith(b"#")), first).strip()
    if b"," in first and first[:1] not in b"[{":
        return ForeignFile("seems to be CSV, and this format is not read yet", LINES_HINT)
    return None


def is_url(place: str) -> bool:
    return place.startswith(IMAGE_URLS)


def image_of(place: str) -> Image:
    """Return the image at a URL, which is sent as it is, or in a file, as base64 in a `data:` URL. UsageError for a
    file that is none."""
    if is_url(place):
        return Image(place)
    path = Path(place)
    require_file(
        path, "image", hint=f"an image is a file, or begins with {', '.join(f'`{one}`' for one in IMAGE_URLS)}"
    )
    kind, _ = mimetypes.guess_type(path.name)
    if kind is None or not kind.startswith("image/"):
        raise UsageError(f"the name of the image `{path}` does not end like that of an image, such as `.png`")
    if path.stat().st_size > MOST_IMAGE_BYTES:
        raise UsageError(f"the image `{path}` is larger than {MOST_IMAGE_BYTES >> 20} MiB")
    return Image(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")
