"""`kvbm doctor` on the store of a shared tier: a directory, a small S3 server that refuses things, written facts."""

import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import GOOD_STORE, machine
from s3_stand_in import BUCKET, StandIn
from terminal import Outcome, assert_snapshot, kvbm_here

from kvbm.tiers.shared import orders
from kvbm.tiers.shared.object_store import Incoming, Outgoing, StoreAnswer
from kvbm.tiers.shared.stores.mooncake import MooncakeStore
from kvbm_cli.doctor import command
from kvbm_cli.doctor.command import doctor
from kvbm_cli.doctor.probes.store import PREFIX, StoreReport, probe

PROFILE = """\
engine:
  model: synthetic:tiny
  arguments: {num_blocks: 64}
tiers:
  host: {capacity: 64MiB}
  shared: {url: 's3://kv-cache/team-a'%s}
server:
  port: 0
"""
SECRET_KEY = "hunter2-hunter2-hunter2"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 60.0)


def checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *, more: str = "", **options: Any
) -> dict[str, dict[str, Any]]:
    """The checks of the store in a profile with `more` keys of the tier, by name."""
    (tmp_path / "mine.yaml").write_text(PROFILE % more)
    chosen = {"directory": None, "as_json": True, "is_quick": False, "write": None, "prefill_rate": None}
    given = {name: options.pop(name) for name in list(options) if name in chosen}
    doctor([str(tmp_path / "mine.yaml")], [], **{**chosen, **given}, machine=machine(tmp_path / "machine", **options))
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert all(
        check["remedy"] for check in checks if check["state"] in ("failure", "skipped") and check["group"] == "store"
    )
    return {check["name"]: check for check in checks if check["group"] == "store"}


def states(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: check["state"] for name, check in checks.items()}


def test_report(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(PROFILE % "")
    chosen = {"directory": None, "as_json": False, "is_quick": False, "write": None, "prefill_rate": 5000.0}
    code = doctor([str(tmp_path / "mine.yaml")], [], **chosen, machine=machine(tmp_path / "machine"))
    captured = capsys.readouterr()
    text = Outcome(code, captured.out, captured.err).text(
        "kvbm doctor --profile ./mine.yaml --prefill-tokens-per-s 5000"
    )
    assert_snapshot("doctor_store", text)


@pytest.mark.parametrize(
    ("report", "name", "state", "about"),
    [
        (StoreReport("connect", "no such store"), "permissions", "failure", "connect fails: no such store"),
        (StoreReport("list", "403"), "permissions", "failure", "list fails: 403"),
        (StoreReport("put", "403", clock_s=0.0), "permissions", "failure", "put fails: 403"),
        (replace(GOOD_STORE, failed="delete", reason="403", left_objects=3), "permissions", "warning", "delete fails"),
        (replace(GOOD_STORE, failed="delete", reason="403", left_objects=3), "leftovers", "warning", "deleted: 3"),
        (replace(GOOD_STORE, clock_s=-61.0), "clock", "warning", "61 s behind this machine"),
        (replace(GOOD_STORE, clock_s=59.0), "clock", "ok", "within a minute"),
        ("no answer within 90 s", "store", "failure", "does not answer: no answer within 90 s"),
    ],
)
def test_each_finding_has_its_state(tmp_path, capsys, report, name, state, about):
    check = checked(capsys, tmp_path, store=report)[name]
    assert check["state"] == state
    assert about in check["finding"]
    assert check["remedy"] or state == "ok"


BYTES_PER_TOKEN = 8192  # of synthetic:tiny


@pytest.mark.parametrize(
    ("get_rate", "prefill", "state", "tokens"),
    [
        (1e9, None, "ok", None),
        (1e9, 1000.0, "ok", 256),
        (1e9, 100_000.0, "ok", 2560),
        (1e8, 100_000.0, "warning", None),
    ],
)
def test_the_store_pays_from_a_length_on(tmp_path, capsys, get_rate, prefill, state, tokens):
    """The first blocks arrive after 24 ms, in which the engine computes 24 or 2400 tokens; an object has 256."""
    report = replace(GOOD_STORE, get_rate=get_rate)
    check = checked(capsys, tmp_path, store=report, prefill_rate=prefill)["break-even"]
    assert check["state"] == state
    assert check["facts"]["tokens_per_s"] == pytest.approx(get_rate / BYTES_PER_TOKEN, abs=1)
    assert check["facts"].get("pays_from_tokens") == tokens


def test_an_engine_that_only_reads_needs_no_permission_to_write(tmp_path, capsys):
    found = checked(capsys, tmp_path, more=", write: false", store=StoreReport(small_get_s=0.001))
    assert states(found) == {"library": "ok", "permissions": "ok", "latency": "ok", "throughput": "skipped"}


@pytest.mark.parametrize(
    ("reason", "state"), [("No such file or directory", "failure"), ("no answer within 8 s", "skipped")]
)
def test_with_quick_only_an_interpreter_that_is_slow_is_skipped(tmp_path, capsys, reason, state):
    library = checked(capsys, tmp_path, is_quick=True, answers={"connector": reason})["library"]
    assert (library["state"], reason in library["finding"]) == (state, True)


def test_a_missing_library_is_named_with_the_interpreter(tmp_path, capsys):
    answers = {"connector": {"seconds": 0.1, "error": "ModuleNotFoundError: No module named 'obstore'"}}
    library = checked(capsys, tmp_path, answers=answers)["library"]
    assert library["state"] == "failure"
    assert "No module named 'obstore'" in library["finding"]
    assert "pip install 'kvbm-cli[shared]'" in library["remedy"]


@pytest.mark.parametrize(
    ("content", "mode", "state", "about"),
    [
        (None, 0o600, "failure", "No such file or directory"),
        ("short", 0o600, "failure", "16 to 4096 bytes"),
        (SECRET_KEY, 0o644, "warning", "can be read by other users"),
        (SECRET_KEY, 0o600, "ok", "can be read"),
    ],
)
def test_the_secret_of_the_tier_is_checked(tmp_path, capsys, content, mode, state, about):
    if content is not None:
        (tmp_path / "key").write_text(content)
        (tmp_path / "key").chmod(mode)
    secret = checked(capsys, tmp_path, more=f", protection: hmac, key_file: {tmp_path}/key")["secret"]
    assert secret["state"] == state
    assert about in secret["finding"]
    assert SECRET_KEY not in json.dumps(secret)


def test_probe_of_a_directory_leaves_nothing(tmp_path):
    found = probe(f"file://{tmp_path}/kv", seconds=0.05, writes=True)
    assert (found.failed, found.left_objects) == (None, 0)
    assert found.get_rate is not None
    assert found.get_rate > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "other").write_text("mine")
    probe(f"file://{tmp_path}/kv", seconds=0.05, writes=True)
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["other"]


