"""`kvbm profile new`: what it writes is right whatever was asked for, and it never writes anything else."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terminal import Kvbm, assert_snapshot, kvbm_here, typed, ways

from kvbm.config.document import parse_document, plain_values
from kvbm.config.load import load
from kvbm_cli.profile.text import scalar

NEEDED = ("--engine", "embedded", "--model", "synthetic:tiny", "--host", "1GiB")
WRITTEN = {
    "whole": (*NEEDED, "--port", "auto"),
    "vllm": (
        *("--engine", "vllm", "--model", "org/model", "--disk", "1TB", "--dir", "~/kv"),
        *("--set", "engine.arguments.max-model-len=32k", "--set", "engine.arguments.enforce_eager=true"),
        *("--set", "engine.environment.A=1", "--set", "engine.environment.B='yes: no'"),
    ),
    "extending": ("--extends", "demo", "--host", "64MiB", "--set", "bench.workload=null"),
}


@pytest.mark.parametrize(("name", "way"), ways(WRITTEN))
def test_profile_is_written_and_right(tmp_path: Path, name: str, way: Kvbm) -> None:
    outcome = way("profile", "new", "mine.yaml", *WRITTEN[name], home=tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (0, "mine.yaml\n"), outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert_snapshot(f"profile_new_{name}", (tmp_path / "mine.yaml").read_text())
    checked = way("profile", "check", "mine.yaml", home=tmp_path)
    assert checked.exit_code == 0, checked.stderr


@pytest.mark.parametrize(
    "command", ["profile new below/mine.yaml --host 1GiB", "profile import-env --output below/mine.yaml"]
)
def test_model_given_on_the_command_line_is_relative_to_the_working_directory(tmp_path: Path, command: str) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}'
    )
    options = ("--model", "./model", *(("--engine", "vllm") if "new" in command else ()))
    outcome = kvbm_here(*command.split(), *options, home=tmp_path, DYN_KVBM_CPU_CACHE_GB="1")
    assert outcome.exit_code == 0, outcome.stderr
    assert load(str(tmp_path / "below" / "mine.yaml"), directories=[]).profile.engine.model == f"{tmp_path}/model"


def test_what_a_comment_offers_is_the_default(tmp_path: Path) -> None:
    """Every `#key: value` can be taken as it stands and changes nothing."""
    kvbm_here("profile", "new", "mine.yaml", *NEEDED, "--disk", "1GiB", home=tmp_path)
    head, _, tail = (tmp_path / "mine.yaml").read_text().partition("  #shared:\n")
    text = head + tail[tail.index("\n\n") :]  # this section has no default: its `url` must be given
    (tmp_path / "all.yaml").write_text("".join(_uncommented(line) for line in text.splitlines(keepends=True)))
    before, after = (load(str(tmp_path / name), directories=[]) for name in ("mine.yaml", "all.yaml"))
    assert before.profile == after.profile


def _uncommented(line: str) -> str:
    stripped = line.lstrip(" ")
    offers = stripped.startswith("#") and not stripped.startswith("# ") and "  #" not in stripped
    return line.replace("#", "", 1) if offers else line


def test_a_path_that_is_extended_is_named_from_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "parent.yaml").write_text("extends: demo\n")
    outcome = kvbm_here("profile", "new", "b/child.yaml", "--extends", "a/parent.yaml", home=tmp_path)
    assert outcome.exit_code == 0, outcome.stderr
    assert "extends: ../a/parent.yaml\n" in (tmp_path / "b" / "child.yaml").read_text()


def test_new_profile_extends_several(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("engine: {model: synthetic:tiny}\ntiers: {disk: {capacity: 1GiB}}\n")
    kvbm_here("profile", "new", "both.yaml", "--extends", "storage/s3", "--extends", "./own.yaml", home=tmp_path)
    assert "extends: [storage/s3, ./own.yaml]\n" in (tmp_path / "both.yaml").read_text()


def test_variable_stays_a_variable(tmp_path: Path) -> None:
    arguments = ("--engine", "vllm", "--model", "org/${WHICH}", "--host", "1GiB")
    outcome = kvbm_here("profile", "new", "mine.yaml", *arguments, home=tmp_path, WHICH="small")
    assert outcome.exit_code == 0, outcome.stderr
    assert '  model: "org/${WHICH}"\n' in (tmp_path / "mine.yaml").read_text()


def test_variables_of_kvbm_are_not_written(tmp_path: Path) -> None:
    outcome = kvbm_here("profile", "new", "mine.yaml", *NEEDED, home=tmp_path, DYN_KVBM_CPU_CACHE_GB="7")
    assert outcome.exit_code == 0, outcome.stderr
    assert "capacity: 1GiB" in (tmp_path / "mine.yaml").read_text()


def test_nothing_is_overwritten_without_being_asked_to(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine\n")
    outcome = kvbm_here("profile", "new", "mine.yaml", *NEEDED, home=tmp_path)
    assert (outcome.exit_code, (tmp_path / "mine.yaml").read_text()) == (2, "mine\n")
    outcome = kvbm_here("profile", "new", "mine.yaml", *NEEDED, "--force", home=tmp_path)
    assert (outcome.exit_code, (tmp_path / "mine.yaml").read_text().count("synthetic:tiny")) == (0, 2)


ANSWERS = "embedded\nsynthetic:tinny\nsynthetic:tiny\n\n\n\n12\n1GiB\nrelative\n\n99999\n\n"


def test_questions_are_asked_on_a_terminal(tmp_path: Path) -> None:
    outcome, shown = typed(
        ANSWERS, "profile", "new", "mine.yaml", "--set", "server.host=::1", home=tmp_path, NO_COLOR="1"
    )
    assert outcome == 0, shown
    assert_snapshot("profile_new_questions", shown)
    values = load(str(tmp_path / "mine.yaml"), directories=[]).values
    wanted = {"engine.model": "synthetic:tiny", "tiers.host": None, "tiers.disk.capacity": "1GiB", "server.host": "::1"}
    assert {key: values[key] for key in wanted} == wanted


def test_end_of_the_answers_writes_nothing(tmp_path: Path) -> None:
    exit_code, _ = typed("embedded\n\x04", "profile", "new", "mine.yaml", home=tmp_path)
    assert (exit_code, list(tmp_path.iterdir())) == (130, [])


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)

NUMBERS = st.integers(-(10**29), 10**29) | st.floats(allow_nan=False, allow_infinity=False)


PLAIN = st.one_of(TEXT, st.booleans(), NUMBERS, st.none())
VALUES = st.recursive(PLAIN, lambda inside: st.lists(inside) | st.dictionaries(TEXT, inside), max_leaves=4)


@settings(deadline=None)
@given(VALUES)
def test_every_value_is_read_as_it_was_written(value: object) -> None:
    document, mistakes = parse_document(f"a: {scalar(value)}\nb: [{scalar(value)}]\n", label="f")
    assert mistakes == []
    assert plain_values(document) == {"a": value, "b": [value]}


QUOTED = ["true", "1", "1e5", "null", "~", "", "a: b", "#a", "- a", "a #b", "'", '"', "é", "${A}", "a:"]


@pytest.mark.parametrize("text", QUOTED)
def test_text_that_could_be_something_else_is_quoted(text: str) -> None:
    assert scalar(text).startswith('"')
    assert plain_values(parse_document(f"a: {scalar(text)}\n", label="f")[0]) == {"a": text}


@pytest.mark.parametrize("text", ["synthetic:tiny", "~/models/Qwen3-8B", "Qwen/Qwen3-8B", "32k", "./a.yaml", "64GiB"])
def test_plain_text_is_not_quoted(text: str) -> None:
    assert scalar(text) == text
