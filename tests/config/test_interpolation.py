"""`${NAME}`: where it is read, what it becomes, and everything that it can get wrong."""

from pathlib import Path

import pytest

from kvbm.config.key_list import keys
from kvbm.config.load import ResolvedProfile
from kvbm.config.schema import INTERPOLATED
from kvbm.engines.table import load
from kvbm.errors import ProfileError

ENVIRONMENT = {"NAME": "value", "EMPTY": "", "DOLLARS": "${NAME}"}
WHERE_IT_IS_READ = (
    "variables are replaced in `engine.model`, `engine.python`, `engine.environment`, `tiers.disk.directory`, "
    "`tiers.shared.url`, `tiers.shared.key_file`, `metrics.record_directory`, `bench.workload`; "
    "write `$${` for the text `${`"
)
BROKEN = "a default has no `$`, `{` or `}`, so variables cannot be nested; write `$${` for the text `${`"


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


MISTAKES = {
    "variable that is not set": (
        "'x-${ABSENT}'",
        "",
        "`engine.model` refers to the variable `ABSENT`, which is not set\n"
        "  FILE:1:20\n    |\n  1 | engine: {model: 'x-${ABSENT}'}\n    |                    ^^^^^^^^^",
        "`export ABSENT=...`, or write `${ABSENT:-default}`",
    ),
    "form that is none": (
        "'${NAME:?no}'",
        "",
        "`engine.model`: `${NAME:?no}` is neither `${NAME}` nor `${NAME:-default}`\n"
        "  FILE:1:18\n    |\n  1 | engine: {model: '${NAME:?no}'}\n    |                  ^^^^^^^^^^^",
        BROKEN,
    ),
    "bracket that is open": (
        "'${NAME'",
        "",
        "`engine.model`: `${NAME` is neither `${NAME}` nor `${NAME:-default}`\n"
        "  FILE:1:18\n    |\n  1 | engine: {model: '${NAME'}\n    |                  ^^^^^^",
        BROKEN,
    ),
    "default that is a variable": (
        "'${ABSENT:-${NAME}}/b'",
        "",
        "`engine.model`: `${ABSENT:-${NAME}}` is neither `${NAME}` nor `${NAME:-default}`\n"
        "  FILE:1:18\n    |\n  1 | engine: {model: '${ABSENT:-${NAME}}/b'}\n    |                  ^^^^^^^^^^^^^^^^^^",
        BROKEN,
    ),
    "default that is a variable, of a variable that is set": (
        "'${NAME:-${ABSENT}}'",
        "",
        "`engine.model`: `${NAME:-${ABSENT}}` is neither `${NAME}` nor `${NAME:-default}`\n"
        "  FILE:1:18\n    |\n  1 | engine: {model: '${NAME:-${ABSENT}}'}\n    |                  ^^^^^^^^^^^^^^^^^^",
        BROKEN,
    ),
    "name that is a variable": (
        "'${${NAME}}'",
        "",
        "`engine.model`: `${${NAME}}` is neither `${NAME}` nor `${NAME:-default}`\n"
        "  FILE:1:18\n    |\n  1 | engine: {model: '${${NAME}}'}\n    |                  ^^^^^^^^^^",
        BROKEN,
    ),
    "nested and open": (
        "'${NAME:-${NAME}'",
        "",
        "`engine.model`: `${NAME:-${NAME}` is neither `${NAME}` nor `${NAME:-default}`\n"
        "  FILE:1:18\n    |\n  1 | engine: {model: '${NAME:-${NAME}'}\n    |                  ^^^^^^^^^^^^^^^",
        BROKEN,
    ),
    "default with a bracket": (
        "'${NAME:-{a}}'",
        "",
        "`engine.model`: `${NAME:-{a}}` is neither `${NAME}` nor `${NAME:-default}`\n"
        "  FILE:1:18\n    |\n  1 | engine: {model: '${NAME:-{a}}'}\n    |                  ^^^^^^^^^^^^",
        BROKEN,
    ),
    "default with a dollar sign": (
        "'${NAME:-$$}'",
        "",
        "`engine.model`: `${NAME:-$$}` is neither `${NAME}` nor `${NAME:-default}`\n"
        "  FILE:1:18\n    |\n  1 | engine: {model: '${NAME:-$$}'}\n    |                  ^^^^^^^^^^^",
        BROKEN,
    ),
    "nested in a key that reads none": (
        "m",
        "server: {host: '${NAME:-${A}}'}\n",
        "`server.host` does not support variables: `${NAME:-${A}}`\n"
        "  FILE:3:17\n    |\n  3 | server: {host: '${NAME:-${A}}'}\n    |                 ^^^^^^^^^^^^^",
        WHERE_IT_IS_READ,
    ),
    "variable without brackets": (
        "$NAME/model",
        "",
        "`engine.model`: `$NAME` would not be replaced\n"
        "  FILE:1:17\n    |\n  1 | engine: {model: $NAME/model}\n    |                 ^^^^^",
        "write `${NAME}` for the variable, or `$$NAME` for the text `$NAME`",
    ),
    "key that reads none": (
        "m",
        "server: {host: '${NAME}'}\n",
        "`server.host` does not support variables: `${NAME}`\n"
        "  FILE:3:17\n    |\n  3 | server: {host: '${NAME}'}\n    |                 ^^^^^^^",
        WHERE_IT_IS_READ,
    ),
    "number": (
        "m",
        "server: {port: '${NAME}'}\n",
        "`server.port` does not support variables: `${NAME}`\n"
        "  FILE:3:17\n    |\n  3 | server: {port: '${NAME}'}\n    |                 ^^^^^^^",
        WHERE_IT_IS_READ,
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(tmp_path: Path, name: str) -> None:
    model, rest, message, hint = MISTAKES[name]
    with pytest.raises(ProfileError) as caught:
        load_model(tmp_path, model, rest)
    assert (caught.value.message.replace(f"{tmp_path}/mine.yaml", "FILE"), caught.value.hint) == (message, hint)


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
