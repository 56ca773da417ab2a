"""Workload files: every kind, its limits, and what a mistake shows."""

import re
from pathlib import Path

import pytest
import yaml
from terminal import assert_said, given_in

from kvbm.config.document import parse_document, together
from kvbm.errors import ProfileError, UsageError

# A text is validated here without a file.
from kvbm_cli.bench.workload.files import _validated, load_workload, shipped_workloads, workload_keys
from kvbm_cli.bench.workload.schema import KINDS, Conversations, Workload, as_definition
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.profile.size import size_of

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
DATA = Path(__file__).with_name("data")
SMALLEST, LARGE = (yaml.safe_load((DATA / f"{name}-workloads.yaml").read_text()) for name in ("smallest", "large"))


def document(kind: str, **changes: object) -> str:
    return yaml.safe_dump({"name": "one", "kind": kind, **SMALLEST[kind], **changes}, sort_keys=False)


def parse_workload(text: str, *, source: str) -> Workload:
    found, mistakes = parse_document(text, label=source, noun="workload")
    if mistakes:
        raise together(mistakes)
    return _validated(found, Path(source))


def parsed(kind: str, **changes: object) -> Workload:
    return parse_workload(document(kind, **changes), source="here.yaml")


def test_every_kind_has_a_smallest_workload_here():
    assert list(SMALLEST) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_workload_of_a_kind_is_valid_and_described_by_its_definition(kind):
    workload = parsed(kind)
    assert type(workload) is KINDS[kind]
    definition = as_definition(workload)
    assert definition["kind"] == kind
    given = {name: value for name, value in definition.items() if value is not None}
    assert KINDS[kind].model_validate(given) == workload


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in SMALLEST.items() for key in keys], ids=lambda value: value
)
def test_every_required_key_is_missed_by_name(kind, key):
    content = {"name": "one", "kind": kind, **{name: value for name, value in SMALLEST[kind].items() if name != key}}
    with pytest.raises(ProfileError, match=f"^`{key}`.* missing\n  here") as caught:
        parse_workload(yaml.safe_dump(content), source="here")
    assert f"a workload of kind `{kind}` requires `name`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (kind, key)
        for kind, keys in SMALLEST.items()
        for key, value in keys.items()
        if isinstance(value, int) and key != "context_tokens"
    ],
    ids=lambda value: value,
)
def test_a_number_below_the_limit_shows_the_limit_and_the_line(kind, key):
    least = SMALLEST[kind][key]
    with pytest.raises(ProfileError) as caught:
        parsed(kind, **{key: least - 1})
    message = caught.value.message
    assert f"`{key}` must be at least {least}, not `{least - 1}`" in message
    line = 1 + next(number for number, text in enumerate(document(kind).splitlines()) if text.startswith(f"{key}:"))
    assert f"  here.yaml:{line}:" in message


@pytest.mark.parametrize("name", given_in("bench/workloads"))
def test_a_wrong_file_is_refused_with_the_place(tmp_path, name):
    assert_said("bench/workloads", name, refused(tmp_path, given_in("bench/workloads")[name].encode()))


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\x00", "it is UTF-16 text"), (b"a: " + b"[" * 5000, "nested too deeply")]
)
def test_a_file_that_is_no_text_or_too_deep_is_refused(tmp_path, content, message):
    assert message in refused(tmp_path, content)


def refused(directory: Path, content: bytes) -> str:
    (directory / "here.yaml").write_bytes(content)
    with pytest.raises(ProfileError) as caught:
        load_workload(str(directory / "here.yaml"))
    return f"{caught.value.message}\nhint: {caught.value.hint}".replace(f"{directory}/", "")


def test_a_name_that_is_none_lists_the_shipped_ones():
    with pytest.raises(UsageError, match="no workload and no file is named `nonsense`") as caught:
        load_workload("nonsense")
    assert "conversations" in (caught.value.hint or "")


@pytest.mark.parametrize("slo", ["ttft:500", "ttft:500,tpot:50.5", "e2e:1,ttft:2,tpot:3"])
def test_limits_of_a_good_request_are_accepted(slo):
    assert parsed("unique", slo=slo).slo == slo


