"""The command as a user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm_cli.app import run


@pytest.fixture
def kvbm(capsys, monkeypatch):
    """Runs a command line in the root of the repository and returns its exit code, stdout and stderr."""
    monkeypatch.chdir(Path(__file__).parents[2])

    def call(*arguments):
        capsys.readouterr()
        code = run([str(one) for one in arguments])
        return (code, *capsys.readouterr())

    return call