@pytest.fixture
def of_server(monkeypatch):
    def use(server: StandIn) -> str:
        for name, value in (
            ("ENDPOINT", server.url),
            ("REGION", "eu-1"),
            ("ACCESS_KEY", "me"),
            ("SECRET_KEY", SECRET_KEY),
        ):
            monkeypatch.setenv(f"DYN_KVBM_OBJECT_{name}", value)
        return f"s3://{BUCKET}/team-a"

    return use


@pytest.mark.parametrize(
    ("refused", "failed", "left"),
    [((), None, 0), (("LIST",), "list", 0), (("PUT",), "put", 0), (("GET",), "get", 0), (("DELETE",), "delete", 17)],
)
def test_probe_names_the_step_that_is_refused(of_server, refused, failed, left):
    with StandIn(refused=refused) as server:
        found = probe(of_server(server), seconds=0.0, writes=True)
        assert (found.failed, found.left_objects) == (failed, left)
        assert len(server.objects) == left
        assert all(key.startswith(f"team-a/{PREFIX}/") for key in server.keys_put)
    assert found.reason is None or SECRET_KEY not in found.reason


@pytest.mark.parametrize(("ahead_s", "least", "most"), [(0, 0, 0), (300, 290, 310), (-300, -310, -290)])
def test_probe_compares_the_clocks(of_server, ahead_s, least, most):
    with StandIn(ahead=timedelta(seconds=ahead_s)) as server:
        found = probe(of_server(server), seconds=0.0, writes=True)
    assert found.clock_s is not None
    assert least <= found.clock_s <= most


def test_probe_removes_what_a_killed_doctor_left(of_server):
    with StandIn() as server:
        old, new = (f"team-a/{PREFIX}/{name}/1" for name in ("old", "new"))
        server.objects[old] = b"x", datetime.now(UTC) - timedelta(hours=2)
        server.objects[new] = b"x", datetime.now(UTC)
        assert probe(of_server(server), seconds=0.0, writes=False).failed is None
        assert list(server.objects) == [new]


