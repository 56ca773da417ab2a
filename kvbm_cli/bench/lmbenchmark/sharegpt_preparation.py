"""Makes the two files of the ShareGPT program from a ShareGPT data set, as LMBenchmark's preparation scripts do.

    python -m kvbm_cli.bench.lmbenchmark.sharegpt_preparation ShareGPT.json DIRECTORY [TOKENIZER]

A data set is a JSON list of {"conversations": [{"from": "human"|"gpt", "value": text}, ...]}. LMBenchmark counts tokens
with the tokenizer of Llama-3.1-8B-Instruct. TOKENIZER is the directory of a Hugging Face model; without it, words are
counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError

UNKNOWN_ANSWER_TOKENS = 20
Transcript = dict[str, str | int]


def prepare_sharegpt(
    data_set: Path,
    directory: Path,
    count_tokens: Callable[[str], int],
    *,
    limit: int = 1000,
    min_rounds: int = 5,
    start_round: int = 3,
) -> tuple[Path, Path]:
    """Write warmup.json (the round before `start_round`) and run.json (all later rounds); returns both paths."""
    if start_round < 2:
        raise UsageError(
            f"start_round is {start_round}; it must be at least 2, because the warm-up sends the one before"
        )
    try:
        entries = json.loads(data_set.read_text(encoding="utf-8"))
        conversations = [entry["conversations"] for entry in entries]
        warm_up, main = transcripts_of(
            conversations, count_tokens, limit=limit, min_rounds=min_rounds, start_round=start_round
        )
    except OSError as error:
        raise UsageError(f"{data_set}: the data set cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{data_set}: this is not a ShareGPT data set: {type(error).__name__}: {error}") from error
    if not main:
        raise UsageError(f"{data_set}: no conversation has at least {max(min_rounds, start_round)} rounds")
    paths = directory / "warmup.json", directory / "run.json"
    for path, transcripts in zip(paths, (warm_up, main), strict=True):
        path.write_text(json.dumps(transcripts, indent=2), encoding="utf-8")
    return paths


def transcripts_of(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    count_tokens: Callable[[str], int],
    *,
    limit: int,
    min_rounds: int,
    start_round: int,
) -> tuple[list[Transcript], list[Transcript]]:
    """Warm-up and main transcripts; the main ones by round, and inside a round in the order of the data set."""
    alternating = [one for one in conversations if all(old["from"] != new["from"] for old, new in pairwise(one))]
    rounds = [_rounds(one, count_tokens) for one in alternating[:limit]]
    long = [one for one in rounds if len(one) >= min_rounds]
    most = max(map(len, long), default=0)
    main = [one[number] for number in range(start_round - 1, most) for one in long if len(one) > number]
    return [one[start_round - 2] for one in long if len(one) >= start_round - 1], main


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
        print("usage: sharegpt_preparation DATA_SET DIRECTORY [TOKENIZER]", file=sys.stderr)
        return 2
    directory = Path(words[1])
    directory.mkdir(parents=True, exist_ok=True)
    try:
        for path in prepare_sharegpt(Path(words[0]), directory, _counter(words[2] if len(words) == 3 else None)):
            print(path)
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
