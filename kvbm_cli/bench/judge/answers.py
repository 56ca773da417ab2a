"""Which answers of a cell are compared with which: every arm with one source, and runs without kvbm with each other.

The source is the recording, if there is one. Otherwise it is the first arm without kvbm: the baseline, or the floor, or
the first reference. Runs of the baseline and of the floor are the controls: they show how often the engine repeats its
own answers. Without either, runs of the first reference are. A reference whose profile changes the engine is neither
source nor control: other answers of another engine are not an error.

`warm_start` says whether the cache of a server was empty at the start of a run, from what its requests found in it. A
cold request finds at most what requests sent that were launched before its first token. That order is read from the
records: requests with equal launch times run in any order, and a busy engine delays them further.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kvbm_cli.bench.judge.correctness import (
    Answer,
    Key,
    OutputDifference,
    OutputJudgement,
    Transfers,
    compare_answers,
    judge_outputs,
    pooled,
)
from kvbm_cli.bench.result.results import LOADED, CellResult, Measurement, RequestRecord, Results
from kvbm_cli.bench.workload.plan import Plan, PlannedRequest
from kvbm_cli.bench.workload.script import Content, Phase

ONBOARDED_BLOCKS = ("kvbm_onboard_blocks_h2d", "kvbm_onboard_blocks_d2d")
Answers = Mapping[Key, Answer]
COLD_SHARE = 0.5  # of a prompt, at most, that requests earlier in the script sent
TOLERANCE = 0.1  # for the inexact lengths of prompts that are text


@dataclass(frozen=True, slots=True)
class ArmAnswers:
    """The answers of an arm against the source. `judgement` is `None` for an arm that is not judged."""

    difference: OutputDifference
    judgement: OutputJudgement | None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "compared": self.difference.compared_count,
            "different": self.difference.different_count,
            "largest_logprob_difference": self.difference.logprob,
            "requests_that_differ": [list(one.key) for one in self.difference.differences[:100]],
        }
        if self.judgement is not None:
            evidence = self.judgement.evidence
            found |= {
                "verdict": self.judgement.verdict.value,
                "reason": self.judgement.reason,
                "control": evidence.control_name,
                "control_compared": evidence.control.compared_count if evidence.control else 0,
                "control_different": evidence.control.different_count if evidence.control else 0,
                "control_logprob": evidence.control_logprob,
                "p_value": evidence.p_value,
            }
        return found


def answers_of(results: Results, cell: CellResult) -> dict[str, ArmAnswers]:
    """Every arm of the cell that ran."""
    recorded = _recorded(cell)
    controls = _controls(results, cell, recorded)
    source = None if recorded is not None else _first_without_kvbm(results, cell)
    by_pair = {run.pair: answers_in(run) for run in cell.of_arm(source)} if source else {}
    usual = recorded if recorded is not None else next(iter(by_pair.values()), {})
    found = {}
    for arm in cell.arms:
        runs = cell.of_arm(arm)
        difference = pooled(compare_answers(by_pair.get(run.pair) or usual, answers_in(run)) for run in runs)
        judgement = judge_outputs(difference, controls, transfers_of(runs)) if arm in judged_arms(results) else None
        found[arm] = ArmAnswers(difference, judgement)
    return found


def judged_arms(results: Results) -> list[str]:
    """Return the measured arm, and references with kvbm whose engine is the measured arm's."""
    measured: str = results.plan["measured"]
    others = [name for name in _references_with_the_engine(results) if results.arms[name]["kind"] == "profile"]
    return [measured, *others]


def _references_with_the_engine(results: Results) -> list[str]:
    """Return references that the measured arm's profile does not tell apart by the engine; servers are among them."""
    differences = {name: results.arms[name]["differences"] for name in results.plan["references"]}
    return [name for name, keys in differences.items() if not any(key.startswith("engine.") for key in keys)]


def transfers_of(runs: Sequence[Measurement]) -> Transfers:
    """Evidence that blocks came back: tokens by the answers and by the engine, blocks by kvbm's own counters."""
    by_usage = [record.tokens for run in runs for record in run.records]
    by_metrics = [run.server.get("prompt_tokens") or {} for run in runs]
    counters = [run.server.get("kvbm_counters") or {} for run in runs]
    return Transfers(
        loaded_tokens=max(sum(one.get(tier) or 0 for one in of for tier in LOADED) for of in (by_usage, by_metrics)),
        onboarded_blocks=round(sum(one.get(name) or 0 for one in counters for name in ONBOARDED_BLOCKS)),
        are_reported=any((*by_metrics, *counters, *("g2" in tokens for tokens in by_usage))),
    )