def test_a_file_without_a_kind_is_of_conversations():
    assert isinstance(parse_workload(TEXT, source="here"), Conversations)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.7, 40.0])
@pytest.mark.parametrize("kind", LARGE)
def test_a_scaled_workload_has_about_the_working_set(kind, factor):
    workload = parsed(kind, **LARGE[kind])
    wanted = round(20_000 * factor)
    scaled = workload.scaled(wanted)
    assert scaled.working_set_tokens == pytest.approx(wanted, rel=0.1)
    changed = {name for name in type(workload).model_fields if getattr(scaled, name) != getattr(workload, name)}
    assert changed == {workload.scale_key}


def test_kinds_without_a_number_to_scale_say_so():
    assert {kind for kind in KINDS if KINDS[kind].scale_key is None} == {"unique", "trace", "lmbenchmark"}


@pytest.mark.parametrize("kind", LARGE)
def test_a_scaled_workload_is_still_valid(kind):
    """A rag of few documents must not ask for more than there are."""
    scaled = parsed(kind, **LARGE[kind]).scaled(1)
    assert KINDS[kind].model_validate(scaled.model_dump()) == scaled


@pytest.mark.parametrize("name", shipped_workloads())
def test_every_shipped_workload_is_valid_and_named_after_its_file(name):
    assert load_workload(name).name == name


def test_the_shipped_demo_keeps_its_promises():
    """Six users of four turns, long prompts, room for two conversations in G1 and not for all, room for all in G2."""
    resolved = resolve("demo")
    workload = load_workload(resolved.profile.bench.workload or "")
    sizing = size_of(resolved)
    assert workload.users >= 6
    assert workload.turns >= 4
    assert workload.prompt_tokens(1) >= 1500
    assert sizing.device.token_count >= 2 * workload.conversation_tokens
    assert sizing.device.token_count < 0.6 * workload.working_set_tokens
    assert sizing.host.token_count > workload.working_set_tokens
    assert resolved.profile.engine.arguments.prefix_caching
    assert resolved.profile.engine.arguments.dtype == "float32"


def test_lengths_grow_by_question_and_answer():
    workload = parse_workload(TEXT, source="here")
    assert isinstance(workload, Conversations)
    assert [workload.prompt_tokens(turn) for turn in (1, 2)] == [115, 127]
    assert workload.conversation_tokens == 134
    assert workload.working_set_tokens == 10 + 3 * 124


def test_a_file_of_ones_own_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    assert load_workload(str(path)).users == 3


def test_a_file_that_a_workload_names_is_relative_to_its_own(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "w.yaml").write_text(document("trace", file="data/t.jsonl"))
    monkeypatch.chdir(tmp_path)
    assert load_workload("inner/w.yaml").file == str(tmp_path / "inner" / "data" / "t.jsonl")


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind in KINDS for key in workload_keys(kind)], ids=lambda one: str(one)[:40]
)
def test_every_key_is_described_in_sentences(kind, key):
    assert re.search(r"\.$", key.description), f"{kind}: {key.path}"


def test_the_example_of_the_guide_is_a_workload():
    example = GUIDE.read_text().split("```yaml\n")[1].split("```")[0]
    assert parse_workload(example, source="mine.yaml").name == "mine"


@pytest.mark.parametrize(
    "name", ["../up", "/abs", "..", ".", "a/b", "a\nb", "-rf", " a", "</script>", "\x1b[31m", "€", "ü" * 41]
)
def test_a_name_that_is_no_safe_directory_is_refused(name):
    with pytest.raises(ValueError, match="letters, digits, spaces"):
        Conversations(**SMALLEST["conversations"], name=name)


@pytest.mark.parametrize("name", ["a", "long-x1.2", "a b_c+1.5", "größe", "日本"])
def test_a_name_may_have_letters_of_any_language(name):
    assert Conversations(**SMALLEST["conversations"], name=name).name == name


@pytest.mark.parametrize("slo", ["ttft:0", "ttft:5,ttft:6", "ttft:5,tpot:0.0"])
def test_limits_that_cannot_be_met_or_appear_twice_are_refused_before_the_measurement(slo):
    with pytest.raises(ValueError, match="each limit once, and above 0 ms"):
        Conversations(**SMALLEST["conversations"], name="a", slo=slo)
