"""Files that are given as a trace and are something else, recognised by their first bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm.config.files import LFS_HINT, LFS_POINTER

LINES_HINT = (
    'a trace has one JSON object per line: `{"timestamp": 0, "input_length": 700, "output_length": 50}`, with times in '
    "milliseconds"
)
LIST_HINT = "`jq -c '.[]' FILE > TRACE.jsonl` writes one object per line"
_NAMED_CSV = {
    b"timestamp,contexttokens,generatedtokens": "CSV of Azure's LLM inference traces",
    b"timestamp,model,request tokens,response tokens": "CSV of BurstGPT",
    b"timestamp,session id,elapsed time,model,request tokens": "CSV of BurstGPT",
}
_MAGIC = {
    b"PAR1": ("Parquet", LINES_HINT),
    b"PK\x03\x04": ("a zip archive", "unpack it with `unzip`"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "decompress it with `zstd -d`"),
    b"\xfd7zXZ\x00": ("compressed with xz", "decompress it with `xz -d`"),
    b"BZh": ("compressed with bzip2", "decompress it with `bzip2 -d`"),
    b"<": ("a web page or XML", "download the raw file"),
}
_NAMED_LINES = {  # a key that only this format has
    b'"hash_id_scope"': "a list of sessions, as kv-cache-tester has them",
    b'"conversations"': "ShareGPT",
    b'"custom_id"': "the input of OpenAI's batch API",
}
_OF_LMBENCHMARK = b'"input_from"'
LMBENCHMARK_HINT = "a workload with `kind: lmbenchmark`, `scenario: agentic` and `file` reads it"


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
    if text.startswith(b"[") and text[1:].lstrip().startswith(b"{"):
        return ForeignFile("is one JSON list, and this format is not read yet", LIST_HINT)
    first = text.partition(b"\n")[0].strip().lower()
    for header, name in _NAMED_CSV.items():
        if first.startswith(header):
            return ForeignFile(f"is {name}, and this format is not read yet", LINES_HINT)
    for key, name in _NAMED_LINES.items():
        if first.startswith(b"{") and key in first:
            return ForeignFile(f"is {name}, and this format is not read yet", LINES_HINT)
    if first.startswith(b"{") and _OF_LMBENCHMARK in first:
        return ForeignFile("is the trace of LMBenchmark's agentic scenario", LMBENCHMARK_HINT)
    if first.startswith(b"#"):  # comments, which JSON has not
        first = next((line for line in text.splitlines() if not line.startswith(b"#")), first).strip()
    if b"," in first and first[:1] not in b"[{":
        return ForeignFile("seems to be CSV, and this format is not read yet", LINES_HINT)
    return None
