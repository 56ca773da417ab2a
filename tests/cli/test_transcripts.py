"""Transcripts in `snapshots/transcripts/`: files, commands and the whole text that each command shows.

Each is followed in this process, and every eighth by the program, too. Mistakes are in test_mistakes.py.
"""

import pytest
from terminal import SNAPSHOTS, assert_transcript, kvbm, kvbm_here, stored_entries

FILES = [f"transcripts/{path.stem}" for path in sorted((SNAPSHOTS / "transcripts").iterdir())]
CASES = [(file, name) for file in FILES for name in stored_entries(file) if name != "files"]


@pytest.mark.parametrize(("file", "name"), CASES)
def test_transcript(file, name, tmp_path):
    assert_transcript(file, name, tmp_path, way=kvbm_here)
    assert not (tmp_path / ".cache").exists(), "a plan makes no model"
    assert not list(tmp_path.glob(".local/state/kvbm/runs/*/")), "nothing was started"


@pytest.mark.parametrize(("file", "name"), CASES[::8])
def test_program_does_the_same(file, name, tmp_path):
    assert_transcript(file, name, tmp_path, way=kvbm)
