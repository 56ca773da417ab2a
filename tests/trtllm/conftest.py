"""A model for tests of what outlives an engine."""

import time

import pytest

from kvbm.identity import loading

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model whose files are older than this process."""
    monkeypatch.setattr(loading, "process_start_ns", lambda: time.time_ns() + HOUR_NS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(directory)
