"""LMBenchmark's ShareGPT program: prepared transcripts at a constant rate, whatever the answers take.

The prepared file is a JSON list of {"input": text, "output_length": tokens}. Each input is the transcript of a
conversation up to a question, with the answers of the data set. Live answers are not used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark import prompts
from kvbm_cli.bench.lmbenchmark.exchange import ApiServer, Exchange
from kvbm_cli.bench.lmbenchmark.presets import ShareGptParameters
from kvbm_cli.bench.lmbenchmark.records import Record, RecordWriter
from kvbm_cli.bench.lmbenchmark.result import FaithfulResult, notes_on, require_an_answer
from kvbm_cli.bench.lmbenchmark.result_csv import MeasuredAnswer, sharegpt_csv

DEFAULT_ANSWER_TOKENS = 1


@dataclass(frozen=True, slots=True)
class PreparedTranscript:
    """One request. `session` numbers the conversations of the warm-up and run file, `turn` counts from 1 in it."""

    text: str
    answer_tokens: int
    session: int
    turn: int


async def run_sharegpt(
    server: ApiServer, parameters: ShareGptParameters, on_record: Callable[[Record], None]
) -> FaithfulResult:
    warm_up, main = read_transcripts(parameters.warm_up_file, parameters.run_file)
    writer = RecordWriter(len({one.session for one in (*warm_up, *main)}), on_record)
    warm_up_exchanges: list[Exchange] = []
    answers: list[MeasuredAnswer] = []

    def take_warm_up(transcript: PreparedTranscript, intended_s: float) -> Callable[[Exchange], None]:
        writer.warmed(transcript.session)
        return warm_up_exchanges.append

    def take(transcript: PreparedTranscript, intended_s: float) -> Callable[[Exchange], None]:
        record = writer.launched(transcript.session, transcript.turn)

        def ended(exchange: Exchange) -> None:
            if exchange.error is None:
                answers.append(exchange.measured())
            writer.ended(record, exchange, intended_s)

        return ended

    if warm_up:
        await _replay(server, parameters, warm_up, take_warm_up)
        require_an_answer(warm_up_exchanges)
        await asyncio.sleep(parameters.pause_s)
    started_s = server.clock.now()
    writer.start(started_s)
    await _replay(server, parameters, main, take)
    return FaithfulResult(
        records=tuple(writer.records),
        csv=sharegpt_csv(answers),
        notes=notes_on(writer.records, warm_up_exchanges),
        started_unix_s=started_s,
        duration_s=server.clock.now() - started_s,
        warm_up_requests=len(warm_up_exchanges),
    )


async def _replay(
    server: ApiServer,
    parameters: ShareGptParameters,
    transcripts: Sequence[PreparedTranscript],
    on_launch: Callable[[PreparedTranscript, float], Callable[[Exchange], None]],
) -> None:
    """Launch the n-th request n / qps after the start, then wait for all answers."""
    clock = server.clock
    start_s = clock.now()
    async with asyncio.TaskGroup() as tasks:
        for position, transcript in enumerate(transcripts):
            intended_s = start_s + position / parameters.qps
            await asyncio.sleep(intended_s - clock.now())
            if parameters.duration_s is not None and clock.now() - start_s > parameters.duration_s:
                break
            tasks.create_task(_send(server, parameters, transcript, on_launch(transcript, intended_s)))


async def _send(
    server: ApiServer,
    parameters: ShareGptParameters,
    transcript: PreparedTranscript,
    on_end: Callable[[Exchange], None],
) -> None:
    exchange = Exchange(server.clock.now())
    # The rate in front of the text keeps runs with other rates from finding each other's blocks.
    message = {"role": "user", "content": f"{float(parameters.qps)} {transcript.text}"}
    tokens = transcript.answer_tokens
    if parameters.is_chat:
        path, body = prompts.CHAT_PATH, prompts.chat_body(server.model, [message], tokens, temperature=0)
    else:
        prompt = prompts.joined([message], ends_with_assistant=False)
        path, body = prompts.COMPLETIONS_PATH, prompts.completions_body(server.model, prompt, tokens, temperature=0)
    await server.post(exchange, path, body)
    on_end(exchange)


def read_transcripts(
    warm_up_file: str | None, run_file: str
) -> tuple[list[PreparedTranscript], list[PreparedTranscript]]:
    """The transcripts of both files. Raises UsageError.

    The files do not name conversations. A transcript continues the conversation whose last transcript it starts with.
    """
    warm_up = [] if warm_up_file is None else _read(Path(warm_up_file))
    entries = warm_up + _read(Path(run_file))
    latest: list[tuple[str, int]] = []  # (last transcript, its turn) of each conversation
    transcripts = []
    for text, answer_tokens in entries:
        fitting = [session for session, (start, _) in enumerate(latest) if text.startswith(start)]
        if fitting:
            session = max(fitting, key=lambda one: len(latest[one][0]))
            latest[session] = (text, latest[session][1] + 1)
        else:
            session = len(latest)
            latest.append((text, 1))
        transcripts.append(PreparedTranscript(text, answer_tokens, session, latest[session][1]))
    return transcripts[: len(warm_up)], transcripts[len(warm_up) :]


def _read(path: Path) -> list[tuple[str, int]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: the prepared transcripts cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: this is not JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise UsageError(f'{path}: expected a list of {{"input": text, "output_length": tokens}}, at least one')
    return [_entry(path, position, entry) for position, entry in enumerate(entries)]


def _entry(path: Path, position: int, entry: object) -> tuple[str, int]:
    text = entry.get("input") if isinstance(entry, dict) else None
    tokens = entry.get("output_length", DEFAULT_ANSWER_TOKENS) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise UsageError(f"{path}: entry {position}: `input` is {text!r}; it must be a text")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise UsageError(f"{path}: entry {position}: `output_length` is {tokens!r}; it must be an integer above 0")
    return text, tokens
