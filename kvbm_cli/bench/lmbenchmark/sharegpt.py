"""LMBenchmark's ShareGPT program: prepared transcripts at a constant rate, whatever the answers take.

The prepared file is a JSON list of {"input": text, "output_length": tokens}. Each input is the transcript of a
conversation up to a question, with the answers of the data set. Live answers are not used.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark import prompts
from kvbm_cli.bench.lmbenchmark.exchange import ProgramRequest, ProgramServer, RunClock
from kvbm_cli.bench.lmbenchmark.presets import ShareGptParameters
from kvbm_cli.bench.lmbenchmark.record_writer import OnRecord, RecordWriter
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


async def run_sharegpt(server: ProgramServer, parameters: ShareGptParameters, on_record: OnRecord) -> FaithfulResult:
    warm_up, main = read_transcripts(parameters.warm_up_file, parameters.run_file)
    writer = RecordWriter(server.target, len({one.session for one in (*warm_up, *main)}), on_record)
    if warm_up:
        await TranscriptReplay(server, parameters, writer, is_warm_up=True).run(warm_up)
        require_an_answer(writer.warm_up)
        await asyncio.sleep(parameters.pause_s)
    replay = TranscriptReplay(server, parameters, writer)
    await replay.run(main)
    return FaithfulResult(
        records=tuple(writer.main),
        csv=sharegpt_csv(replay.answers),
        notes=notes_on(writer.main, writer.warm_up),
        started_unix_s=replay.clock.start_unix_s,
        duration_s=replay.clock.now_ms() / 1e3,
        warm_up_requests=len(writer.warm_up),
    )


class TranscriptReplay:
    """One run of the program."""

    def __init__(
        self, server: ProgramServer, parameters: ShareGptParameters, writer: RecordWriter, *, is_warm_up: bool = False
    ) -> None:
        self.answers: list[MeasuredAnswer] = []
        self.clock = RunClock()
        self._server = server
        self._parameters = parameters
        self._writer = writer
        self._is_warm_up = is_warm_up

    async def run(self, transcripts: Sequence[PreparedTranscript]) -> None:
        """Launch the n-th request n / qps after the start, then wait for all answers."""
        clock = self.clock = RunClock()
        longest_ms = math.inf if self._parameters.duration_s is None else self._parameters.duration_s * 1e3
        async with asyncio.TaskGroup() as tasks:
            for position, transcript in enumerate(transcripts):
                intended_ms = position / self._parameters.qps * 1e3
                await asyncio.sleep((intended_ms - clock.now_ms()) / 1e3)
                if clock.now_ms() > longest_ms:
                    break
                tasks.create_task(self._send(transcript, intended_ms))

    async def _send(self, transcript: PreparedTranscript, intended_ms: float) -> None:
        record = self._writer.launched(transcript.session, transcript.turn, is_warm_up=self._is_warm_up)
        record.intended_ms = intended_ms
        request = ProgramRequest(record, self.clock, self.clock.now_ms())
        await self._server.post(request, *self._path_and_body(transcript))
        if request.is_ok:
            self.answers.append(request.measured())
        self._writer.ended(request)

    def _path_and_body(self, transcript: PreparedTranscript) -> tuple[str, bytes]:
        # The rate in front of the text keeps runs with other rates from finding each other's blocks.
        message = {"role": "user", "content": f"{float(self._parameters.qps)} {transcript.text}"}
        model, tokens = self._server.model, transcript.answer_tokens
        if self._parameters.is_chat:
            return prompts.CHAT_PATH, prompts.chat_body(model, [message], tokens, temperature=0)
        prompt = prompts.joined([message], ends_with_assistant=False)
        return prompts.COMPLETIONS_PATH, prompts.completions_body(model, prompt, tokens, temperature=0)


def read_transcripts(
    warm_up_file: str | None, run_file: str
) -> tuple[list[PreparedTranscript], list[PreparedTranscript]]:
    """Return the transcripts of both files. Raises UsageError.

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
