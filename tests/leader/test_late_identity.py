"""Tiers of an engine whose identity is known later: the start does not wait, and a doubt counts."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from kvbm.config.schema import ConnectorConfig
from kvbm.host.layout import BlockLayout
from kvbm.host.segment import Segment
from kvbm.leader.namespace import namespace_of
from kvbm.leader.settings import EngineTraits, LeaderSettings, open_disk, open_shared

LIMIT_S = 20.0
FACTS = {"engine": "e", "model": "m"}


@pytest.fixture
def segments():
    segment = Segment.create(rank=0, layout=BlockLayout.block_contiguous(block_count=1, block_bytes=8192), slot_count=8)
    yield [segment.info]
    segment.close()


def config(tmp_path):
    tiers = {
        "host": {"blocks": 8},
        "disk": {"blocks": 8, "directory": str(tmp_path / "disk")},
        "shared": {"url": f"file://{tmp_path}/store", "protection": "none"},
    }
    return ConnectorConfig.model_validate({"tiers": tiers})


def until(is_so):
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("doubt", ["", "why"])
def test_the_disk_opens_when_the_identity_is_known(tmp_path, segments, doubt, caplog):
    identity: Future = Future()
    disk = open_disk(config(tmp_path), segments, identity=identity, hash_bytes=16)
    assert disk is not None
    disk.poll()
    assert not disk.is_on
    identity.set_result((FACTS, doubt))
    until(lambda: disk.poll() or disk.is_on)
    name = namespace_of(segments, (FACTS, ""))[0].digest.hex()
    assert (tmp_path / "disk" / name).exists() == (doubt == "")
    assert (disk.home is None) == bool(doubt)
    assert ("will not stay on disk" in caplog.text) == bool(doubt)
    disk.close(1.0)


@pytest.mark.parametrize("doubt", ["", "why"])
def test_the_shared_tier_opens_when_the_identity_is_known_and_not_in_doubt(tmp_path, segments, doubt, caplog):
    identity: Future = Future()
    settings = LeaderSettings.of(config(tmp_path), segments, EngineTraits(16), g1_blocks=8)
    shared = open_shared(config(tmp_path), segments, settings, identity=identity)
    assert shared is not None
    shared.poll()
    assert not shared.is_on
    identity.set_result((FACTS, doubt))
    if doubt:
        shared._thread.join(LIMIT_S)
        shared.poll()
        assert not shared.is_on
        assert "does not use the shared tier: why" in caplog.text
    else:
        until(lambda: shared.poll() or shared.is_on)
    shared.close(1.0)
