"""From a workload of kind `lmbenchmark` to what runs: parameters of the faithful programs, or the strict workload.

`strict` runs the users of a multi-round scenario as conversations: launches at exactly 1 / qps, lengths in tokens,
random text, answers of exactly the length. Users join and leave as in LMBenchmark, but the first ones start with fewer
turns left instead of with missing turns. If the scenario's time is too short for two turns of a user, it is extended.

`run_faithful` runs one parameter set against a server, as LMBenchmark's scripts do. It sends the warm-up and the main
run, hands each record over when its request ends, and returns the text of the CSV file. Cancellation ends all requests.
The pause between two rates (`presets.PAUSE_AFTER_RUN_S`) is the caller's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark.agentic import AgentTrace, read_agent_trace, run_agentic
from kvbm_cli.bench.lmbenchmark.exchange import FaithfulResult, OnRecord, connect
from kvbm_cli.bench.lmbenchmark.multi_round import run_multi_round
from kvbm_cli.bench.lmbenchmark.presets import (
    AgenticParameters,
    FaithfulParameters,
    LmbenchmarkParameters,
    ShareGptParameters,
    preset,
)
from kvbm_cli.bench.lmbenchmark.sharegpt import read_transcripts, run_sharegpt
from kvbm_cli.bench.load.request import Target
from kvbm_cli.bench.workload.schema import Conversations, Lmbenchmark, Schedule, Workload
from kvbm_cli.bench.workload.script import AnswerOf, Content, Part, Script, ScriptedRequest, Writer

QUESTION_TOKENS = 17  # of LMBenchmark's question, with a common tokenizer
LEAST_TURNS_PER_USER = 2
AGENT_QUESTION_TOKENS = 10


def faithful_parameters(workload: Lmbenchmark) -> FaithfulParameters:
    """Return the preset with the changes of the workload. UsageError for values that LMBenchmark does not take."""
    if workload.scenario == "sharegpt":
        assert workload.file is not None
        found = ShareGptParameters(
            workload.file, workload.warm_up_file, is_chat=workload.chat, duration_s=workload.time_s
        )
        return replace(found, qps=workload.qps) if workload.qps else found
    if workload.scenario == "agentic":
        assert workload.file is not None
        return AgenticParameters((workload.file,) * (workload.users or 1))
    found_preset = preset(f"lmbenchmark-{workload.scenario}", sizes=workload.sizes)
    changes: dict[str, Any] = {
        "users": workload.users,
        "rounds": workload.rounds,
        "system_words": workload.system_words,
        "history_words": workload.history_words,
        "answer_tokens": workload.answer_tokens,
        "qps": workload.qps,
        "duration_s": workload.time_s,
    }
    changed = replace(
        found_preset, is_chat=workload.chat, **{key: value for key, value in changes.items() if value is not None}
    )
    return changed if changed.words == found_preset.words else replace(changed, sizes="custom")


def strict_workload(workload: Workload) -> Workload:
    """Return the conversations of a strict multi-round scenario; any other workload as it is."""
    if not isinstance(workload, Lmbenchmark) or workload.mode != "strict":
        return workload
    parameters = faithful_parameters(workload)
    if not isinstance(parameters, LmbenchmarkParameters):
        interval_s = 1 / parameters.qps if isinstance(parameters, ShareGptParameters) else None
        return workload.model_copy(update={"schedule": _at(workload, interval_s, workload.time_s)})
    least_s = LEAST_TURNS_PER_USER * parameters.gap_s
    duration_s = max(parameters.duration_s, least_s)
    requests = math.ceil(duration_s * parameters.qps)
    return Conversations(
        name=workload.name,
        description=workload.description or f"users of LMBenchmark's scenario {workload.scenario}, measured strictly",
        seed=workload.seed,
        request_timeout_s=workload.request_timeout_s,
        slo=workload.slo,
        schedule=_at(workload, 1 / parameters.qps, duration_s),
        users=parameters.users,
        turns=parameters.rounds,
        system_tokens=parameters.system_words,
        history_tokens=parameters.history_words,
        question_tokens=QUESTION_TOKENS,
        answer_tokens=parameters.answer_tokens,
        history="canned",
        rounds_of_users=max(2, math.ceil(requests / (parameters.users * parameters.rounds)) + 1),
    )


def _at(workload: Lmbenchmark, interval_s: float | None, duration_s: float | None) -> Schedule:
    return workload.schedule.model_copy(update={"interval_s": interval_s, "duration_s": duration_s})


def check_files(workload: Lmbenchmark) -> None:
    """Read the files of the workload. UsageError, with the line, for one that is missing or wrong."""
    if workload.file is not None and workload.scenario == "sharegpt":
        read_transcripts(workload.warm_up_file, workload.file)
    elif workload.file is not None:
        read_agent_trace(Path(workload.file))


def strict_script(workload: Lmbenchmark, writer: Writer, *, seed: int) -> Script:
    """Transcripts or agents as a script. UsageError for an unreadable file."""
    assert workload.file is not None
    generator = random.Random(seed)
    requests = list(
        _transcripts(workload.file, writer) if workload.scenario == "sharegpt" else _agents(workload, writer, generator)
    )
    return Script.of(requests, warmup=writer.content(generator, requests[0].prompt_token_count))


def _transcripts(file: str, writer: Writer) -> Iterator[ScriptedRequest]:
    """Each transcript repeats the previous one of its conversation, if the file is as prepared."""
    known: dict[int, tuple[str, tuple[Content, ...]]] = {}
    _, transcripts = read_transcripts(None, file)
    for one in transcripts:
        before, parts = known.get(one.session, ("", ()))
        if not one.text.startswith(before):
            before, parts = "", ()
        parts = (*parts, writer.encoded(one.text[len(before) :]))
        known[one.session] = one.text, parts
        yield ScriptedRequest(one.session, one.turn, parts, one.answer_tokens)


def _agents(workload: Lmbenchmark, writer: Writer, generator: random.Random) -> Iterator[ScriptedRequest]:
    """All agents of a round at the same time; the next round follows when all have answered."""
    assert workload.file is not None
    interval_s = AgenticParameters((workload.file,)).request_interval_s
    trace = read_agent_trace(Path(workload.file))
    index = 0
    for user in range(workload.users or 1):
        for request in _agents_of_user(trace, user, index, writer, generator, interval_s):
            yield request
            index += 1


def _agents_of_user(
    trace: AgentTrace, user: int, start: int, writer: Writer, generator: random.Random, interval_s: float
) -> Iterator[ScriptedRequest]:
    asked: dict[tuple[int, int], Part] = {}
    answered: dict[tuple[int, int], Part] = {}
    before: tuple[int, ...] = ()
    index = start
    for number, round_ in enumerate(trace):
        current = []
        for task in round_:
            question = writer.content(generator, AGENT_QUESTION_TOKENS)
            history = [
                part
                for source_round, agent, which in task.inputs
                for part in _history(asked, answered, (source_round, agent), which)
            ]
            parts = (*history, question)
            yield ScriptedRequest(user, index - start + 1, parts, task.answer_tokens, before, interval_s)
            asked[number, task.agent] = question
            answered[number, task.agent] = AnswerOf(index, task.answer_tokens)
            current.append(index)
            index += 1
        before = tuple(current)


def _history(
    asked: dict[tuple[int, int], Part], answered: dict[tuple[int, int], Part], source: tuple[int, int], which: str
) -> Iterator[Part]:
    """UsageError for an agent that was not asked before."""
    if source not in asked:
        raise UsageError(
            f"`input_from` of the trace names agent {source[1]} of round {source[0]}, which has no turn before"
        )
    if which in ("input", "both"):
        yield asked[source]
    if which in ("output", "both"):
        yield answered[source]


async def run_faithful(
    parameters: FaithfulParameters, target: Target, *, model: str, on_record: OnRecord
) -> FaithfulResult:
    """Raise UsageError for unreadable files, EnvironmentProblem if the server answers no request of the warm-up."""
    async with connect(target, model) as server:
        try:
            if isinstance(parameters, LmbenchmarkParameters):
                return await run_multi_round(server, parameters, on_record)
            if isinstance(parameters, ShareGptParameters):
                return await run_sharegpt(server, parameters, on_record)
            return await run_agentic(server, parameters, on_record)
        except ExceptionGroup as failures:  # of the tasks that send requests, for example from `on_record`
            raise failures.exceptions[0] from None
