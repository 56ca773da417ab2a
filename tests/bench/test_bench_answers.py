"""Which answers are compared with which: sources, controls, and the arms that are judged."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvbm_cli.bench.judge.answers import ArmAnswers, answers_of, has_counters, judged_arms, transfers_of
from kvbm_cli.bench.judge.correctness import OutputVerdict
from kvbm_cli.bench.result.results import CellResult, Measurement, RequestRecord, Results
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan, RecordedAnswer
from kvbm_cli.bench.workload.script import Phase, Script, ScriptedRequest

COUNT = 4
RECORDED = RecordedAnswer((7, 8), (-0.1, -0.2))
OTHER_ENGINE = {"engine.model": ["a", "b"]}
OTHER_TIERS = {"tiers.host.capacity": ["1GiB", "2GiB"]}
# name -> kind and differences from the measured arm's profile
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "kvbm": ("kvbm", {}),
    "baseline": ("baseline", {}),
    "floor": ("floor", {}),
    "small": ("profile", OTHER_TIERS),
    "newer": ("profile", OTHER_ENGINE),
    "base-newer": ("baseline", OTHER_ENGINE),
    "base-small": ("baseline", OTHER_TIERS),
    "url-1": ("url", {}),
    "url-2": ("url", {}),
}


def made_plan(*, is_recorded: bool) -> Plan:
    requests = [ScriptedRequest(session, 1, ((1, 2),), 2, phase=Phase.STEADY) for session in range(COUNT)]
    answers = [RECORDED] * COUNT if is_recorded else ()
    script = Script(tuple(requests), (3,), 2, 2)
    return Plan.make(script, Launches(interval_s=1.0), Dialect("m"), answers=answers, request_timeout_s=5.0)


def made_run(arm: str, pair: int, tokens: Sequence[int], *, differing: int = 0, g2: int | None = 16) -> Measurement:
    """`differing` requests answer with another first token."""
    name = f"cell.{pair}.{arm}"
    records = [
        RequestRecord(name, arm, "cell", pair, index, index, 1, "steady", token_ids=list(tokens), g2_tokens=g2)
        for index in range(COUNT)
    ]
    for record in records[:differing]:
        record.token_ids = [99, *record.token_ids[1:]]
    return Measurement(name, arm, pair, {"server": {}, "client": {}}, tuple(records))


def made(
    runs: Sequence[Measurement], references: Sequence[str], *, is_recorded: bool = False, are_pairs_equal: bool = True
) -> Results:
    """`kvbm` or, without it, `url-1` is measured."""
    names = list(dict.fromkeys(run.arm for run in runs))
    plan = {
        "measured": "kvbm" if "kvbm" in names else "url-1",
        "references": list(references),
        "floor": "floor" if "floor" in names else None,
        "arms": {name: {"kind": ARMS[name][0], "differences": ARMS[name][1]} for name in names},
    }
    cell = CellResult({"name": "cell"}, made_plan(is_recorded=is_recorded), "digest", tuple(runs), are_pairs_equal)
    return Results(plan, (cell,))


def found(results: Results) -> dict[str, ArmAnswers]:
    return answers_of(results, results.cells[0])


def judged(results: Results, arm: str = "kvbm") -> dict[str, Any]:
    return found(results)[arm].to_json()


SAME, OTHER = (7, 8), (7, 9)


@pytest.mark.parametrize(
    ("references", "arms", "judged"),
    [
        (["baseline"], ["kvbm", "baseline", "floor"], ["kvbm"]),
        (["small"], ["kvbm", "small", "floor"], ["kvbm", "small"]),
        (["newer"], ["kvbm", "newer"], ["kvbm"]),
        (["base-newer"], ["kvbm", "base-newer"], ["kvbm"]),
        (["small", "url-1", "newer"], ["kvbm", "small", "url-1", "newer"], ["kvbm", "small"]),
        (["url-2"], ["url-1", "url-2"], ["url-1"]),
    ],
)
def test_the_measured_arm_and_profiles_with_the_same_engine_are_judged(references, arms, judged):
    results = made([made_run(arm, 1, SAME) for arm in arms], references)
    assert judged_arms(results) == judged
    assert [arm for arm, one in found(results).items() if one.judgement is not None] == judged


@pytest.mark.parametrize(
    ("references", "arms", "source"),
    [
        (["baseline"], ["baseline", "kvbm", "floor"], "baseline"),
        (["small", "baseline"], ["small", "kvbm", "baseline", "floor"], "baseline"),
        (["small"], ["small", "kvbm", "floor"], "floor"),
        (["small"], ["small", "kvbm"], "small"),
        (["newer", "small"], ["newer", "kvbm", "small"], "small"),
        (["base-newer"], ["base-newer", "kvbm", "floor"], "floor"),
        (["base-small"], ["base-small", "kvbm", "floor"], "base-small"),
        (["url-1"], ["url-1", "kvbm", "floor"], "floor"),
        (["url-2"], ["url-2", "url-1"], "url-2"),
    ],
)
def test_without_a_recording_the_first_arm_without_kvbm_is_the_source(references, arms, source):
    """Only the source itself has the answers that differ from all others."""
    runs = [made_run(arm, 1, OTHER if arm == source else SAME) for arm in arms]
    different = {arm: one.difference.different_count for arm, one in found(made(runs, references)).items()}
    assert different == {arm: 0 if arm == source else COUNT for arm in arms}


def test_a_recording_is_the_source_of_every_arm():
    runs = [made_run(arm, 1, SAME if arm == "kvbm" else OTHER) for arm in ("baseline", "kvbm", "floor")]
    results = made(runs, ["baseline"], is_recorded=True)
    different = {arm: one.difference.different_count for arm, one in found(results).items()}
    assert different == {"baseline": COUNT, "kvbm": 0, "floor": COUNT}


def test_each_pair_is_compared_with_the_source_of_its_pair_if_that_ran():
    runs = [
        made_run("baseline", 1, SAME),
        made_run("kvbm", 1, SAME),
        made_run("baseline", 2, OTHER),
        made_run("kvbm", 2, OTHER),
        made_run("kvbm", 3, SAME),  # there is no baseline of pair 3: the first counts
    ]
    assert found(made(runs, ["baseline"]))["kvbm"].difference.different_count == 0


@pytest.mark.parametrize(
    ("references", "arms", "is_recorded", "control"),
    [
        (["baseline"], ["baseline", "kvbm", "floor"], True, "baseline against the recording"),
        (["small"], ["small", "kvbm", "floor"], True, "floor against the recording"),
        (["small"], ["small", "kvbm"], True, None),
        (["base-newer"], ["base-newer", "kvbm"], True, None),
        (["base-newer"], ["base-newer", "kvbm", "floor"], True, "floor against the recording"),
        (["base-small"], ["base-small", "kvbm"], True, "base-small against the recording"),
        (["url-1"], ["url-1", "kvbm"], True, None),
        (["baseline"], ["baseline", "kvbm", "floor"], False, "baseline against floor"),
        (["baseline", "base-small"], ["baseline", "kvbm", "base-small"], False, "baseline against base-small"),
        (["baseline"], ["baseline", "kvbm"], False, None),
        (["small"], ["small", "kvbm", "floor"], False, None),
        (["base-newer"], ["base-newer", "kvbm", "floor"], False, None),
    ],
)
def test_the_controls_are_runs_of_the_same_engine_without_kvbm(references, arms, is_recorded, control):
    results = made([made_run(arm, 1, SAME) for arm in arms], references, is_recorded=is_recorded)
    assert judged(results)["control"] == control


@pytest.mark.parametrize(
    ("arm", "references", "control"),
    [
        ("baseline", ["baseline"], "two runs of baseline"),
        ("small", ["small"], "two runs of small"),
        ("url-1", ["url-1"], "two runs of url-1"),
    ],
)
def test_two_runs_of_the_reference_are_a_control(arm, references, control):
    runs = [made_run(name, pair, SAME) for pair in (1, 2) for name in (arm, "kvbm")]
    runs[2] = made_run(arm, 2, SAME, differing=1)
    found = judged(made(runs, references))
    assert (found["control"], found["control_compared"], found["control_different"]) == (control, COUNT, 1)


@pytest.mark.parametrize("other", ["base-newer", "newer"])
def test_another_engine_alone_is_neither_source_nor_control(other):
    """As in an experiment that was interrupted before its floor ran."""
    runs = [made_run(name, pair, OTHER if name == other else SAME) for pair in (1, 2) for name in (other, "kvbm")]
    found = judged(made(runs, [other]))
    assert (found["compared"], found["control"], found["verdict"]) == (0, None, "not tested")


def test_pairs_with_other_prompts_are_no_control_of_each_other():
    runs = [made_run(name, pair, SAME) for pair in (1, 2) for name in ("url-2", "url-1")]
    results = made(runs, ["url-2"], are_pairs_equal=False)
    assert judged(results, "url-1")["control"] is None


def test_three_runs_are_three_comparisons_of_one_control():
    runs = [made_run(name, pair, SAME) for pair in (1, 2, 3) for name in ("baseline", "kvbm")]
    assert judged(made(runs, ["baseline"]))["control_compared"] == 3 * COUNT


@pytest.mark.parametrize(
    ("kvbm", "baseline", "verdict"), [(0, 0, "equal"), (1, 0, "wrong"), (1, 1, "not distinguishable"), (0, 2, "equal")]
)
def test_more_differences_than_the_control_are_wrong(kvbm, baseline, verdict):
    runs = [made_run("baseline", 1, SAME, differing=baseline), made_run("kvbm", 1, SAME, differing=kvbm)]
    results = made(runs, ["baseline"], is_recorded=True)
    assert judged(results)["verdict"] == verdict
    assert judged(results)["requests_that_differ"] == [[session, 1] for session in range(kvbm)]


def test_an_arm_that_is_not_judged_has_counts_only():
    results = made([made_run("baseline", 1, OTHER), made_run("kvbm", 1, SAME)], ["baseline"], is_recorded=True)
    found = judged(results, "baseline")
    assert found == {
        "compared": COUNT,
        "different": COUNT,
        "largest_logprob_difference": None,
        "requests_that_differ": [[session, 1] for session in range(COUNT)],
    }


def test_failed_requests_have_no_answer():
    run = made_run("kvbm", 1, SAME, differing=1)
    run.records[0].error = "HTTP 503"
    results = made([made_run("baseline", 1, SAME), run], ["baseline"])
    assert (judged(results)["compared"], judged(results)["different"]) == (COUNT - 1, 0)


@pytest.mark.parametrize(
    ("server", "g2", "tokens", "blocks", "known"),
    [
        ({}, None, 0, 0, False),
        ({}, 0, 0, 0, True),
        ({}, 16, 2 * COUNT * 16, 0, True),
        ({"prompt_tokens": {"g2": 500, "g3": None}}, None, 1000, 0, True),
        ({"prompt_tokens": {"g2": 5}}, 16, 2 * COUNT * 16, 0, True),
        ({"kvbm_counters": {"kvbm_onboard_blocks_h2d": 3.0, "kvbm_onboard_blocks_d2d": 4.0}}, None, 0, 14, True),
        ({"kvbm_counters": {"kvbm_offload_blocks_d2h": 9.0}}, None, 0, 0, True),
        ({"prompt_tokens": None, "kvbm_counters": None}, None, 0, 0, False),
    ],
)
def test_transfers_are_proven_by_usage_metrics_or_counters(server, g2, tokens, blocks, known):
    runs = [made_run("kvbm", pair, SAME, g2=g2) for pair in (1, 2)]
    for run in runs:
        run.facts["server"].update(server)
    transfers = transfers_of(runs)
    assert (transfers.g2_tokens, transfers.g3_tokens, transfers.onboarded_blocks) == (tokens, 0, blocks)
    assert transfers.are_proven is bool(tokens or blocks)
    assert has_counters(runs) is known


def test_without_a_transfer_the_block_manager_was_not_tested():
    runs = [made_run(arm, 1, SAME, g2=0) for arm in ("baseline", "kvbm", "floor")]
    judgement = found(made(runs, ["baseline"]))["kvbm"].judgement
    assert judgement.verdict is OutputVerdict.NOT_TESTED
