"""The prepared files of LMBenchmark's ShareGPT scenario: transcripts at a constant rate, whatever the answers take.

The prepared file is a JSON list of {"input": text, "output_length": tokens}. Each input is the transcript of a
conversation up to a question, with the answers of the data set. Live answers are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.config.files import require_file
from kvbm.errors import UsageError
from kvbm.text.reading import parse_json

DEFAULT_ANSWER_TOKENS = 1


@dataclass(frozen=True, slots=True)
class PreparedTranscript:
    """One request. `session` numbers the conversations of the file, `turn` counts from 1 in it."""

    text: str
    answer_tokens: int
    session: int
    turn: int


def read_transcripts(file: Path) -> list[PreparedTranscript]:
    """Return the transcripts of a prepared file. Raises UsageError.

    The file does not name conversations. A transcript continues the conversation whose last transcript it starts with.
    """
    latest: list[tuple[str, int]] = []  # (last transcript, its turn) of each conversation
    transcripts = []
    for text, answer_tokens in _read(file):
        fitting = [session for session, (start, _) in enumerate(latest) if text.startswith(start)]
        if fitting:
            session = max(fitting, key=lambda one: len(latest[one][0]))
            latest[session] = (text, latest[session][1] + 1)
        else:
            session = len(latest)
            latest.append((text, 1))
        transcripts.append(PreparedTranscript(text, answer_tokens, session, latest[session][1]))
    return transcripts


def _read(path: Path) -> list[tuple[str, int]]:
    entries = _json_in(path)
    if not isinstance(entries, list) or not entries:
        raise UsageError(f'{path}: expected a list of {{"input": text, "output_length": tokens}}, at least one')
    return [_entry(path, position, entry) for position, entry in enumerate(entries)]


def _json_in(path: Path) -> Any:
    require_file(path, "transcripts")
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None


def _entry(path: Path, position: int, entry: object) -> tuple[str, int]:
    text = entry.get("input") if isinstance(entry, dict) else None
    tokens = entry.get("output_length", DEFAULT_ANSWER_TOKENS) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise UsageError(f"{path}: entry {position}: `input` is {text!r}; it must be a text")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise UsageError(f"{path}: entry {position}: `output_length` is {tokens!r}; it must be an integer above 0")
    return text, tokens