def test_a_store_that_does_not_exist_fails_at_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("DYN_KVBM_OBJECT_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
    monkeypatch.setenv("DYN_KVBM_OBJECT_ACCESS_KEY", "me")
    monkeypatch.setenv("DYN_KVBM_OBJECT_SECRET_KEY", SECRET_KEY)
    found = probe(f"s3://{BUCKET}", seconds=0.0, writes=True)
    assert found.failed == "list"
    assert found.reason is not None
    assert "\n" not in found.reason  # where the client shows all that it knows
    assert SECRET_KEY not in found.reason


def test_only_the_store_is_checked_without_a_profile(tmp_path):
    outcome = kvbm_here("doctor", "--url", f"file://{tmp_path}/kv", "--quick", "--json", home=tmp_path)
    data = json.loads(outcome.stdout)
    assert (outcome.exit_code, data["url"]) == (0, f"file://{tmp_path}/kv")
    assert {check["group"] for check in data["checks"]} == {"environment", "store"}
    assert not (tmp_path / "kv").exists()


def test_a_wrong_url_is_a_mistake(tmp_path):
    outcome = kvbm_here("doctor", "--url", "ftp://kv", home=tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "`--url` must begin with one of" in outcome.stderr


class FakePool:
    """An engine of Mooncake whose objects are in a dict, and whose owner may be gone."""

    def __init__(self, *, has_owner: bool = True, has_master: bool = True, changes: bool = False) -> None:
        self.objects: dict[str, bytes] = {}
        self.has_owner, self.has_master, self.changes = has_owner, has_master, changes

    def use_memory(self, memory: object) -> None: ...

    def are_present(self, keys: Sequence[str]) -> list[bool | None]:
        return [key in self.objects if self.has_master else None for key in keys]

    def put(self, objects: Sequence[Outgoing]) -> list[StoreAnswer]:
        if not self.has_owner:
            return [StoreAnswer(orders.Outcome.FAILED, "no owner has room for it") for _ in objects]
        self.objects |= {one.key: b"".join(one.buffers) for one in objects}
        return [StoreAnswer(orders.Outcome.GOOD) for _ in objects]

    def get(self, objects: Sequence[Incoming]) -> list[StoreAnswer]:
        for one in objects:
            (buffer,) = one.buffers
            assert isinstance(buffer, memoryview)
            buffer[:] = bytes(len(buffer)) if self.changes else self.objects[one.key]
        return [StoreAnswer(orders.Outcome.GOOD) for _ in objects]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("pool", "failed", "reason"),
    [
        (FakePool(), None, None),
        (FakePool(has_owner=False), "put", "no owner has room for it"),
        (FakePool(has_master=False), "list", "the master does not answer"),
        (FakePool(changes=True), "get", "an object has other bytes than were written"),
    ],
    ids=["works", "no owner", "no master", "changed bytes"],
)
def test_a_pool_is_tested_with_objects_that_are_removed(pool, failed, reason, monkeypatch):
    monkeypatch.setattr(MooncakeStore, "open", lambda *_, **__: pool)
    found = probe("mooncake://127.0.0.1:1", seconds=0.01, writes=True)
    assert (found.failed, found.reason) == (failed, reason)
    assert (found.get_rate is not None, found.put_rate is not None) == (failed is None,) * 2
    assert pool.objects == {}


def test_an_engine_that_only_reads_asks_the_pool_and_writes_nothing(monkeypatch):
    pool = FakePool()
    monkeypatch.setattr(MooncakeStore, "open", lambda *_, **__: pool)
    monkeypatch.setattr(pool, "put", lambda objects: pytest.fail("it writes"))
    found = probe("mooncake://127.0.0.1:1", seconds=0.01, writes=False)
    assert (found.failed, found.get_rate, found.small_get_s is not None) == (None, None, True)


def test_a_pool_that_cannot_be_reached_is_a_failure_that_names_what_to_start(tmp_path):
    outcome = kvbm_here("doctor", "--url", "mooncake://127.0.0.1:1", "--json", home=tmp_path)
    (check,) = [one for one in json.loads(outcome.stdout)["checks"] if one["group"] == "store"]
    assert (outcome.exit_code, check["name"], check["state"]) == (1, "pool", "failure")
    assert "connect fails" in check["finding"]  # the library is missing, or nobody listens
