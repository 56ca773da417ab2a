"""Which answers are compared with which: sources, controls, the arms that are judged, what differs."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_cli.bench.judge.answers import ArmAnswers, answers_of, has_counters, judged_arms, transfers_of
from kvbm_cli.bench.judge.correctness import (
    Answer,
    AnswerDifference,
    OutputDifference,
    OutputVerdict,
    Transfers,
    compare_answers,
    judge_outputs,
    more_often,
    pooled,
)
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


MOVED = Transfers(g2_tokens=4096)


def answer(*token_ids: int, logprobs: tuple[float, ...] = ()) -> Answer:
    return Answer(token_ids, logprobs)


def outputs(compared: int, different: int, *, position: int = 30, logprob: float | None = None) -> OutputDifference:
    return OutputDifference(
        compared, tuple(AnswerDifference((1, index), position) for index in range(different)), logprob
    )


def test_equal_answers_do_not_differ():
    answers = {(1, 2): answer(5, 6, 7), (2, 2): Answer(None, text="yes")}
    assert compare_answers(answers, answers) == OutputDifference(2)


@pytest.mark.parametrize(
    ("first", "second", "position"),
    [
        (answer(5, 6, 7), answer(5, 6, 8), 2),
        (answer(5, 6, 7), answer(4, 6, 7), 0),
        (answer(5, 6), answer(5, 6, 7), 2),
        (answer(), answer(5), 0),
        (Answer(None, text="yes"), Answer(None, text="yet"), 2),
        (Answer((1,), text="yes"), Answer(None, text="no"), 0),
    ],
)
def test_position_of_the_first_difference(first, second, position):
    found = compare_answers({(1, 2): first}, {(1, 2): second})
    assert found.differences == (AnswerDifference((1, 2), position),)
    assert found == compare_answers({(1, 2): second}, {(1, 2): first})


def test_only_requests_that_both_answered_are_compared():
    found = compare_answers({(1, 1): answer(1), (1, 2): answer(2)}, {(1, 2): answer(2), (1, 3): answer(3)})
    assert found == OutputDifference(1)


def test_ids_against_text_cannot_be_compared():
    found = compare_answers({(1, 1): answer(1)}, {(1, 1): Answer(None, text="a")})
    assert (found.compared_count, found.incomparable_count) == (0, 1)


def test_logprobs_are_compared_before_the_first_different_token():
    first = answer(5, 6, 7, logprobs=(-1.0, -2.0, -3.0))
    second = answer(5, 6, 8, logprobs=(-1.0, -2.25, -9.0))
    assert compare_answers({(1,): first}, {(1,): second}).logprob == pytest.approx(0.25)
    assert compare_answers({(1,): first}, {(1,): answer(5, 6, 7)}).logprob is None
    assert compare_answers({(1,): first}, {(1,): answer(4, logprobs=(-1.0,))}).logprob == 0.0


def test_pooled_comparisons_add_up():
    found = pooled([outputs(10, 1, logprob=0.1), outputs(20, 2), outputs(5, 0, logprob=0.3)])
    assert (found.compared_count, found.different_count, found.logprob) == (35, 3, 0.3)
    assert pooled([]) == OutputDifference(0)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((3, 4, 1, 4), 17 / 70), ((0, 10, 5, 10), 1.0), ((5, 5, 0, 5), 1 / 252), ((1, 10, 0, 10), 0.5)],
)
def test_exact_test_agrees_with_fishers(counts, expected):
    """3 and 1 of 4 is Fisher's tea: 17 / 70."""
    assert more_often(*counts) == pytest.approx(expected)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_exact_test_is_a_probability_that_falls_with_more_differences(bad, good, other_bad, other_good):
    count, other_count = bad + good + 1, other_bad + other_good
    here = more_often(bad, count, other_bad, other_count)
    assert 0 < here <= 1
    if count + other_count > 1:
        assert more_often(bad + 1, count, other_bad, other_count) <= here


