"""The identity of an engine of the tests, because no file of a model is there."""

from __future__ import annotations

import pytest

from kvbm.sglang_integration import storage
from kvbm.sglang_integration.identity import part_of


@pytest.fixture
def identity(monkeypatch):
    """What the real identity describes; a test may change it before it opens a storage."""
    facts = {"engine": "sglang", "weights": "a"}

    def identity(config, pool, *, zero_copy):
        return {**facts, "pool": pool, "zero_copy": zero_copy, "part": part_of(config)}, ""

    monkeypatch.setattr(storage, "identity", identity)
    monkeypatch.setattr(storage.weight_updates, "watch", lambda listener: "")
    return facts
