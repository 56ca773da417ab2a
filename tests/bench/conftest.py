"""The command as a user sees it; modules of bench/ that tests use are importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbm_cli.app import run

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "bench" / folder) for folder in ("client", "eviction", "micro")]


@pytest.fixture
def kvbm(capsys, monkeypatch):
    """Runs a command line in the root of the repository and returns its exit code, stdout and stderr."""
    monkeypatch.chdir(ROOT)

    def call(*arguments):
        capsys.readouterr()
        code = run([str(one) for one in arguments])
        return (code, *capsys.readouterr())

    return call
