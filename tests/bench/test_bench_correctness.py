import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
