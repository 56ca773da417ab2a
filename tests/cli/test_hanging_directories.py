"""Commands on a directory whose file system hangs: they say so after a deadline. A child that sleeps plays that."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvbm.errors import EnvironmentProblem
from kvbm_cli.app import run
from kvbm_cli.cache import list_caches
from kvbm_cli.profile import machine_problems, preflight
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.store.selection import StoreRequest, opened
from kvbm_cli.system import answering

LIMIT_S = 5.0


@pytest.fixture
def hanging(monkeypatch):
    monkeypatch.setattr(answering, "LOOK", "import time; time.sleep(600)")
    monkeypatch.setattr(answering, "ANSWER_LIMIT_S", 0.2)
    monkeypatch.setattr(answering, "_silent", {})


def test_a_directory_that_answers_is_used_whatever_is_in_it(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert answering.answers(tmp_path)
    assert answering.answers(tmp_path / "missing")


def test_cache_ls_names_a_directory_that_hangs(hanging, tmp_path):
    began_s = time.monotonic()
    with pytest.raises(EnvironmentProblem, match=f"{tmp_path} does not answer within"):
        list_caches(tmp_path, None, as_json=False)
    assert time.monotonic() - began_s < LIMIT_S


@pytest.mark.parametrize("command", ["ls", "verify", "clear", "export-stats"])
def test_nothing_touches_a_path_of_the_command_line_before_its_file_system_has_answered(
    command, hanging, monkeypatch, tmp_path, capsys
):
    touched, stat = [], os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, *rest, **named: touched.append(str(path)) or stat(path, *rest, **named)
    )
    assert run(["cache", command, "--dir", str(tmp_path)]) == 1
    assert "does not answer within" in capsys.readouterr().err
    assert str(tmp_path) not in touched


def test_a_store_that_hangs_is_named(hanging, tmp_path):
    with pytest.raises(EnvironmentProblem, match=f"{tmp_path} does not answer within"):
        opened(StoreRequest(f"file://{tmp_path}"))


def test_an_engine_may_start_although_its_directory_hangs(hanging, tmp_path):
    file = tmp_path / "profile.yaml"
    disk = f"{{directory: {tmp_path}/disk, blocks: 10}}"
    file.write_text(
        f"engine: {{kind: embedded, model: 'synthetic:tiny'}}\ntiers: {{host: {{blocks: 8}}, disk: {disk}}}\n"
    )
    resolved = resolve(str(file))
    sizing, mistakes = preflight.examine_here(resolved)
    assert not mistakes
    (problem,) = machine_problems._disk(resolved, sizing)
    assert problem.is_risk
    assert "does not answer within" in problem.error.message


def test_a_directory_that_did_not_answer_is_not_asked_again_by_the_same_command(hanging, monkeypatch):
    assert not answering.answers(Path("/tmp"))
    monkeypatch.setattr(answering, "ANSWER_LIMIT_S", 60.0)
    began_s = time.monotonic()
    assert not answering.answers(Path("/tmp"))
    assert time.monotonic() - began_s < LIMIT_S
