"""Computes summary.json from the files of an experiment. `summarise` is pure: equal results give an equal summary.

`ttft_ms`, `itl_ms`, `tpot_ms` and `end_to_end_ms` of an arm cover the primary requests of all its runs: those of the
phase `steady`, or all requests of a workload that never repeats a prefix. `phases` and `turns` have every request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvbm_cli.bench.judge.answers import ArmAnswers, answers_of
from kvbm_cli.bench.judge.compared import Compared, compare, utilisation_of
from kvbm_cli.bench.judge.paired import spread
from kvbm_cli.bench.judge.verdict import DEFAULT_LIMITS, Verdict, VerdictLimits, worst_of
from kvbm_cli.bench.result.arm_result import wilson_interval
from kvbm_cli.bench.result.cost import cost_of, span_s
from kvbm_cli.bench.result.directory import FORMAT, run_name
from kvbm_cli.bench.result.results import (
    TIERS,
    CellResult,
    Measurement,
    RequestRecord,
    Results,
    rounded,
    sum_if_known,
    tokens_by_source,
)
from kvbm_cli.bench.why.facts import CellFacts, Why, facts_of
from kvbm_cli.bench.why.tiers import small_g2
from kvbm_cli.bench.why.why_not import why_not
from kvbm_cli.bench.workload.script import Phase


def summarise(
    results: Results,
    *,
    surroundings: Mapping[str, Any],
    caveats: Sequence[str] = (),
    limits: VerdictLimits = DEFAULT_LIMITS,
) -> dict[str, Any]:
    """Return the content of summary.json. `surroundings` (machine, versions, profile) is copied into it unchanged."""
    cells = [cell for cell in results.cells if cell.runs]
    answers = {cell.name: answers_of(results, cell) for cell in cells}
    compared = {cell.name: _comparisons(results, cell, answers[cell.name], limits) for cell in cells}
    profile, prices = surroundings.get("profile"), surroundings.get("prices")
    every = [one for of_cell in compared.values() for one in of_cell]
    verdict = worst_of(one.judgement.verdict for one in every)
    leading = _leading(every, verdict)
    found: dict[str, Any] = rounded(
        {
            "format": FORMAT,
            "complete": True,
            "verdict": verdict.value,
            "explanation": _explanation(results, leading, len(every)),
            "reasons": list(leading.judgement.reasons) if leading else [],
            "hint": leading.judgement.hint if leading else None,
            **(leading.headline() if leading else {}),
            "arms": results.arms,
            "cells": [
                _cell(
                    results,
                    cell,
                    compared[cell.name],
                    answers[cell.name],
                    profile=profile,
                    prices=prices,
                    limits=limits,
                )
                for cell in cells
            ],
            "caveats": list(caveats),
            "seed": results.plan["seed"],
            "digest": results.plan["digest"],
            **surroundings,
        }
    )
    return found


def _leading(comparisons: Sequence[Compared], verdict: Verdict) -> Compared | None:
    """Return the comparison that the verdict comes from: of several, the one with the largest effect."""
    found = [one for one in comparisons if one.judgement.verdict is verdict]
    return max(found, key=lambda one: abs(math.log(one.ratio.ratio)) if one.ratio else math.inf, default=None)


def interrupted_summary(reason: str, surroundings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of an incomplete run."""
    return {
        "format": FORMAT,
        "complete": False,
        "verdict": "invalid",
        "explanation": reason,
        "reasons": [reason],
        "hint": None,
        "ttft_speedup": None,
        "outputs_equal": None,
        "arms": {},
        "cells": [],
        "caveats": [],
        **surroundings,
    }


def incomplete_summary(summary: Mapping[str, Any], *, missing: int, planned: int) -> dict[str, Any]:
    """Return the summary of the runs that have ended, if others have not. Only wrong outputs are a result already."""
    verdict = Verdict.WRONG if summary["verdict"] == Verdict.WRONG else Verdict.INVALID
    reason = f"incomplete: {missing} of {planned} runs have not ended"
    has_result = any(cell["comparisons"] for cell in summary["cells"])
    so_far = f"; so far {summary['verdict']}: {summary['explanation']}" if has_result else ""
    return {
        "ttft_speedup": None,
        "outputs_equal": None,
        **summary,
        "complete": False,
        "verdict": verdict.value,
        "explanation": reason + so_far,
        "reasons": [reason, *summary["reasons"]],
        "hint": "`kvbm bench --resume` with this directory and the same options continues",
    }


