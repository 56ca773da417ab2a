"""Opening the lower tiers: in parallel, and later than the engine if what names their blocks is known later."""

from __future__ import annotations

import os
import signal
import time
import types
from concurrent.futures import Future

import pytest
from waiting import eventually

from kvbm.child import deadlines, service
from kvbm.config.schema import ConnectorConfig
from kvbm.engines import opening
from kvbm.engines.opening import EngineAtStart, namespace_of, open_storage_leader, open_tiers
from kvbm.errors import EnvironmentProblem
from kvbm.host.layout import BlockLayout
from kvbm.host.segment import Segment
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks, LeaderSettings

LIMIT_S = 20.0
FACTS = {"engine": "e", "model": "m"}


@pytest.fixture
def segments():
    segment = Segment.create(rank=0, layout=BlockLayout.block_contiguous(block_count=1, block_bytes=8192), slot_count=8)
    yield [segment.info]
    segment.close()


def opened(tmp_path, segments, *names, identity, space=types.MappingProxyType({"blocks": 8})):
    """The disk and the shared tier, those of them that are in `names`."""
    tiers = {
        "host": {"blocks": 8},
        "disk": {**space, "directory": str(tmp_path / "disk")},
        "shared": {"url": f"file://{tmp_path}/store", "protection": "none"},
    }
    config = ConnectorConfig.model_validate({"tiers": {name: tiers[name] for name in ("host", *names)}})
    engine = EngineAtStart(segments, EngineTraits(16), 8, lambda: identity)
    begun = open_tiers(config, engine, LeaderSettings.of(config, segments, engine.traits, g1_blocks=8))
    return [tier for tier, _ in begun]


@pytest.mark.parametrize("doubt", ["", "why"])
def test_the_disk_opens_when_the_identity_is_known(tmp_path, segments, doubt, caplog):
    identity: Future = Future()
    (disk,) = opened(tmp_path, segments, "disk", identity=identity)
    disk.poll()
    assert (disk.is_on, disk.is_unnamed, disk.is_silent) == (False, True, False)
    identity.set_result((FACTS, doubt))
    assert not disk.is_unnamed
    eventually(lambda: disk.poll() or disk.is_on)
    assert not disk.is_silent
    name = namespace_of(segments, (FACTS, ""))[0].digest.hex()
    assert (tmp_path / "disk" / name).exists() == (doubt == "")
    assert disk._named.result()[0].persist == (not doubt)
    assert ("will not stay on disk" in caplog.text) == bool(doubt)
    disk.close(1.0)


@pytest.mark.parametrize("doubt", ["", "why"])
def test_the_shared_tier_opens_when_the_identity_is_known_and_not_in_doubt(tmp_path, segments, doubt, caplog):
    identity: Future = Future()
    (shared,) = opened(tmp_path, segments, "shared", identity=identity)
    shared.poll()
    assert not shared.is_on
    identity.set_result((FACTS, doubt))
    if doubt:
        shared._thread.join(LIMIT_S)
        shared.poll()
        assert not shared.is_on
        assert "does not use the shared tier: why" in caplog.text
    else:
        eventually(lambda: shared.poll() or shared.is_on)
    shared.close(1.0)


@pytest.fixture
def children(monkeypatch):
    """The child processes that were started; stopped from their start if `children.are_stopped`."""

    class Children(list):
        are_stopped = False

    found = Children()

    def start(module, what):
        child, channel = start_child(module, what)
        found.append(child)
        if found.are_stopped:
            os.kill(child.pid, signal.SIGSTOP)
        return child, channel

    start_child = service.start_child
    monkeypatch.setattr(service, "start_child", start)
    return found


def identified():
    identity: Future = Future()
    identity.set_result((FACTS, ""))
    return identity


def test_two_tiers_that_hang_delay_a_start_as_long_as_one(tmp_path, segments, children, monkeypatch, caplog):
    limit_s, children.are_stopped = 2.0, True
    monkeypatch.setattr(deadlines, "START_LIMIT_S", limit_s)
    began_s = time.monotonic()
    disk, shared = opened(tmp_path, segments, "disk", "shared", identity=identified())
    assert time.monotonic() - began_s < 1.8 * limit_s
    assert caplog.text.count("does not answer: starting without the") == 2
    assert (disk.is_on, shared.is_on) == (False, False)
    assert (disk.is_silent, shared.is_silent) == (True, True)
    for child in children:
        os.kill(child.pid, signal.SIGCONT)
    eventually(lambda: disk.poll() or shared.poll() or (disk.is_on and shared.is_on))
    assert (disk.is_silent, shared.is_silent) == (False, False)
    disk.close(1.0)
    shared.close(1.0)


STATES = {  # path, of which tier; NAME is that of the namespace
    "the directory": ("disk", "disk"),
    "a namespace": ("disk/NAME", "disk"),
    "the directory of the store": ("store", "shared"),
    "the version in the store": ("store/v1", "shared"),
    "a namespace in the store": ("store/v1/NAME", "shared"),
}


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("place", STATES)
def test_an_engine_starts_without_a_tier_whose_directory_is_something_else(
    tmp_path, segments, children, monkeypatch, caplog, place, kind
):
    """The other tier is used, and this one when the directory can be used. Nothing is created through a link."""
    monkeypatch.setattr(deadlines, "FIRST_PAUSE_S", 0.05)
    name, wrong = STATES[place]
    path = tmp_path / name.replace("NAME", namespace_of(segments, (FACTS, ""))[0].digest.hex())
    if path == tmp_path / "store" and kind == "link":
        pytest.skip("the directory of a store may be a link")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.symlink_to(elsewhere) if kind == "link" else path.touch()
    tiers = dict(
        zip(["disk", "shared"], opened(tmp_path, segments, "disk", "shared", identity=identified()), strict=True)
    )
    failing = tiers.pop(wrong)
    (working,) = tiers.values()
    eventually(lambda: working.poll() or working.is_on)
    eventually(lambda: len(children) > 3)  # opened in vain more than once
    failing.poll()
    assert not failing.is_on
    assert caplog.text.count(f"the {wrong} tier is off until it can be opened") == 1
    assert list(elsewhere.iterdir()) == []
    path.unlink()
    eventually(lambda: failing.poll() or failing.is_on)
    for tier in (working, failing):
        tier.close(1.0)


def test_no_process_remains_if_a_setting_of_one_of_the_tiers_is_wrong(tmp_path, segments, children):
    with pytest.raises(EnvironmentProblem, match="smaller than one block"):
        opened(tmp_path, segments, "disk", "shared", identity=identified(), space={"capacity": "4096B"})
    assert len(children) == 2
    eventually(lambda: all(child.poll() is not None for child in children))


def test_no_process_remains_if_the_leader_cannot_be_created(tmp_path, segments, children, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(opening, "SharedTier", fail)
    disk = {"blocks": 8, "directory": str(tmp_path / "disk")}
    shared = {"url": f"file://{tmp_path}/store", "protection": "none"}
    config = ConnectorConfig.model_validate({"tiers": {"host": {"blocks": 8}, "disk": disk, "shared": shared}})
    with pytest.raises(MemoryError) as raised:  # its traceback would keep the channels open
        open_storage_leader(config, EngineAtStart(segments, EngineTraits(16), 8, identified), LeaderCallbacks(len, len))
    assert len(children) == 2
    assert all(child.poll() is not None for child in children), raised
