from __future__ import annotations

import pytest

from kvbm.errors import ProfileError, UsageError
from kvbm_cli.bench.workload import Workload, load_workload, parse_workload, shipped_workloads

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
    with pytest.raises(UsageError, match="no workload named nonsense") as caught:
        load_workload("nonsense")
    assert "conversations" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("user: 3", "here: unknown key user"),
        ("users: 0", "users = 0: input should be greater than or equal to 1"),
        ("users: '3'", "users = '3': input should be a valid integer"),
        ("schedule: {interval: 3}", "unknown key schedule.interval"),
        ("schedule: {target_utilisation: 1.5}", "schedule.target_utilisation = 1.5"),
        ("history: live", "history = 'live'"),
    ],
)
def test_a_mistake_names_key_and_value(line, message):
    with pytest.raises(ProfileError, match="here") as caught:
        parse_workload(f"{TEXT}{line}\n", source="here")
    assert message in caught.value.message


def test_a_missing_key_is_named():
    with pytest.raises(ProfileError, match="turns is missing"):
        parse_workload(TEXT.replace("turns: 2\n", ""), source="here")


@pytest.mark.parametrize("text", ["", "- 1\n", "name: [\n"])
def test_what_is_no_mapping_is_refused(text):
    with pytest.raises(ProfileError, match="here"):
        parse_workload(text, source="here")


def test_a_workload_cannot_be_changed():
    workload = parse_workload(TEXT, source="here")
    with pytest.raises(ValueError, match="frozen"):
        workload.users = 4
    assert isinstance(workload, Workload)
