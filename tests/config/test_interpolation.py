"""`${NAME}`: where it is read, and what it becomes. Mistakes: test_profile_mistakes.py."""

from pathlib import Path

import pytest

from kvbm.config.key_list import keys
from kvbm.config.load import ResolvedProfile
from kvbm.config.schema import INTERPOLATED
from kvbm.engines.table import load
from kvbm.errors import ProfileError

ENVIRONMENT = {"NAME": "value", "EMPTY": "", "DOLLARS": "${NAME}"}


def load_model(directory: Path, model: str, rest: str = "") -> ResolvedProfile:
    path = directory / "mine.yaml"
    path.write_text(f"engine: {{model: {model}}}\ntiers: {{host: {{blocks: 1}}}}\n{rest}")
    return load(str(path), directories=[], variables=ENVIRONMENT)


TEXTS = {
    "${NAME}": "value",
    "a-${NAME}/${NAME}-b": "a-value/value-b",
    "x${EMPTY}": "x",
    "${NAME:-other}": "value",
    "${EMPTY:-other}": "other",
    "${ABSENT:-other}": "other",
    "${ABSENT:-/a:b c}": "/a:b c",
    "${ABSENT:-}x": "x",
    "${DOLLARS}": "${NAME}",
    "$${NAME}": "${NAME}",
    "$$NAME": "$NAME",
    "$$${NAME}": "$value",
    "costs 5$": "costs 5$",
    "$1": "$1",
    "$$": "$",
}


@pytest.mark.parametrize("text", TEXTS)
def test_variable_becomes_its_value(tmp_path: Path, text: str) -> None:
    assert load_model(tmp_path, f"'{text}'").profile.engine.model == TEXTS[text]


def test_origin_names_the_variables(tmp_path: Path) -> None:
    resolved = load_model(tmp_path, "'${NAME}${EMPTY}${NAME}'")
    assert resolved.origins["engine.model"] == f"{tmp_path}/mine.yaml:1 ${{NAME}} ${{EMPTY}}"


def test_every_declared_key_is_one_and_is_read(tmp_path: Path) -> None:
    assert set(INTERPOLATED) <= {key.path for key in keys()}
    path = tmp_path / "mine.yaml"
    path.write_text(
        "engine: {model: '${NAME}', python: '${NAME}', environment: {A: '${NAME}'}}\n"
        "tiers: {disk: {blocks: 1, directory: '/${NAME}'}, shared: {url: 's3://${NAME}', key_file: '/${NAME}'}}\n"
        "bench: {workload: '${NAME}'}\n"
        "metrics: {record_directory: '~/${NAME}'}\n"
    )
    values = load(str(path), directories=[], variables=ENVIRONMENT).values
    read = [key.replace("environment", "environment.A") for key in INTERPOLATED]
    assert [values[key] for key in read] == [
        "value",
        "value",
        "value",
        "/value",
        "s3://value",
        "/value",
        "~/value",
        "value",
    ]


def test_a_value_that_is_replaced_needs_no_variable(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("engine: {model: '${ABSENT}'}\ntiers: {host: {blocks: 1}}\n")
    resolved = load(str(tmp_path / "mine.yaml"), directories=[], overrides=["engine.model=m"])
    assert resolved.profile.engine.model == "m"


def test_override_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("engine: {model: m}\ntiers: {host: {blocks: 1}}\n")
    overrides = ["engine.model=${NAME}"]
    resolved = load(str(tmp_path / "mine.yaml"), directories=[], variables=ENVIRONMENT, overrides=overrides)
    assert (resolved.profile.engine.model, resolved.origins["engine.model"]) == ("value", "--set ${NAME}")


def test_text_in_a_list_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "engine: {kind: vllm, model: m, arguments: {served_model_name: [a, '${NAME}'], "
        "hf_overrides: {b: [c, {d: '$${NAME}'}]}}}\ntiers: {host: {blocks: 1}}\n"
    )
    with pytest.raises(ProfileError, match=r"`engine\.arguments\.served_model_name` does not support variables"):
        load(str(path), directories=[], variables=ENVIRONMENT)
    path.write_text(path.read_text().replace("'${", "'$${"))
    arguments = load(str(path), directories=[], variables=ENVIRONMENT).profile.engine.arguments
    assert arguments.served_model_name == ["a", "${NAME}"]
    assert arguments.hf_overrides == {"b": ["c", {"d": "${NAME}"}]}
