"""From a workload of kind `lmbenchmark` to what runs.

The users of a multi-round scenario run as conversations: launches at exactly 1 / qps, lengths in tokens, random text,
answers of exactly the length. Users join and leave as in LMBenchmark, but the first ones start with fewer turns left
instead of with missing turns. If the scenario's time is too short for two turns of a user, it is extended.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark.agentic import read_agent_trace
from kvbm_cli.bench.lmbenchmark.sharegpt import read_transcripts
from kvbm_cli.bench.workload.schema import Conversations, Lmbenchmark, Schedule, Workload
from kvbm_cli.bench.workload.script import AnswerOf, Content, Part, Script, ScriptedRequest, Writer

SHAREGPT_QPS = 1.34
AGENT_INTERVAL_S = 3.0  # between two rounds of a user's agents
# The sizes of the multi-round scenarios (commit 26d02bd), as the scripts name them, by the keys of a workload.
_KEYS = ("users", "rounds", "system_words", "history_words", "answer_tokens", "qps", "time_s")
PRESETS: Mapping[str, Mapping[str, float]] = {
    "long": dict(zip(_KEYS, (15, 20, 1000, 20000, 100, 0.1, 100.0), strict=True)),  # long_input_short_output_run.sh
    "short": dict(zip(_KEYS, (320, 20, 0, 256, 20, 15.0, 100.0), strict=True)),  # short_input_short_output.sh
    "long-long": dict(zip(_KEYS, (320, 20, 0, 2000, 1000, 0.7, 100.0), strict=True)),  # long_input_long_output.sh
}
QUESTION_TOKENS = 17  # of LMBenchmark's question, with a common tokenizer
LEAST_TURNS_PER_USER = 2
AGENT_QUESTION_TOKENS = 10


def strict_workload(workload: Workload) -> Workload:
    """Return the conversations of a multi-round scenario; any other workload as it is, with its schedule."""
    if not isinstance(workload, Lmbenchmark):
        return workload
    if workload.scenario not in PRESETS:
        interval_s = 1 / (workload.qps or SHAREGPT_QPS) if workload.scenario == "sharegpt" else None
        return workload.model_copy(update={"schedule": _at(workload, interval_s, workload.time_s)})
    preset = PRESETS[workload.scenario]
    sizes: dict[str, Any] = {**preset, **workload.model_dump(include=set(preset), exclude_none=True)}
    users, rounds, qps = sizes["users"], sizes["rounds"], sizes["qps"]
    duration_s = max(sizes["time_s"], LEAST_TURNS_PER_USER * users / qps)
    return Conversations(
        name=workload.name,
        description=workload.description or f"users of LMBenchmark's scenario {workload.scenario}, measured strictly",
        seed=workload.seed,
        request_timeout_s=workload.request_timeout_s,
        slo=workload.slo,
        schedule=_at(workload, 1 / qps, duration_s),
        users=users,
        turns=rounds,
        system_tokens=sizes["system_words"],
        history_tokens=sizes["history_words"],
        question_tokens=QUESTION_TOKENS,
        answer_tokens=sizes["answer_tokens"],
        history="canned",
        rounds_of_users=max(2, math.ceil(math.ceil(duration_s * qps) / (users * rounds)) + 1),
    )


def _at(workload: Lmbenchmark, interval_s: float | None, duration_s: float | None) -> Schedule:
    return workload.schedule.model_copy(update={"interval_s": interval_s, "duration_s": duration_s})


def strict_script(workload: Lmbenchmark, writer: Writer, *, seed: int) -> Script:
    """Transcripts or agents as a script. UsageError for an unreadable file."""
    assert workload.file is not None
    generator = random.Random(seed)
    requests = list(
        _transcripts(workload.file, writer) if workload.scenario == "sharegpt" else _agents(workload, writer, generator)
    )
    return Script.of(requests, warmup=writer.content(generator, requests[0].prompt_token_count))


def _transcripts(file: str, writer: Writer) -> Iterator[ScriptedRequest]:
    """Each transcript begins with the previous one of its conversation."""
    known: dict[int, tuple[str, tuple[Content, ...]]] = {}
    for one in read_transcripts(Path(file)):
        before, parts = known.get(one.session, ("", ()))
        parts = (*parts, writer.encoded(one.text[len(before) :]))
        known[one.session] = one.text, parts
        yield ScriptedRequest(one.session, one.turn, parts, one.answer_tokens)


def _agents(workload: Lmbenchmark, writer: Writer, generator: random.Random) -> Iterator[ScriptedRequest]:
    """All agents of a round at the same time; the next round follows when all have answered."""
    assert workload.file is not None
    trace = read_agent_trace(Path(workload.file))
    index = 0
    for user in range(workload.users or 1):
        said: dict[tuple[int, int], tuple[Part, Part]] = {}  # question and answer by round and agent
        before: tuple[int, ...] = ()
        first = index
        for number, tasks in enumerate(trace):
            first_of_round = index
            for task in tasks:
                history = [part for source, agent, which in task.inputs for part in _said(said, (source, agent), which)]
                question = writer.content(generator, AGENT_QUESTION_TOKENS)
                parts = (*history, question)
                yield ScriptedRequest(user, index - first + 1, parts, task.answer_tokens, before, AGENT_INTERVAL_S)
                said[number, task.agent] = question, AnswerOf(index, task.answer_tokens)
                index += 1
            before = tuple(range(first_of_round, index))


def _said(said: dict[tuple[int, int], tuple[Part, Part]], source: tuple[int, int], which: str) -> tuple[Part, ...]:
    """UsageError for an agent that was not asked before."""
    if source not in said:
        raise UsageError(
            f"`input_from` of the trace names agent {source[1]} of round {source[0]}, which has no turn before"
        )
    return {"input": said[source][:1], "output": said[source][1:], "both": said[source]}[which]
