"""The parameters of an LMBenchmark workload: the preset of its scenario, with the keys that the workload sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark.presets import (
    AgenticParameters,
    FaithfulParameters,
    LmbenchmarkParameters,
    ShareGptParameters,
    preset,
)
from kvbm_cli.workload.schema import Lmbenchmark

NAMES = {"time_s": "duration_s", "chat": "is_chat"}  # of keys with another name in the parameters
WORDS = ("system_words", "history_words")
MULTI_ROUND_KEYS = ("qps", "time_s", "users", "rounds", *WORDS, "answer_tokens", "chat")


def parameters_of(workload: Lmbenchmark) -> FaithfulParameters:
    """Raises UsageError for a key that the scenario does not have, or a missing file."""
    if workload.scenario == "sharegpt":
        return ShareGptParameters(_file(workload), **_changes(workload, "qps", "time_s", "chat", "file"))
    if workload.scenario == "agentic":
        _changes(workload, "file")
        return AgenticParameters((_file(workload),))
    return multi_round_parameters(workload)


def multi_round_parameters(workload: Lmbenchmark) -> LmbenchmarkParameters:
    """Of the scenarios long, short and long-long, in both modes."""
    changes = _changes(workload, *MULTI_ROUND_KEYS)
    one = preset(f"lmbenchmark-{workload.scenario}", sizes=workload.sizes)
    if any(changes.get(key, getattr(one, key)) != getattr(one, key) for key in WORDS):
        changes["sizes"] = "custom"
    return replace(one, **changes)


def _changes(workload: Lmbenchmark, *allowed: str) -> dict[str, Any]:
    """What the workload sets, by name of the parameter."""
    changes = {}
    for key in (*MULTI_ROUND_KEYS, "file"):
        value = getattr(workload, key)
        if value is None or value is False:
            continue
        if key not in allowed:
            raise UsageError(f"the scenario {workload.scenario} of LMBenchmark has no key `{key}`")
        if key != "file":
            changes[NAMES.get(key, key)] = value
    return changes


def _file(workload: Lmbenchmark) -> str:
    if workload.file is None:
        raise UsageError(
            f"the scenario {workload.scenario} of LMBenchmark requires a file",
            hint="set `file` in the workload; docs/reference/lmbenchmark.md describes its format",
        )
    return workload.file
