from __future__ import annotations

from pathlib import Path

import pytest

from kvbm.errors import ProfileError, UsageError
from kvbm_cli.profile.workload import KEYS, Workload, load_workload, parse_workload, shipped_workloads

GUIDE = Path(__file__).parents[2] / "docs/guide/bench.md"
TEXT = """
name: small
users: 3
turns: 2
system_tokens: 10
history_tokens: 100
question_tokens: 5
answer_tokens: 7
"""


@pytest.mark.parametrize("name", shipped_workloads())
def test_every_shipped_workload_is_valid_and_named_after_its_file(name):
    assert load_workload(name).name == name


def test_the_default_workload_is_large_enough_to_mean_something():
    workload = load_workload("conversations")
    assert workload.users >= 6
    assert workload.turns >= 4
    assert workload.prompt_tokens(1) >= 1500


def test_lengths_grow_by_question_and_answer():
    workload = parse_workload(TEXT, source="here")
    assert [workload.prompt_tokens(turn) for turn in (1, 2)] == [115, 127]
    assert workload.conversation_tokens == 134
    assert workload.working_set_tokens == 10 + 3 * 124


def test_a_file_of_ones_own_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    assert load_workload(str(path)).users == 3


def test_a_name_that_is_none_lists_the_shipped_ones():
    with pytest.raises(UsageError, match="no workload and no file is named `nonsense`") as caught:
        load_workload("nonsense")
    assert "conversations" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("line", "message", "marked"),
    [
        ("seed: -1", "`seed` must be at least 0, not `-1`", "-1"),
        ("seed: '3'", "`seed` must be a whole number, not the text `3`", "'3'"),
        ("schedule: {target_utilisation: 1.5}", "`schedule.target_utilisation` must be less than 1, not `1.5`", "1.5"),
        ("history: live", "`history` must be 'recorded', not the text `live`", "live"),
        ("request_timeout_s: .inf", "`request_timeout_s` must be a number, not the text `.inf`", ".inf"),
        ("users: 4", "`users` appears twice; the first is on line 3", "users"),
        ("seed: {", "not valid YAML", ""),
    ],
)
def test_a_mistake_shows_its_line_with_a_caret(line, message, marked):
    with pytest.raises(ProfileError) as caught:
        parse_workload(f"{TEXT}{line}\n", source="here.yaml")
    assert caught.value.message.startswith(message)
    shown = caught.value.message.splitlines()
    assert shown[1].startswith("  here.yaml:")
    if marked:
        assert shown[3].endswith(f"| {line}")
        begin = shown[4].index("^")
        assert shown[3][begin : begin + shown[4].count("^")] == marked


@pytest.mark.parametrize(
    ("line", "key", "nearest"),
    [("user: 3", "user", "users"), ("schedule: {intervall_s: 3}", "schedule.intervall_s", "interval_s")],
)
def test_an_unknown_key_is_told_the_nearest_right_one(line, key, nearest):
    with pytest.raises(ProfileError, match=f"unknown key `{key}`") as caught:
        parse_workload(f"{TEXT}{line}\n", source="here")
    assert caught.value.hint == f"did you mean `{nearest}`?"


@pytest.mark.parametrize(("text", "key"), [(TEXT.replace("turns: 2\n", ""), "turns"), ("", "name"), ("# no\n", "name")])
def test_a_missing_key_is_named_and_the_hint_has_all_that_are_needed(text, key):
    with pytest.raises(ProfileError, match=f"^`{key}`.* missing\n  here") as caught:
        parse_workload(text, source="here")
    assert "`name`, `users`, `turns`, `system_tokens`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"), [("- 1\n", "a workload must be a mapping of keys"), ("name: [\n", "not valid YAML")]
)
def test_what_is_no_mapping_is_refused_once(text, message):
    with pytest.raises(ProfileError, match=message) as caught:
        parse_workload(text, source="here")
    assert "unicode" not in caught.value.message
    assert caught.value.__cause__ is None


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="not UTF-8"):
        load_workload(str(tmp_path / "binary.yaml"))


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_every_key_is_described_in_sentences(key):
    assert key.description.endswith(".")


def test_the_example_of_the_guide_is_a_workload():
    example = GUIDE.read_text().split("```yaml\n")[1].split("```")[0]
    assert parse_workload(example, source="mine.yaml").name == "mine"


def test_a_workload_cannot_be_changed():
    workload = parse_workload(TEXT, source="here")
    with pytest.raises(ValueError, match="frozen"):
        workload.users = 4
    assert isinstance(workload, Workload)
