"""The lines of a trace file, plain or compressed with gzip. A line and its memory are limited, the file is not."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from kvbm.config.files import LFS_POINTER, is_missing, reason_not_readable
from kvbm.errors import EnvironmentProblem, ProfileError, UsageError, reason_of
from kvbm_cli.workload.other_formats import other_format

MAX_LINE_BYTES = 32 << 20  # a prompt of a million tokens takes about 5 MB
GZIP_MAGIC = b"\x1f\x8b"
HEAD_BYTES = 4096
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TraceLines:
    """Iterates over (number, line) for lines that are not empty. `bytes_read` of `byte_count` is the progress."""

    def __init__(self, path: Path) -> None:
        if is_missing(path):
            raise UsageError(f"there is no file `{path}`", hint="a trace is a `.jsonl` or `.jsonl.gz` file")
        if (reason := reason_not_readable(path)) is not None:
            raise UsageError(f"cannot read the trace `{path}`: {reason}")
        self.path = path
        self.byte_count = 0
        self._raw: io.BufferedReader | None = None

    @property
    def bytes_read(self) -> int:
        return self.byte_count if self._raw is None else self._raw.tell()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        try:
            with open(self.path, "rb") as raw:
                self._raw, self.byte_count = raw, os.fstat(raw.fileno()).st_size
                for number, line in enumerate(self._lines(raw), start=1):
                    if text := line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").strip():
                        yield number, text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ProfileError(
                f"{self.path}: the gzip data is damaged or incomplete after line {number}: {error}",
                hint="copy or download the file again; `gzip -t` tests it",
            ) from None
        except OSError as error:
            raise EnvironmentProblem(f"cannot read `{self.path}`: {reason_of(error)}") from None
        finally:
            self._raw = None

    def _lines(self, raw: io.BufferedReader) -> Iterator[bytes]:
        is_compressed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        raw.seek(0)
        if not is_compressed and self.path.suffix == ".gz" and not raw.peek().startswith(LFS_POINTER):
            raise ProfileError(
                f"{self.path}: the name ends in `.gz`, and the file is not compressed with gzip",
                hint="rename a plain file so that its name ends in `.jsonl`",
            )
        opened = io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw))) if is_compressed else raw
        if (other := other_format(opened.peek(HEAD_BYTES)[:HEAD_BYTES])) is not None:
            raise ProfileError(f"{self.path} {other.what}", hint=other.hint)
        number = 0
        while line := opened.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise ProfileError(
                    f"{self.path}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB",
                    hint="a trace has one request per line",
                )
            yield line
