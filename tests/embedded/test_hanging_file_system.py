"""A file system that hangs below the disk and the shared tier: at the start, under load, and at the end of an engine.

Needs /dev/fuse and libfuse. The leader's part of this runs in every test run, with a manual clock
(tests/leader/test_hanging_tiers.py). Each test prints what it has measured; with KVBM_WRITE_RESULTS=1 it is written to
bench/results/.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from filesystems import Unavailable, mounted
from kvbm_engine import KvbmEngine, assert_same, prompt, running

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

LENGTH = 400  # tokens: 25 blocks, of which an object holds 16
PROMPTS = 8
HANGS_S = 30.0
LONGEST_WAIT_S = 2.5  # beyond the time of the slowest request without the fault
LONGEST_START_S = LONGEST_STOP_S = 10.0  # beyond those of an engine without lower tiers
STOPPED = "stopped"
TIERS = ["disk", "shared", "disk and shared"]
MACHINE = f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"
RESULT = Path(__file__).parents[2] / "bench" / "results" / f"{MACHINE}-hanging-file-system.json"


def daemon_of(point: Path) -> int:
    """Return the process of the FUSE file system at a mount point."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if str(point).encode() in words and any(word.endswith(b"lying_filesystem.py") for word in words):
                return int(entry.name)
    raise AssertionError(f"no process serves {point}")


class Rig:
    """A FUSE file system that hangs on request, and engines with their tiers on it."""

    def __init__(self, point: Path, tiers: str) -> None:
        self.point, self.tiers = point, tiers
        self._orders = point.parent / "orders"
        self._daemon = daemon_of(point)
        (point / "shared").mkdir()

    def order(self, what: str) -> None:
        """Let the file system do this. With "stopped" its daemon is stopped, and takes no request at all."""
        os.kill(self._daemon, signal.SIGSTOP if what == STOPPED else signal.SIGCONT)
        self._orders.write_text("" if what == STOPPED else what)

    def engine(self) -> KvbmEngine:
        disk = {"directory": str(self.point / "disk"), "blocks": 300, "zerofill": True}
        shared = {"url": f"file://{self.point}/shared"}
        return KvbmEngine(
            disk=disk if "disk" in self.tiers else None,
            shared=shared if "shared" in self.tiers else None,
            host_blocks=40,
            num_blocks=60,
            offload={"to_disk": "always", "to_shared": "always"},
            onboard={"policy": "always"},
        )

    def are_off(self, engine: KvbmEngine) -> bool:
        counters = engine.counters
        return bool(("disk" in self.tiers and counters.disk.off) or ("shared" in self.tiers and counters.shared.off))


@pytest.fixture(params=TIERS)
def rig(request, tmp_path):
    with ExitStack() as stack:
        try:
            point = stack.enter_context(mounted("fuse-obeys", tmp_path))
        except Unavailable as reason:
            pytest.skip(str(reason))
        rig = Rig(point, request.param)
        stack.callback(rig.order, "")
        yield rig


@pytest.fixture(scope="module")
def expected():
    with running(num_blocks=60) as engine:
        return [engine.ask(prompt(user, LENGTH)).said() for user in range(PROMPTS)]


def timed(run):
    began_s = time.monotonic()
    found = run()
    return found, time.monotonic() - began_s


def ask(engine, expected, user):
    """The seconds until an answer, which must be right."""
    answer, seconds = timed(lambda: engine.ask(prompt(user, LENGTH)))
    assert_same([answer.said()], [expected[user]])
    return seconds


def fill(engine, expected):
    for user in range(PROMPTS):
        ask(engine, expected, user)
        time.sleep(0.5)
    engine.settle()
    return max(ask(engine, expected, user) for user in range(PROMPTS))


@pytest.mark.parametrize("what", ["hang-reads", "hang", STOPPED])
def test_no_request_waits_for_a_file_system_that_hangs_under_load(rig, expected, what):
    engine = rig.engine()
    try:
        usual_s = fill(engine, expected)
        rig.order(what)
        until_s = time.monotonic() + HANGS_S

        def talk(first):
            waits = []
            while time.monotonic() < until_s:
                waits.append(ask(engine, expected, (first + 2 * len(waits)) % PROMPTS))
            return waits

        with ThreadPoolExecutor(2) as pool:
            waits = [wait for talked in pool.map(talk, range(2)) for wait in talked]
        found = {"usual_wait_s": usual_s, "longest_wait_s": max(waits), "requests": len(waits)}
        assert max(waits) < usual_s + LONGEST_WAIT_S
    finally:
        _, stop_s = timed(engine.engine.stop)
        rig.order("")
    record(f"{rig.tiers}, {what} under load", found | {"stop_s": stop_s})
    assert stop_s < LONGEST_STOP_S


@pytest.mark.parametrize("what", ["hang", STOPPED])
def test_an_engine_starts_without_a_file_system_that_hangs_and_uses_it_when_it_answers(rig, expected, what):
    engine, start_s = timed(rig.engine)
    fill(engine, expected)
    engine.engine.stop()
    rig.order(what)
    engine, hanging_start_s = timed(rig.engine)
    try:
        assert hanging_start_s < start_s + LONGEST_START_S
        assert rig.are_off(engine)
        ask(engine, expected, 0)
        rig.order("")
        deadline_s = time.monotonic() + 60
        while rig.are_off(engine):
            assert time.monotonic() < deadline_s
            ask(engine, expected, 1)
        time.sleep(1.0)  # the listing of the store
        engine.forget_g1()
        for user in range(PROMPTS):
            ask(engine, expected, user)
        assert engine.counters.disk.onboard_blocks + engine.counters.shared.onboard_blocks > 0
        rig.order(what)
    finally:
        _, stop_s = timed(engine.engine.stop)
        rig.order("")
    record(
        f"{rig.tiers}, {what} at the start", {"usual_start_s": start_s, "start_s": hanging_start_s, "stop_s": stop_s}
    )
    assert stop_s < LONGEST_STOP_S


def record(case, found):
    row = {name: round(value, 2) for name, value in found.items()}
    print(case, row)
    if os.environ.get("KVBM_WRITE_RESULTS"):
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        kept |= {"command": "KVBM_WRITE_RESULTS=1 pytest -m soak tests/embedded/test_hanging_file_system.py"}
        kept |= {"date": time.strftime("%Y-%m-%d"), "machine": MACHINE}
        kept.setdefault("cases", {})[case] = row
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")
