"""Standard streams that are closed, cut off, on a full disk, or in an encoding that lacks a character.

They escape what a terminal would obey (printable.py).

Failed writes to stderr are ignored. A failed write to stdout is an error of the command, reported once.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm.text.outside import without_url_secrets
from kvbm_cli.terminal.printable import without_commands

BROKEN_PIPE = 141  # the exit code: 128 + SIGPIPE


def repair() -> None:
    """Replace a closed stream (`2>&-`) by /dev/null. Replaces characters that the encoding lacks by `?`."""
    _fill_descriptors()
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = _on(sys.stdout, _Output)
    sys.stderr = _on(sys.stderr, _Notes)


def _fill_descriptors() -> None:
    """Open /dev/null for closed descriptors. Otherwise the next opened file would get the number of a stream."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _on(stream: TextIO | None, kind: type[io.FileIO]) -> TextIO:
    if stream is None:
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return _SafeText(
        io.BufferedWriter(kind(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering or kind is _Notes,  # notes precede the data that follows, in a file too
    )


class _SafeText(io.TextIOWrapper):
    """Escapes commands to the terminal in text of any origin: tracebacks, warnings, log lines of libraries. Hides the
    credentials of URLs."""

    def write(self, text: str) -> int:
        super().write(without_commands(without_url_secrets(text)))
        return len(text)


class _Output(io.FileIO):
    """Raises EnvironmentProblem or BrokenPipeError once. Later writes are discarded: the rest would be incomplete."""

    _has_failed = False

    def write(self, data: bytes) -> int | None:  # type: ignore[override]
        if self._has_failed:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._has_failed = True
            if isinstance(error, BrokenPipeError):
                raise
            reason = reason_of(error)
            raise EnvironmentProblem(f"cannot write to standard output: {reason}") from None


class _Notes(io.FileIO):
    def write(self, data: bytes) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:  # there is no stream left to report it
            return len(data)