@pytest.mark.parametrize(
    ("measured", "controls", "verdict"),
    [
        (outputs(60, 0), {"floor": outputs(60, 0)}, "equal"),
        (outputs(60, 1), {"floor": outputs(60, 0)}, "wrong"),
        (outputs(60, 1), {"floor": outputs(60, 1)}, "not distinguishable"),
        (outputs(60, 8), {"floor": outputs(60, 4)}, "not distinguishable"),
        (outputs(60, 30), {"floor": outputs(60, 4)}, "wrong"),
        (outputs(60, 30), {"floor": outputs(60, 4), "pairs": outputs(60, 25)}, "not distinguishable"),
        (outputs(60, 0), {"floor": outputs(60, 4)}, "equal"),
        (outputs(60, 1), {}, "not tested"),
        (outputs(60, 0), {}, "not tested"),
        (outputs(60, 0), {"floor": outputs(0, 0)}, "not tested"),
        (outputs(60, 0, logprob=1e-6), {}, "equal"),
        (outputs(60, 0, logprob=2e-3), {}, "not tested"),
        (outputs(0, 0), {"floor": outputs(60, 0)}, "not tested"),
        (outputs(60, 0, logprob=2e-3), {"floor": outputs(60, 0, logprob=0.0)}, "wrong"),
        (outputs(60, 0, logprob=2e-3), {"floor": outputs(60, 0, logprob=3e-4)}, "equal"),
        (outputs(60, 0, logprob=2e-3), {"floor": outputs(60, 0)}, "not tested"),
        (outputs(60, 5, logprob=0.9), {"floor": outputs(60, 5, logprob=0.02)}, "wrong"),
    ],
)
def test_verdict_on_answers(measured, controls, verdict):
    assert judge_outputs(measured, controls, MOVED).verdict == verdict


def test_differences_in_the_first_token_count_more_than_late_ones():
    """Numerical noise changes late tokens. Wrong blocks change the first one, too."""
    control = {"pairs": outputs(60, 20, position=40)}
    assert judge_outputs(outputs(60, 20, position=40), control, MOVED).verdict == "not distinguishable"
    assert judge_outputs(outputs(60, 20, position=0), control, MOVED).verdict == "wrong"


@pytest.mark.parametrize(
    ("transfers", "verdict"),
    [
        (Transfers(), "not tested"),
        (Transfers(g2_tokens=16), "equal"),
        (Transfers(g3_tokens=16), "equal"),
        (Transfers(onboarded_blocks=1), "equal"),
    ],
)
def test_without_a_transfer_nothing_was_tested(transfers, verdict):
    assert judge_outputs(outputs(60, 0), {"floor": outputs(60, 0)}, transfers).verdict == verdict


def test_a_changed_answer_is_wrong_also_without_a_transfer():
    assert judge_outputs(outputs(60, 1), {"floor": outputs(60, 0)}, Transfers()).verdict is OutputVerdict.WRONG


def test_judgement_has_all_counts():
    judgement = judge_outputs(outputs(60, 9), {"floor": outputs(60, 3), "pairs": outputs(120, 12)}, MOVED)
    assert judgement.evidence.control_name == "pairs"
    assert judgement.evidence.control == outputs(120, 12)
    assert judgement.evidence.p_value == pytest.approx(2 * more_often(9, 60, 12, 120))
    assert (
        judgement.reason
        == "9 of 60 answers differ, and 12 of 120 without kvbm (pairs), which is not significantly more"
    )


def diverging(seed: int, *, wrong_share: float = 0.0) -> tuple[OutputDifference, OutputDifference]:
    """Three pairs of 40 requests. A tenth of the requests is close to a tie: each run has either of two answers."""
    generator = random.Random(seed)
    runs: dict[str, dict[tuple[int, ...], Answer]] = {"baseline": {}, "kvbm": {}}
    for arm, answers in runs.items():
        for pair in (1, 2, 3):
            for request in range(40):
                tie = request % 10 == 0 and generator.random() < 0.5
                wrong = arm == "kvbm" and generator.random() < wrong_share
                answers[pair, request] = answer(1, 2, 3 + tie, 5 + wrong)

    def of_pair(arm: str, pair: int) -> dict[tuple[int, ...], Answer]:
        return {key[1:]: value for key, value in runs[arm].items() if key[0] == pair}

    measured = pooled(compare_answers(of_pair("baseline", pair), of_pair("kvbm", pair)) for pair in (1, 2, 3))
    control = pooled(compare_answers(of_pair("baseline", a), of_pair("baseline", b)) for a, b in ((1, 2), (2, 3)))
    return measured, control


@pytest.mark.parametrize(("wrong_share", "least", "most"), [(0.0, 0, 2), (0.25, 190, 200)])
def test_an_engine_that_repeats_itself_badly_is_not_called_wrong_and_wrong_blocks_are(wrong_share, least, most):
    found = 0
    for seed in range(200):
        measured, control = diverging(seed, wrong_share=wrong_share)
        found += judge_outputs(measured, {"pairs": control}, MOVED).verdict is OutputVerdict.WRONG
    assert least <= found <= most
