"""Scripts of every kind: lengths, what prompts share, phases, order, and the seed."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import yaml
from terminal import assert_entry, assert_said, given_in
from test_bench_workload import SMALLEST, parsed

from kvbm.errors import ProfileError
from kvbm.leader.hints import parsed as parsed_hint
from kvbm_cli.bench.cells import script_of
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.bench.workload.script import (
    AnswerOf,
    Phase,
    Script,
    ScriptedRequest,
    TextWriter,
    TokenWriter,
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


@pytest.mark.parametrize("kind", BUILT)
def test_text_scripts_have_the_same_order_and_about_the_same_lengths(kind):
    workload = parsed(kind, **BUILT[kind])
    text, ids = script_of(workload, TextWriter(4.0), seed=0), script(kind)
    assert [(one.session, one.turn, one.after) for one in text.requests] == [
        (one.session, one.turn, one.after) for one in ids.requests
    ] or kind in ("rag", "agentic-coding")  # their random choices follow other draws
    total = sum(one.prompt_token_count for one in ids.requests)
    assert sum(one.prompt_token_count for one in text.requests) == pytest.approx(total, rel=0.25)


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "conversations": ("conversations", {}),
    "conversations with canned answers": ("conversations", {"history": "canned"}),
    "users that join and leave": ("conversations", {"rounds_of_users": 3}),
    "conversations that are cold, fill and steady": ("conversations", {"users": 6, "turns": 6}),
    "long answers count as sent": ("conversations", {"turns": 8, "history_tokens": 10, "answer_tokens": 100}),
    "groups": ("shared-prefix", {}),
    "groups without a question": ("shared-prefix", {"question_tokens": 0}),
    "unique prompts": ("unique", {}),
    "documents": ("rag", {"requests": 12}),
    "agents alone": ("agentic-coding", {"subagent_every": 0}),
    "agents that wait for subagents": ("agentic-coding", {}),
    "a full context is summarised": ("agentic-coding", {"agents": 1, "context_tokens": 200, "steps": 12}),
    "hints": ("agentic-coding", {"agents": 1, "hints": True}),
    **{f"the smallest of {kind}": (kind, SMALLEST[kind]) for kind in BUILT},
}


def lines_of(whole: Script) -> list[str]:
    """A line per request. Equal parts have equal names; an answer has the number of its request."""
    names: dict[object, str] = {}
    lines = [f"{whole.total_tokens} tokens, working set {whole.working_set_tokens}, warm-up {len(whole.warmup)}\n"]
    for index, one in enumerate(whole.requests):
        parts = [
            f"answer-{part.request}:{part.tokens}"
            if isinstance(part, AnswerOf)
            else f"{names.setdefault(part, f'part-{len(names)}')}:{len(part)}"
            for part in one.parts
        ]
        start = "" if one.at_s is None else f", at {one.at_s:g} s"
        waits = f", {one.delay_s:g} s after {', '.join(map(str, one.after))}" if one.after else ""
        hints = f"; {json.dumps(dict(one.extra))}" if one.extra else ""
        body = f"; {one.path} {json.dumps(dict(one.body))}" if one.body else ""
        place = f"{index}: session {one.session}, turn {one.turn}, {one.phase.value}{start}{waits}"
        lines.append(f"{place}; {' '.join(parts)} -> {one.answer_tokens}{hints}{body}\n")
    return lines


@pytest.mark.parametrize("name", CASES)
def test_script(name):
    lines = lines_of(script(CASES[name][0], **CASES[name][1]))
    assert_entry("bench/scripts", name, "".join(lines), names=CASES)


@pytest.mark.parametrize("name", given_in("bench/trace_scripts"))
def test_script_of_a_trace(tmp_path, name):
    """Given are keys of the workload, and the lines of the trace."""
    keys, _, lines = given_in("bench/trace_scripts")[name].partition("\n")
    (tmp_path / "t.jsonl").write_text(lines)
    content = {"name": "w", "kind": "trace", "file": "t.jsonl", "block_tokens": 4, **yaml.safe_load(keys)}
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(content))
    try:
        said = "".join(lines_of(script_of(load_workload(str(tmp_path / "w.yaml")), WRITER, seed=0)))
    except ProfileError as error:
        said = str(error).replace(f"{tmp_path}/", "")
    assert_said("bench/trace_scripts", name, said.rstrip("\n"))


@pytest.mark.parametrize("kind", BUILT)
def test_parts_that_differ_share_nothing(kind):
    """Random texts begin with the same few letters at most."""
    parts = {part for one in script(kind).requests for part in one.parts if not isinstance(part, AnswerOf)}
    assert all(common(one, other) < 8 for one in parts for other in parts if one != other)


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


def test_popular_groups_are_visited_more_often():
    whole = script("shared-prefix", groups=10, requests_per_group=60, popularity="zipf")
    counts = Counter(one.session for one in whole.requests)
    assert len(whole.requests) == 600
    assert counts[0] > counts[1] > counts[5]
    assert counts[0] == pytest.approx(600 / 2.93, rel=0.3)


def test_sorted_documents_share_more_than_those_by_relevance():
    def reused(order: str) -> int:
        whole = script("rag", order=order)
        prompts = [tokens(whole, one) for one in whole.requests]
        return sum(
            max((common(prompt, earlier) for earlier in prompts[:index]), default=0)
            for index, prompt in enumerate(prompts)
        )

    assert reused("sorted") > 1.2 * reused("relevance")


@pytest.mark.parametrize("context_tokens", [200, 260, 400])
def test_no_context_exceeds_the_limit(context_tokens):
    whole = script("agentic-coding", context_tokens=context_tokens, steps=20)
    assert len([one for one in whole.requests if one.session == 0]) == 20 + 9 * 2
    assert all(one.prompt_token_count + one.answer_tokens <= context_tokens for one in whole.requests)


def test_hints_change_nothing_else_and_kvbm_reads_them():
    whole, plain = script("agentic-coding", hints=True), script("agentic-coding")
    assert [replace(one, extra=()) for one in whole.requests] == list(plain.requests)
    assert not any(one.extra for one in plain.requests)
    assert all(parsed_hint(dict(one.extra)["kv_transfer_params"]["kvbm"]) is not None for one in whole.requests)


def test_a_script_takes_little_memory_because_prompts_share_their_parts():
    whole = script("conversations", users=2, turns=50)
    parts = {id(part) for one in whole.requests for part in one.parts}
    assert len(parts) < 3 * len(whole.requests) + 10