def _comparisons(
    results: Results, cell: CellResult, answers: dict[str, ArmAnswers], limits: VerdictLimits
) -> list[Compared]:
    """Of the arms that have run: an interrupted experiment may have only one of two."""
    if not cell.of_arm(results.plan["measured"]):
        return []
    return [compare(results, cell, one, answers, limits) for one in results.plan["references"] if cell.of_arm(one)]


def _explanation(results: Results, leading: Compared | None, count: int) -> str:
    if leading is None:
        return f"measured {results.plan['measured']} alone: there is no reference to compare with"
    place = f"{leading.cell.name}: " if count > 1 else ""
    return place + leading.judgement.sentence


def _cell(
    results: Results,
    cell: CellResult,
    compared: Sequence[Compared],
    answers: Mapping[str, ArmAnswers],
    *,
    profile: Mapping[str, Any] | None,
    prices: Mapping[str, float] | None,
    limits: VerdictLimits,
) -> dict[str, Any]:
    definition, plan = cell.definition, cell.plan
    arms = {arm: arm_summary(cell, arm, prices) for arm in results.arms if cell.of_arm(arm)}
    floor = results.plan["floor"]
    facts = [facts_of(one, arms, floor=floor, profile=profile, limits=limits) for one in compared]
    causes = [why_not(one) for one in facts]
    return {
        **definition,
        "working_set_tokens": plan.working_set_tokens,
        "plan": {
            "digest": cell.digest,
            "requests": len(plan.requests),
            "sessions": plan.session_count,
            "turns": plan.turns,
            "duration_s": plan.duration_s,
            "interval_s": plan.launches.interval_s,
            "ramp_to_s": plan.launches.ramp_to_s,
            "burstiness": plan.launches.burstiness,
            "concurrency": plan.launches.concurrency,
            "primary": cell.primary,
        },
        "pairs_done": cell.pairs_done,
        "stopped_early": cell.pairs_done < definition["pairs"],
        "arms": arms,
        "comparisons": [
            {**one.to_json(), "why_not": [asdict(why) for why in found]}
            for one, found in zip(compared, causes, strict=True)
        ],
        "answers": {arm: found.to_json() for arm, found in answers.items()},
        "caveats": [
            *(caveat for one in compared for caveat in one.judgement.caveats),
            *_size_caveats(facts, causes),
            *_notes(results, cell),
        ],
    }


def _notes(results: Results, cell: CellResult) -> list[str]:
    """Return what the runs noticed: gaps in the engine's metrics, arms that were left out, and prompts of text."""
    found = []
    for run in cell.runs:
        found += [f"{run.run}: {note}" for note in (*run.facts.get("notes", ()), *run.server.get("caveats", ()))]
    floors = [run_name(cell.name, pair, str(results.plan["floor"])) for pair in range(1, cell.definition["pairs"] + 1)]
    found += dict.fromkeys(results.left_out[run] for run in floors if run in results.left_out)
    are_launched = all(arm["kind"] != "url" for arm in results.arms.values())
    if cell.plan.warmup.roles:
        found.append("prompts were messages of about the given lengths, to which the template of the model adds tokens")
    elif are_launched and isinstance(cell.plan.warmup.prompt, str):
        found.append(
            "prompts were text of about the given lengths: the server counts no tokens, and this machine lacks "
            "`tokenizer.json` of the model, or the library `tokenizers`"
        )
    if not cell.are_pairs_equal:
        found.append("a server cannot be emptied, so every pair sent other prompts, and no noise was measured")
    return found


def _size_caveats(facts: Sequence[CellFacts], causes: Sequence[Sequence[Why]]) -> list[str]:
    """Whether G2 is smaller than the working set, unless a cause says so."""
    if any(why.cause == "g2-too-small" for found in causes for why in found):
        return []
    return [caveat for one in facts if (caveat := small_g2(one)) is not None][:1]


