"""The identity of an engine of the tests, because no file of a model is there; and modules of other tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from host_pools import pretend_identity

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("vllm", "chaos")]


@pytest.fixture
def identity(monkeypatch):
    """What the real identity describes; a test may change it before it opens a storage."""
    return pretend_identity(monkeypatch)
