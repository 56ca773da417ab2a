"""What the comparisons with SGLang's backend `file` share: damage to files, a disk that becomes full, and results."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(HERE.parent / "vllm"), *(str(TESTS / name) for name in ("", "sglang", "sglang_engine", "vllm"))]

from facts import facts  # noqa: E402
from filesystems import mounted  # noqa: E402

ARMS = ("kvbm", "file")
LOAD_AT_START = os.getloadavg()[0]

Place = tuple[Path, int, int]  # file, offset, bytes on disk


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def drop_from_memory(directory: Path) -> None:
    """Let Linux forget the content of the files."""
    for path in files_in(directory):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flip_bits(places: Sequence[Place], *, byte: int = 0, bit: int = 1) -> None:
    """Flip a bit in the middle of each page, in this byte of four."""
    for path, offset, size in places:
        with path.open("r+b") as file:
            file.seek(offset + size // 2 + byte)
            (found,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([found ^ bit]))


@contextmanager
def full_disk(home: Path) -> Iterator[Path]:
    """Yield a directory on a file system of 96 MiB."""
    home.mkdir()
    with mounted("tmpfs", home) as mount:
        yield mount / "storage"


def parser_of(text: str | None, *, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="pairs of each kind of load")
    parser.add_argument("--output", type=Path, required=True, help="write OUTPUT.json and OUTPUT.md")
    return parser


def save(output: Path, details: Mapping[str, Any], rows: Sequence[Sequence[str]], last: str = "") -> None:
    """Write every detail as JSON, and a table with a row per question and a column per backend."""
    result = {
        **facts(("sglang", "torch", "kvbm-cli")),
        "command": ["python", *sys.argv],
        "load_average": [round(load, 2) for load in (LOAD_AT_START, os.getloadavg()[0])],
        **details,
    }
    head = f"{result['date']}, {result['machine']} ({result['cpu']}), load average {result['load_average']}"
    table = [("", *ARMS), ("---",) * (1 + len(ARMS)), *rows]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    text = "\n\n".join(part for part in (head, lines, last) if part) + "\n"
    output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    output.with_suffix(".md").write_text(text)
    print(text)