def arm_summary(cell: CellResult, arm: str, prices: Mapping[str, float] | None) -> dict[str, Any]:
    runs = cell.of_arm(arm)
    records = [record for run in runs for record in run.records]
    answered = [record for record in records if record.is_ok]
    by_usage = tokens_by_source(answered)
    by_server = _server_tokens(runs)
    return {
        "runs": [run.run for run in runs],
        "requests": len(records),
        "errors": len(records) - len(answered),
        **_times([record for run in runs for record in cell.primary_records(run)]),
        "phases": {
            phase.value: _times([record for record in answered if record.phase == phase.value])
            for phase in Phase
            if any(record.phase == phase.value for record in answered)
        },
        "turns": [_turn(turn, records) for turn in sorted({record.turn for record in records})],
        "prompt_tokens": by_usage if None not in by_usage.values() else by_server or by_usage,
        "prompt_tokens_by_usage": by_usage,
        "prompt_tokens_by_metrics": by_server,
        "throughput": _mean_of([_throughput(run) for run in runs]),
        "goodput": _goodput(cell, runs),
        "cost": cost_of(runs, prices),
        "utilisation": _mean([utilisation_of(run) for run in runs]),
        "queue_wait_ms": _mean([run.server.get("queue_wait_ms") for run in runs]),
        "client": {
            "lateness_ms": spread([late for record in records if (late := record.lateness_ms) is not None]),
            "cpu_share": max(run.client["cpu_share"] for run in runs),
            "loop_lag_p99_ms": max(run.client["loop_lag_p99_ms"] for run in runs),
        },
        "server": [run.server for run in runs],
        "startup_s": _mean([run.facts["startup_s"] for run in runs]),
        "duration_s": _mean([run.facts["duration_s"] for run in runs]),
        "engine_ended": any(run.facts["engine_ended"] for run in runs),
    }


def _turn(turn: int, records: Sequence[RequestRecord]) -> dict[str, Any]:
    of_turn = [record for record in records if record.turn == turn]
    answered = [record for record in of_turn if record.is_ok]
    return {
        "turn": turn,
        "requests": len(of_turn),
        "errors": len(of_turn) - len(answered),
        **_times(answered),
        "prompt_tokens": tokens_by_source(answered),
    }


def _times(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "ttft_ms": spread(_known(record.ttft_ms for record in records)),
        "ttft_from_launch_ms": spread(_known(record.ttft_from_launch_ms for record in records)),
        "itl_ms": spread([gap for record in records for gap in record.token_gaps_ms]),
        "tpot_ms": spread(_known(record.tpot_ms for record in records)),
        "end_to_end_ms": spread(_known(record.end_to_end_ms for record in records)),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _server_tokens(runs: Sequence[Measurement]) -> dict[str, int | None] | None:
    """Return prompt tokens by source from the engine's counters; `None` if a run has none."""
    found = [run.server.get("prompt_tokens") for run in runs]
    if not all(found):
        return None
    return {tier: sum_if_known(tokens.get(tier) for tokens in found if tokens) for tier in TIERS}


def _throughput(run: Measurement) -> dict[str, float | None]:
    """Rates from the first launch to the last end. Fixed launch times limit all of them."""
    answered = [record for record in run.records if record.is_ok]
    duration_s = span_s(run)
    amounts = {
        "requests_per_s": len(answered),
        "prompt_tokens_per_s": sum(_known(record.prompt_tokens for record in answered)),
        "output_tokens_per_s": sum(record.answer_token_count for record in answered),
    }
    return {name: amount / duration_s if duration_s else None for name, amount in amounts.items()}


def _goodput(cell: CellResult, runs: Sequence[Measurement]) -> dict[str, Any] | None:
    """Return the share of all requests, failed ones included, that met the limits of the workload.

    The interval takes requests as independent, so it is too narrow if slow requests come in bursts.
    """
    records = [record for run in runs for record in run.records]
    if cell.slo is None or not records:
        return None
    good = sum(cell.slo.is_met(one.ttft_ms, one.tpot_ms, one.end_to_end_ms) for one in records if one.is_ok)
    duration_s = sum(run.facts["duration_s"] for run in runs)
    return {
        "slo": cell.definition["workload"]["slo"],
        "share": good / len(records),
        "interval_95": list(wilson_interval(good, len(records))),
        "requests_per_s": good / duration_s if duration_s > 0 else None,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _mean_of(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    return {name: _mean([part[name] for part in parts]) for name in parts[0]} if parts else {}
