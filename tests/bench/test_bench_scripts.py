"""Scripts of every kind: lengths, what prompts share, phases, order, and the seed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from test_bench_workload import SMALLEST, parsed

from kvbm.leader.hints import parsed as parsed_hint
from kvbm_cli.bench.cells import script_of
from kvbm_cli.bench.workload.script import (
    AnswerOf,
    Phase,
    Script,
    ScriptedRequest,
    TextWriter,
    TokenWriter,
    with_canned_answers,
)

WRITER = TokenWriter(lambda text: list(text.encode()), seed=0)
USERS = {"users": 4, "turns": 3, "system_tokens": 20, "history_tokens": 100, "question_tokens": 7, "answer_tokens": 5}
GROUPS = {"groups": 3, "requests_per_group": 4, "prefix_tokens": 90, "question_tokens": 10, "answer_tokens": 5}
DOCUMENTS = {
    "documents": 8,
    "document_tokens": 50,
    "documents_per_request": 3,
    "system_tokens": 10,
    "question_tokens": 6,
    "answer_tokens": 5,
    "requests": 60,
}
AGENTS = {
    "agents": 3,
    "steps": 6,
    "system_tokens": 60,
    "task_tokens": 40,
    "tool_result_tokens": 20,
    "answer_tokens": 5,
    "subagent_every": 2,
    "subagent_steps": 2,
    "context_tokens": 4000,
    "tool_s": 0.25,
}
ALONE = {"requests": 5, "prompt_tokens": 40, "answer_tokens": 3}
BUILT = {"conversations": USERS, "shared-prefix": GROUPS, "unique": ALONE, "rag": DOCUMENTS, "agentic-coding": AGENTS}


def script(kind: str, *, seed: int = 0, **changes: object) -> Script:
    return script_of(parsed(kind, **{**BUILT[kind], **changes}), WRITER, seed=seed)


def tokens(whole: Script, request: ScriptedRequest) -> list[int]:
    """The prompt; the tokens of an answer to request i are -1 - i."""
    found: list[int] = []
    for part in request.parts:
        found += [-1 - part.request] * part.tokens if isinstance(part, AnswerOf) else part
    assert len(found) == request.prompt_token_count
    return found


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


@pytest.mark.parametrize("kind", BUILT)
def test_the_seed_decides_every_token(kind):
    assert script(kind) == script(kind)
    other = script(kind, seed=1)
    assert [tokens(other, one) for one in other.requests] != [
        tokens(script(kind), one) for one in script(kind).requests
    ]
    assert other.warmup != script(kind).warmup


@pytest.mark.parametrize("kind", BUILT)
def test_no_request_contains_the_warm_up(kind):
    whole = script(kind)
    assert len(whole.warmup) == whole.requests[0].prompt_token_count
    assert all(common(whole.warmup, tokens(whole, one)) < 8 for one in whole.requests)


@pytest.mark.parametrize("kind", [kind for kind in SMALLEST if kind in BUILT])
def test_the_smallest_workload_of_a_kind_has_a_script(kind):
    whole = script_of(parsed(kind), WRITER, seed=0)
    assert whole.requests
    assert all(one.prompt_token_count > 0 for one in whole.requests)


@pytest.mark.parametrize("kind", BUILT)
def test_turns_of_a_session_count_from_one_and_await_only_earlier_requests(kind):
    whole = script(kind)
    turns: Counter[int] = Counter()
    for index, request in enumerate(whole.requests):
        turns[request.session] += 1
        assert request.turn == turns[request.session]
        assert all(0 <= one < index for one in request.after)


@pytest.mark.parametrize("kind", BUILT)
def test_text_scripts_have_the_same_order_and_about_the_same_lengths(kind):
    workload = parsed(kind, **BUILT[kind])
    text, ids = script_of(workload, TextWriter(4.0), seed=0), script(kind)
    assert [(one.session, one.turn, one.after) for one in text.requests] == [
        (one.session, one.turn, one.after) for one in ids.requests
    ] or kind in ("rag", "agentic-coding")  # their random choices follow other draws
    total = sum(one.prompt_token_count for one in ids.requests)
    assert sum(one.prompt_token_count for one in text.requests) == pytest.approx(total, rel=0.25)


def test_conversations_have_exact_lengths_and_share_only_the_system_prompt():
    whole = script("conversations")
    workload = parsed("conversations", **USERS)
    for request in whole.requests:
        assert request.prompt_token_count == workload.prompt_tokens(request.turn)
        assert request.answer_tokens == 5
    prompts = [tokens(whole, one) for one in whole.requests]
    assert all(20 <= common(prompts[0], prompt) < 24 for prompt in prompts[1:4])
    for index in range(4, 12):
        assert common(prompts[index], prompts[index - 4]) == len(prompts[index - 4])
        assert prompts[index][len(prompts[index - 4])] == -1 - (index - 4)
    assert whole.working_set_tokens == workload.working_set_tokens
    assert whole.total_tokens == workload.working_set_tokens


def test_canned_answers_are_random_text_of_the_length():
    whole = script("conversations", history="canned")
    assert all(token >= 0 for request in whole.requests for token in tokens(whole, request))
    assert [one.prompt_token_count for one in whole.requests] == [
        one.prompt_token_count for one in script("conversations").requests
    ]


def test_users_join_and_leave_with_rounds():
    whole = script("conversations", rounds_of_users=3)
    assert len(whole.requests) == 4 * 3 * 3
    by_session = Counter(request.session for request in whole.requests)
    assert max(by_session.values()) == 3
    assert [by_session[place] for place in range(4)] == [3, 2, 1, 1]
    first = {
        session: index for index, request in reversed(list(enumerate(whole.requests))) for session in [request.session]
    }
    joins = sorted(index // 4 for session, index in first.items() if session >= 4)
    assert len(set(joins)) > 3
    active = [{one.session for one in whole.requests[start : start + 4]} for start in range(0, 36, 4)]
    assert all(len(sessions) == 4 for sessions in active)


def test_phases_are_cold_then_fill_then_steady():
    whole = script("conversations", users=6, turns=6)
    phases = [request.phase for request in whole.requests]
    assert set(phases) == {Phase.COLD, Phase.FILL, Phase.STEADY} or set(phases) == {Phase.COLD, Phase.STEADY}
    assert phases[:6] == [Phase.COLD] * 6
    assert {request.phase for request in whole.requests if request.turn == 6} == {Phase.STEADY}


def test_a_prompt_whose_larger_part_is_new_is_cold():
    shared, own = (1,) * 40, [(number + 2,) * 30 for number in range(8)]
    requests = [ScriptedRequest(0, 1, (shared, one), 1) for one in own]
    requests += [ScriptedRequest(0, 1, (shared, (99,) * 50), 1)]
    whole = Script.of(requests, warmup=(7,))
    assert [one.phase for one in whole.requests] == [
        Phase.COLD,  # nothing was sent before
        *[Phase.FILL] * 4,  # less than half of the 40 + 8 * 30 + 50 + 9 different tokens was sent
        *[Phase.STEADY] * 3,
        Phase.COLD,  # 50 of 90 tokens are new
    ]


def test_long_answers_count_as_sent():
    whole = script("conversations", users=4, turns=8, history_tokens=10, answer_tokens=100)
    assert {one.phase for one in whole.requests if one.turn >= 6} == {Phase.STEADY}
    assert {one.phase for one in whole.requests if 2 <= one.turn <= 4} == {Phase.FILL}


def test_requests_of_a_group_share_the_prefix_and_others_nothing():
    whole = script("shared-prefix")
    prompts = [tokens(whole, one) for one in whole.requests]
    assert [one.session for one in whole.requests] == [0, 1, 2] * 4
    for one in range(12):
        assert len(prompts[one]) == 100
        for other in range(one):
            shared = common(prompts[one], prompts[other])
            assert (90 <= shared < 96) if one % 3 == other % 3 else shared < 6
    assert whole.requests[4].after == (1,)
    assert [one.phase for one in whole.requests] == [Phase.COLD] * 3 + [one.phase for one in whole.requests[3:]]
    assert whole.requests[-1].phase is Phase.STEADY


def test_a_group_without_a_question_repeats_the_prompt():
    whole = script("shared-prefix", question_tokens=0)
    assert len({tuple(tokens(whole, one)) for one in whole.requests}) == 3


def test_popular_groups_are_visited_more_often():
    whole = script("shared-prefix", groups=10, requests_per_group=60, popularity="zipf")
    counts = Counter(one.session for one in whole.requests)
    assert len(whole.requests) == 600
    assert counts[0] > counts[1] > counts[5]
    assert counts[0] == pytest.approx(600 / 2.93, rel=0.3)


def test_unique_prompts_share_nothing_and_have_no_steady_phase():
    whole = script("unique")
    prompts = [tokens(whole, one) for one in whole.requests]
    assert all(common(one, other) < 6 for one in prompts for other in prompts if one is not other)
    assert {one.phase for one in whole.requests} == {Phase.COLD}
    assert whole.total_tokens == whole.working_set_tokens == 5 * 43


def documents_of(whole: Script) -> list[tuple[int, ...]]:
    numbers: dict[int, int] = {}
    for one in whole.requests:
        for part in one.parts[1:-1]:
            numbers.setdefault(id(part), len(numbers))
    return [tuple(numbers[id(part)] for part in one.parts[1:-1]) for one in whole.requests]


def test_a_retriever_puts_different_documents_before_the_question():
    whole = script("rag")
    for one, chosen in zip(whole.requests, documents_of(whole), strict=True):
        assert one.prompt_token_count == 10 + 3 * 50 + 6
        assert len(set(chosen)) == 3
    assert len({id(one.parts[0]) for one in whole.requests}) == 1
    counts = Counter(number for chosen in documents_of(whole) for number in chosen)
    assert len(counts) == 8
    assert max(counts.values()) > 2.5 * min(counts.values())


def test_sorted_documents_share_more_than_those_by_relevance():
    def reused(order: str) -> int:
        whole = script("rag", order=order)
        prompts = [tokens(whole, one) for one in whole.requests]
        return sum(
            max((common(prompt, earlier) for earlier in prompts[:index]), default=0)
            for index, prompt in enumerate(prompts)
        )

    assert reused("sorted") > 1.2 * reused("relevance")


def own_requests(whole: Script, session: int) -> tuple[list[int], list[int]]:
    """Indices of an agent's own requests and of its subagents', which have another task."""
    indices = [index for index, one in enumerate(whole.requests) if one.session == session]
    task = id(whole.requests[indices[0]].parts[1])
    own = [index for index in indices if id(whole.requests[index].parts[1]) == task]
    return own, [index for index in indices if index not in own]


def test_contexts_of_agents_grow_by_answer_and_tool_result():
    whole = script("agentic-coding", subagent_every=0)
    assert len(whole.requests) == 3 * 6
    for session in range(3):
        own, others = own_requests(whole, session)
        assert others == []
        lengths = [whole.requests[index].prompt_token_count for index in own]
        assert lengths[0] == 100
        assert all(5 + 10 <= later - before <= 5 + 40 for before, later in pairwise(lengths))
        prompts = [tokens(whole, whole.requests[index]) for index in own]
        assert all(common(*pair) == len(pair[0]) for pair in pairwise(prompts))
        assert [whole.requests[index].after for index in own] == [(), *((index,) for index in own[:-1])]
        assert [whole.requests[index].delay_s for index in own] == [0.0, *[0.25] * 5]


def test_an_agent_waits_for_its_subagent_which_has_the_same_system_prompt():
    whole = script("agentic-coding")
    systems = {id(one.parts[0]) for one in whole.requests}
    assert len(systems) == 1
    for session in range(3):
        own, others = own_requests(whole, session)
        assert len(own) == 6
        assert len(others) == 2 * 2  # after the steps 2 and 4; after the last, none starts
        for first, second in zip(others[::2], others[1::2], strict=True):
            step_before = max(index for index in own if index < first)
            step_after = min(index for index in own if index > second)
            assert whole.requests[first].after == (step_before,)
            assert whole.requests[second].after == (first,)
            assert whole.requests[step_after].after == (second,)
            assert whole.requests[first].prompt_token_count == 60 + 40 // 4 + 1


def hint(request: ScriptedRequest) -> dict[str, object]:
    return dict(request.extra)["kv_transfer_params"]["kvbm"]


def test_hints_say_which_contexts_go_on_and_change_nothing_else():
    whole, plain = script("agentic-coding", hints=True), script("agentic-coding")
    assert [replace(one, extra=()) for one in whole.requests] == list(plain.requests)
    assert not any(one.extra for one in plain.requests)
    for session in range(3):
        own, others = own_requests(whole, session)
        hints = [hint(whole.requests[index]) for index in own]
        assert len({one["session"] for one in hints}) == 1
        assert [one.get("retain_s") for one in hints] == [30.5] * 5 + [None]
        assert hints[-1]["demote"] is True
        assert [hint(whole.requests[index]).get("demote", False) for index in others] == [False, True] * 2
        assert len({hint(whole.requests[index])["session"] for index in others}) == 2
        assert all(parsed_hint(hint(one)) is not None for one in whole.requests)


@pytest.mark.parametrize("context_tokens", [200, 260, 400])
def test_no_context_exceeds_the_limit_and_a_full_one_is_summarised(context_tokens):
    whole = script("agentic-coding", context_tokens=context_tokens, steps=20)
    assert len([one for one in whole.requests if one.session == 0]) == 20 + 9 * 2
    for one in whole.requests:
        assert one.prompt_token_count + one.answer_tokens <= context_tokens
    indices = [index for index, one in enumerate(whole.requests) if one.session == 0]
    lengths = [whole.requests[index].prompt_token_count for index in indices]
    assert any(later < before for before, later in pairwise(lengths))


def test_a_script_takes_little_memory_because_prompts_share_their_parts():
    whole = script("conversations", users=2, turns=50)
    parts = {id(part) for one in whole.requests for part in one.parts}
    assert len(parts) < 3 * len(whole.requests) + 10


def test_canned_answers_take_the_place_of_recorded_ones():
    whole = script("conversations")
    canned = with_canned_answers(whole, lambda count: (7,) * count)
    assert [one.prompt_token_count for one in canned.requests] == [one.prompt_token_count for one in whole.requests]
    assert not [part for one in canned.requests for part in one.parts if isinstance(part, AnswerOf)]
    first, second = (tokens(canned, canned.requests[index]) for index in (0, 4))
    assert second[: len(first) + 5] == [*first, *(7,) * 5]
    assert [one.phase for one in canned.requests] == [one.phase for one in whole.requests]
