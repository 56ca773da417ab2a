"""Which answers are compared with which: sources, controls, the arms that are judged, what differs."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal import assert_said, given_in

from kvbm_cli.bench.judge.answers import answers_of, judged_arms, transfers_of
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
    cell = CellResult(
        {"name": "cell", "workload": {}}, made_plan(is_recorded=is_recorded), "digest", tuple(runs), are_pairs_equal
    )
    return Results(plan, (cell,))


SAME, OTHER = (7, 8), (7, 9)


def results_of(given: str) -> Results:
    """From the references, then a line per run: its pair, its arm, and what is unusual of it."""
    (first, *options), *lines = (line.split("; ") for line in given.splitlines())
    runs = []
    for (line,) in lines:
        place, *notes = line.split(", ")
        pair, arm = place.split()
        differing = next((int(note.split()[0]) for note in notes if "differ" in note), 0)
        answers, g2 = OTHER if "other answers" in notes else SAME, 0 if "nothing loaded" in notes else 16
        runs.append(made_run(arm, int(pair), answers, differing=differing, g2=g2))
        if "1 failed" in notes:
            runs[-1].records[0].error = "HTTP 503"
    references = first.removeprefix("against ").split(", ")
    are_pairs_equal = "each pair has other prompts" not in options
    return made(runs, references, is_recorded="recorded" in options, are_pairs_equal=are_pairs_equal)


@pytest.mark.parametrize("name", given_in("bench/judged_answers"))
def test_answers(name):
    """The judged arms, and what is said of the answers of every arm."""
    results = results_of(given_in("bench/judged_answers")[name])
    arms = answers_of(results, results.cells[0])
    assert set(judged_arms(results)) == {arm for arm, one in arms.items() if one.judgement is not None}
    lines = [f"judged: {judged_arms(results)}", *(f"{arm}: {json.dumps(one.to_json())}" for arm, one in arms.items())]
    assert_said("bench/judged_answers", name, "\n".join(lines))


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
    assert (transfers.loaded_tokens, transfers.onboarded_blocks) == (tokens, blocks)
    assert transfers.are_proven is bool(tokens or blocks)
    assert transfers_of(runs).are_reported is known


MOVED = Transfers(loaded_tokens=4096)


def answer(*token_ids: int, logprobs: tuple[float, ...] = ()) -> Answer:
    return Answer(token_ids, logprobs)


def outputs(compared: int, different: int, *, position: int = 30, logprob: float | None = None) -> OutputDifference:
    return OutputDifference(
        compared, tuple(AnswerDifference((1, index), position) for index in range(different)), logprob
    )


TEXT, OTHER_TEXT = Answer(None, text="yes"), Answer(None, text="yet")
THREE = answer(5, 6, 7, logprobs=(-1.0, -2.0, -3.0))
LAST_DIFFERS = answer(5, 6, 8, logprobs=(-1.0, -2.25, -9.0))


@pytest.mark.parametrize(
    ("first", "second", "position", "logprob"),
    [
        (answer(5, 6, 7), answer(5, 6, 7), None, None),
        (TEXT, TEXT, None, None),
        (answer(5, 6, 7), answer(5, 6, 8), 2, None),
        (answer(5, 6, 7), answer(4, 6, 7), 0, None),
        (answer(5, 6), answer(5, 6, 7), 2, None),
        (answer(), answer(5), 0, None),
        (TEXT, OTHER_TEXT, 2, None),
        (Answer((1,), text="yes"), Answer(None, text="no"), 0, None),
        # Log-probabilities are compared before the first different token.
        (THREE, LAST_DIFFERS, 2, 0.25),
        (THREE, answer(5, 6, 7), None, None),
        (THREE, answer(4, logprobs=(-1.0,)), 0, 0.0),
        # Without token ids, those of equal texts with as many tokens.
        (Answer(None, (-1.0, -2.0), "yes"), Answer(None, (-1.0, -2.25), "yes"), None, 0.25),
        (Answer(None, (-1.0, -2.0), "yes"), Answer(None, (-1.0,), "yes"), None, None),
        (Answer(None, (-1.0, -2.0), "yes"), Answer(None, (-1.0, -2.25), "yet"), 2, None),
    ],
)
def test_the_first_difference_of_two_answers(first, second, position, logprob):
    found = compare_answers({(1, 2): first}, {(1, 2): second})
    differences = () if position is None else (AnswerDifference((1, 2), position),)
    assert found == OutputDifference(1, differences, logprob)
    assert found == compare_answers({(1, 2): second}, {(1, 2): first})


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        ({(1, 1): answer(1), (1, 2): answer(2)}, {(1, 2): answer(2), (1, 3): answer(3)}, (1, 0)),
        ({(1, 1): answer(1)}, {(1, 1): TEXT}, (0, 1)),  # ids against text
    ],
)
def test_only_requests_that_both_answered_alike_are_compared(first, second, counts):
    found = compare_answers(first, second)
    assert (found.compared_count, found.incomparable_count, found.different_count) == (*counts, 0)


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


LATE, EARLY = outputs(60, 20, position=40), outputs(60, 20, position=0)


@pytest.mark.parametrize(
    ("measured", "control", "transfers", "verdict"),
    [
        # Numerical noise changes late tokens. Wrong blocks change the first one, too.
        (LATE, LATE, MOVED, "not distinguishable"),
        (EARLY, LATE, MOVED, "wrong"),
        # Without a transfer nothing was tested, but a changed answer is wrong.
        (outputs(60, 0), outputs(60, 0), Transfers(), "not tested"),
        (outputs(60, 0), outputs(60, 0), Transfers(loaded_tokens=16), "equal"),
        (outputs(60, 0), outputs(60, 0), Transfers(onboarded_blocks=1), "equal"),
        (outputs(60, 1), outputs(60, 0), Transfers(), "wrong"),
    ],
)
def test_the_place_of_a_difference_and_transfers_count(measured, control, transfers, verdict):
    assert judge_outputs(measured, {"floor": control}, transfers).verdict == verdict


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
