"""Relative paths: those of a file are relative to that file, those of the command line to the working directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbm.config.key_list import keys
from kvbm.config.load import ResolvedProfile
from kvbm.config.relative_paths import PATHS
from kvbm.engines.table import load

HERE = {
    "./m": "DIR/m",
    "../m": "DIR/../m",
    ".": "DIR",
    "..": "DIR/..",
    "org/model": "DIR/org/model",
    "org/absent": "org/absent",
    "absent": "absent",
    "/m": "/m",
    "~/m": "/home/me/m",
    "synthetic:tiny": "synthetic:tiny",
    "${NAME}/m": "DIR/x/m",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is not that of the profile but has the same names."""
    for directory in ("profiles", "work"):
        (tmp_path / directory / "org" / "model").mkdir(parents=True)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def load_with(elsewhere: Path, model: str, rest: str = "", *overrides: str) -> ResolvedProfile:
    (elsewhere / "profiles" / "mine.yaml").write_text(
        f"engine: {{model: {json.dumps(model)}{rest}}}\ntiers: {{host: {{blocks: 1}}}}\n"
    )
    return load("../profiles/mine.yaml", directories=[], variables={"NAME": "./x"}, overrides=overrides)


def test_every_path_is_a_key() -> None:
    assert set(PATHS) <= {key.path for key in keys()}


@pytest.mark.parametrize("model", HERE)
def test_model_of_a_file_is_relative_to_the_file(elsewhere: Path, model: str) -> None:
    found = load_with(elsewhere, model).profile.engine.model
    assert found == HERE[model].replace("DIR", str(elsewhere / "profiles"))


@pytest.mark.parametrize("model", HERE)
def test_model_of_the_command_line_is_relative_to_the_working_directory(elsewhere: Path, model: str) -> None:
    found = load_with(elsewhere, "m", "", f"engine.model={model}").profile.engine.model
    assert found == HERE[model].replace("DIR", str(elsewhere / "work"))


def test_path_of_a_parent_is_relative_to_the_parent(elsewhere: Path) -> None:
    (elsewhere / "parent.yaml").write_text("engine: {model: ./m}\ntiers: {host: {blocks: 1}}\n")
    (elsewhere / "profiles" / "child.yaml").write_text("extends: ../parent.yaml\nbench: {workload: ./w.yaml}\n")
    profile = load(str(elsewhere / "profiles" / "child.yaml"), directories=[]).profile
    assert (profile.engine.model, profile.bench.workload) == (
        f"{elsewhere}/m",
        f"{elsewhere}/profiles/w.yaml",
    )


@pytest.mark.parametrize(
    ("python", "expected"),
    [("python3", "python3"), ("venv/bin/python", "DIR/venv/bin/python"), ("./python", "DIR/python")],
)
def test_interpreter_without_a_slash_is_a_command(elsewhere: Path, python: str, expected: str) -> None:
    found = load_with(elsewhere, "m", f", python: {python}").profile.engine.python
    assert found == expected.replace("DIR", str(elsewhere / "profiles"))


@pytest.mark.parametrize(
    ("workload", "expected"), [("conversations", "conversations"), ("w.yaml", "DIR/w.yaml"), ("a/w", "DIR/a/w")]
)
def test_workload_without_a_slash_or_suffix_is_a_shipped_one(elsewhere: Path, workload: str, expected: str) -> None:
    found = load_with(elsewhere, "m", "", f"bench.workload={workload}").profile.bench.workload
    assert found == expected.replace("DIR", str(elsewhere / "work"))
