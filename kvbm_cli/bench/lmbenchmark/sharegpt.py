"""The prepared files of LMBenchmark's ShareGPT scenario: transcripts at a constant rate, whatever the answers take.

The prepared file is a JSON list of {"input": text, "output_length": tokens}. Each input is the transcript of a
conversation up to a question, with the answers of the data set. Live answers are not used.

As a program, this module makes the file from a ShareGPT data set, as LMBenchmark's preparation scripts do:

    python -m kvbm_cli.bench.lmbenchmark.sharegpt ShareGPT.json DIRECTORY [TOKENIZER]

A data set is a JSON list of {"conversations": [{"from": "human"|"gpt", "value": text}, ...]}. LMBenchmark counts tokens
with the tokenizer of Llama-3.1-8B-Instruct. TOKENIZER is the directory of a Hugging Face model; without it, words are
counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbm.config.files import require_file
from kvbm.errors import UsageError
from kvbm.text.reading import parse_json

DEFAULT_ANSWER_TOKENS = 1
UNKNOWN_ANSWER_TOKENS = 20
Transcript = dict[str, str | int]


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
    entries = _json_in(path, "transcripts")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f'{path}: expected a list of {{"input": text, "output_length": tokens}}, at least one')
    return [_entry(path, position, entry) for position, entry in enumerate(entries)]


def _json_in(path: Path, noun: str) -> Any:
    require_file(path, noun)
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg} in column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start + 1})") from None
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


def prepare_sharegpt(
    data_set: Path,
    directory: Path,
    count_tokens: Callable[[str], int],
    *,
    limit: int = 1000,
    min_rounds: int = 5,
    start_round: int = 3,
) -> Path:
    """Write run.json, with all rounds from `start_round`, and return its path."""
    entries = _json_in(data_set, "data set")
    try:
        conversations = [entry["conversations"] for entry in entries]
        transcripts = transcripts_of(
            conversations, count_tokens, limit=limit, min_rounds=min_rounds, start_round=start_round
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{data_set}: this is not a ShareGPT data set: {type(error).__name__}: {error}") from error
    if not transcripts:
        raise UsageError(f"{data_set}: no conversation has at least {max(min_rounds, start_round)} rounds")
    path = directory / "run.json"
    path.write_text(json.dumps(transcripts, indent=2), encoding="utf-8")
    return path


def transcripts_of(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    count_tokens: Callable[[str], int],
    *,
    limit: int,
    min_rounds: int,
    start_round: int,
) -> list[Transcript]:
    """Return the transcripts by round, and inside a round in the order of the data set."""
    alternating = [one for one in conversations if all(old["from"] != new["from"] for old, new in pairwise(one))]
    rounds = [_rounds(one, count_tokens) for one in alternating[:limit]]
    long = [one for one in rounds if len(one) >= min_rounds]
    most = max(map(len, long), default=0)
    return [one[number] for number in range(start_round - 1, most) for one in long if len(one) > number]


def _rounds(conversation: Sequence[Mapping[str, Any]], count_tokens: Callable[[str], int]) -> list[Transcript]:
    """One transcript per question: everything up to it, and the length of the answer that follows in the data set."""
    text, found = "", []
    for position, message in enumerate(conversation):
        text += message["value"] + "\n"
        if message["from"].lower() == "human":
            answers = (later["value"] for later in conversation[position + 1 :] if later["from"].lower() == "gpt")
            answer = next(answers, None)
            tokens = UNKNOWN_ANSWER_TOKENS if answer is None else count_tokens(answer)
            found.append({"input": text.strip(), "output_length": tokens})
    return found


def _counter(tokenizer: str | None) -> Callable[[str], int]:
    if tokenizer is None:
        return lambda text: len(text.split())
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    return lambda text: len(loaded(text, add_special_tokens=False)["input_ids"])


def main(words: Sequence[str]) -> int:
    if len(words) not in (2, 3):
        print("usage: python -m kvbm_cli.bench.lmbenchmark.sharegpt DATA_SET DIRECTORY [TOKENIZER]", file=sys.stderr)
        return 2
    directory = Path(words[1])
    directory.mkdir(parents=True, exist_ok=True)
    try:
        print(prepare_sharegpt(Path(words[0]), directory, _counter(words[2] if len(words) == 3 else None)))
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
