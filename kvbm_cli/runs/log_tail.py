"""LogTail: reads a log that an engine writes at the same time, in whole lines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from kvbm_cli.terminal.printable import printable, without_colours

CHUNK_BYTES = 1 << 16


class LogTail:
    """The file `path` from byte `start` on, or its last `line_count` lines. Readers print `prefix` before each line.

    The file may not exist yet. If it becomes shorter, it was emptied, and reading continues at its start. Without
    `follows`, reading ends where the file ended when it was opened.
    """

    def __init__(
        self, path: Path, *, prefix: str = "", start: int = 0, line_count: int | None = None, follows: bool = True
    ) -> None:
        self.path = path
        self.prefix = prefix
        self._start = start
        self._line_count = line_count
        self._follows = follows
        self._end: int | None = None
        self._file: BinaryIO | None = None
        self._rest = b""

    @property
    def is_there(self) -> bool:
        return self.path.is_file()

    def read(self) -> list[bytes]:
        """Return the next whole lines without their ends, empty at the end of the file. A longer line is split."""
        while chunk := self._read_chunk():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > CHUNK_BYTES:
                lines, self._rest = [*lines, self._rest], b""
            if lines:
                return lines
        return []

    def finish(self) -> list[bytes]:
        """Return an incomplete last line and close the file."""
        if self._file is not None:
            self._file.close()
        lines, self._rest = ([self._rest] if self._rest else []), b""
        return lines

    def _read_chunk(self) -> bytes:
        with contextlib.suppress(OSError):
            file = self._opened()
            if file is not None:
                if os.fstat(file.fileno()).st_size < file.tell():
                    file.seek(0)
                return file.read(
                    CHUNK_BYTES if self._end is None else max(0, min(CHUNK_BYTES, self._end - file.tell()))
                )
        return b""

    def _opened(self) -> BinaryIO | None:
        if self._file is None and self.is_there:
            self._file = self.path.open("rb")
            self._end = None if self._follows else os.fstat(self._file.fileno()).st_size
            self._file.seek(self._start)
            if self._line_count is not None:
                self._file.seek(start_of_last_lines(self._file, self._line_count))
        return self._file


def start_of_last_lines(file: BinaryIO, line_count: int) -> int:
    """Return the offset of the last `line_count` lines. Reads only these lines."""
    position = file.seek(0, os.SEEK_END)
    if line_count == 0:
        return position
    remaining, has_text = line_count, False
    while position > 0:
        step = min(CHUNK_BYTES, position)
        position = file.seek(position - step)
        chunk = file.read(step)
        index = len(chunk) if has_text else len(chunk.rstrip(b"\n"))
        has_text = has_text or index > 0
        while has_text and (index := chunk.rfind(b"\n", 0, index)) >= 0:
            remaining -= 1
            if remaining == 0:
                return position + index + 1
    return 0


def prefixes_of(names: Sequence[str]) -> list[str]:
    """Return the prefixes of the logs of several engines, or an empty one for the log of a single engine."""
    width = max(map(len, names))
    return [f"{name:<{width}} | " if len(names) > 1 else "" for name in names]


def shown_line(line: bytes) -> str:
    """Return a line as text that cannot control a terminal.

    Colours are removed, and of a progress bar that overwrites itself only the last state is kept.
    """
    text = without_colours(line.decode(errors="backslashreplace").rstrip("\r"))
    return printable(text.rpartition("\r")[2])