def _recorded(cell: CellResult) -> Answers | None:
    """Return the answers of the recording; `None` unless every request has one."""
    if not all(one.answer for one in cell.plan.requests):
        return None
    recorded = {(one.session, one.turn): one.answer for one in cell.plan.requests if one.answer}
    return {key: Answer(one.token_ids or None, one.logprobs, one.text or None) for key, one in recorded.items()}


def _first_without_kvbm(results: Results, cell: CellResult) -> str | None:
    candidates = [*_control_arms(results), *_references_with_the_engine(results)]
    return next((name for name in candidates if cell.of_arm(name)), None)


def _control_arms(results: Results) -> list[str]:
    """Return the same engine without kvbm. Another profile's engine may have a cache of its own."""
    baselines = [name for name in _references_with_the_engine(results) if results.arms[name]["kind"] == "baseline"]
    floor = results.plan["floor"]
    return [*baselines, *([floor] if floor else [])]


def _controls(results: Results, cell: CellResult, recorded: Answers | None) -> dict[str, OutputDifference]:
    """Comparisons of runs without kvbm: with the recording, or with each other.

    Without such runs, as between two servers by URL, the first reference shows how often an engine repeats its answers.
    """
    runs = [run for name in _control_arms(results) for run in cell.of_arm(name)]
    is_of_servers = results.arms[results.plan["measured"]]["kind"] == "url"
    others = _references_with_the_engine(results) if recorded is None or is_of_servers else []
    if not runs and others:
        runs = list(cell.of_arm(others[0]))
    if recorded is not None:
        return {
            f"{arm} against the recording": pooled(
                compare_answers(recorded, answers_in(run)) for run in runs if run.arm == arm
            )
            for arm in dict.fromkeys(run.arm for run in runs)
        }
    compared: dict[str, list[OutputDifference]] = defaultdict(list)
    for position, one in enumerate(runs):
        for other in runs[position + 1 :]:
            if cell.are_pairs_equal or one.pair == other.pair:
                name = f"two runs of {one.arm}" if one.arm == other.arm else f"{one.arm} against {other.arm}"
                compared[name].append(compare_answers(answers_in(one), answers_in(other)))
    return {name: pooled(parts) for name, parts in compared.items()}


def answers_in(run: Measurement) -> dict[Key, Answer]:
    """Return the answers of one run, without failed requests."""
    return {
        record.key: Answer(
            tuple(record.token_ids) if record.token_ids else None, tuple(record.logprobs), record.text or None
        )
        for record in run.records
        if record.is_ok
    }


def warm_start(run: Measurement, plan: Plan) -> str | None:
    """Return what shows that the cache was not empty, or None. The shared tier has what another engine computed."""
    for record in run.records:
        cached, prompt = (record.cached_tokens or 0) - (record.g4_tokens or 0), record.prompt_tokens or 0
        if record.phase != Phase.COLD or cached <= (COLD_SHARE + TOLERANCE) * prompt:
            continue
        known = max(COLD_SHARE, _share_sent(record, run.records, plan))
        if cached > (known + TOLERANCE) * prompt:
            return (
                f"the cache was not empty at the start of {run.run}: turn {record.turn} of session {record.session} "
                f"found {cached} of its {prompt} prompt tokens there, and at most "
                f"{'half' if known == COLD_SHARE else f'{known:.0%}'} were sent before"
            )
    return None


def _share_sent(record: RequestRecord, records: Sequence[RequestRecord], plan: Plan) -> float:
    """Return the largest part of the prompt with which another request begins that was launched before the first
    token."""
    prompt = [one for part in _parts(plan.requests[record.index]) for one in part]
    until_ms = record.first_token_ms if record.first_token_ms is not None else float("inf")
    earlier = (
        plan.requests[one.index]
        for one in records
        if one is not record and one.launched_ms is not None and one.launched_ms < until_ms
    )
    return max((_common_length(prompt, other) for other in earlier), default=0) / max(1, len(prompt))


def _common_length(prompt: Sequence[int | str], other: PlannedRequest) -> int:
    """Tokens or characters with which both begin. `other` has its answer behind its prompt."""
    length = 0
    for part in _parts(other):
        mine = prompt[length : length + len(part)]
        if mine != list(part):
            pairs = zip(mine, part, strict=False)
            return length + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        length += len(part)
    return length


def _parts(request: PlannedRequest) -> Iterator[Content]:
    """Yield the prompt, and the answer if it is planned. A fixed body has its prompt among its fields."""
    if request.parts:
        yield from request.parts
    else:
        fields = dict(request.fields)
        prompt = fields.get("prompt")
        yield prompt if isinstance(prompt, str) else json.dumps([fields.get("tools"), prompt, fields.get("messages")])
    if request.answer is not None:
        yield request.answer.content
