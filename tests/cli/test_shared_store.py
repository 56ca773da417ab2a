"""`kvbm cache --url` on stores in a directory, with objects that the shared tier wrote and that were then changed."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared.storage_rig import make_run, opened
from terminal import ROOT, Kvbm, Outcome, assert_entry, assert_snapshot, environment, kvbm_here, ways

from kvbm.hashing import tenant
from kvbm.shared.protection import AesProtection, HmacProtection
from kvbm_cli.cache import store_selection

LLAMA, QWEN = bytes.fromhex("aa" * 16), bytes.fromhex("bb" * 16)
DAY = 86_400
SECRET = "sixteen bytes or more"
STORE = "file://{home}/kv"


def fill(home: Path, namespace: bytes, facts: dict[str, object], *, runs: int, age_s: float, **how: object) -> None:
    """Writes runs, of which the second belongs to alice, as if they had been written `age_s` ago."""
    with opened(f"file://{home}/kv", namespace=namespace, **how) as rig:
        for number in range(runs):
            rig.put(make_run(number), tenant=tenant("alice" if number == 1 else None))
    place = home / "kv" / "v1" / namespace.hex()
    (place / "namespace.json").write_text(json.dumps(facts))
    for path in objects(home, namespace):
        os.utime(path, (time.time() - age_s,) * 2)


def objects(home: Path, namespace: bytes) -> list[Path]:
    return sorted(
        path
        for path in (home / "kv" / "v1" / namespace.hex()).rglob("*")
        if path.parent.name != "v1" and path.is_file() and path.name != "namespace.json"
    )


@pytest.fixture
def home(tmp_path):
    fill(tmp_path, LLAMA, {"model": "Llama-3.1-8B", "engine": "vllm", "block_tokens": 16}, runs=4, age_s=9 * DAY + 60)
    fill(tmp_path, QWEN, {"model": "Qwen3-8B", "engine": "embedded", "block_size": 32}, runs=2, age_s=305)
    return tmp_path


def run(home: Path, command: str, *, way: Kvbm = kvbm_here, **extra: str) -> Outcome:
    return way(
        "cache", *(word.replace("URL", f"--url=file://{home}/kv") for word in command.split()), home=home, **extra
    )


def shown(outcome: Outcome, command: str, home: Path) -> str:
    return outcome.text(f"kvbm cache {command}").replace(str(home), "[HOME]")


def listed(home: Path, options: str = "") -> dict[str, int]:
    return {one["model"]: one["objects"] for one in json.loads(run(home, f"ls URL --json {options}").stdout)}


OUTPUTS = {
    "ls": "ls URL",
    "verify": "verify URL",
    "purge": "purge URL --model Qwen3-8B --yes",
    "purge_dry": "purge URL --older-than 7d --dry-run",
}
MISTAKES = {
    "another_kind_of_store": "ls --url ftp://kv",
    "no_directory": "ls --url file:///no/such/directory",
    "credentials": "purge --url s3://me:secret@bucket --yes",
    "mooncake": "ls --url mooncake://127.0.0.1:50051",
    "namespace": "ls URL --namespace Llama",
    "age": "purge URL --older-than week --yes",
    "two_places": "ls URL --dir kv",
    "no_store": "verify --delete-bad",
    "model_of_a_directory": "ls --model Qwen3-8B",
    "nobody_to_ask": "purge URL",
    "purge_of_a_directory": "purge --yes",
}


@pytest.mark.parametrize(("name", "way"), ways(OUTPUTS))
def test_output(home, name, way):
    assert_snapshot(f"store_{name}", shown(run(home, OUTPUTS[name], way=way), OUTPUTS[name], home))


@pytest.mark.parametrize(("name", "way"), ways(MISTAKES))
def test_mistake(home, name, way):
    outcome = run(home, MISTAKES[name], way=way)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "secret" not in outcome.stderr
    assert_entry("mistakes/store", name, shown(outcome, MISTAKES[name], home), names=MISTAKES)
    assert listed(home) == {"Qwen3-8B": 2, "Llama-3.1-8B": 4}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", {"Qwen3-8B": 2, "Llama-3.1-8B": 4}),
        ("--namespace bb", {"Qwen3-8B": 2}),
        ("--namespace cc", {}),
        ("--model Llama-3.1-8B", {"Llama-3.1-8B": 4}),
        ("--model llama", {}),
        ("--tenant alice", {"Qwen3-8B": 1, "Llama-3.1-8B": 1}),
        ("--tenant bob", {}),
        ("--older-than 7d", {"Llama-3.1-8B": 4}),
        ("--older-than 1min --tenant alice --model Qwen3-8B", {"Qwen3-8B": 1}),
        ("--older-than 30d", {}),
    ],
)
def test_selection(home, options, found):
    assert listed(home, options) == found


def test_json_says_more_than_the_table(home):
    qwen = json.loads(run(home, "ls URL --json").stdout)[0]
    assert (qwen["namespace"], qwen["engine"], qwen["block_tokens"]) == (QWEN.hex(), "embedded", 32)
    assert qwen["bytes"] == sum(path.stat().st_size for path in objects(home, QWEN))
    assert abs(time.time() - 305 - qwen["oldest"]) < 60
    assert qwen["facts"] == {"model": "Qwen3-8B", "engine": "embedded", "block_size": 32}


def change(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[-1:]
    elif how == "empty":
        content.clear()
    elif how == "text":
        content = bytearray(b"not an object\n" * 1000)
    else:
        content[{"length": 20, "header": 100, "payload": 5000, "end": -1}[how]] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["cut", "empty", "text", "length", "header", "payload", "end"])
def test_a_changed_object_is_found_and_nothing_else_is_deleted(home, how):
    victim, *others = objects(home, LLAMA)
    change(victim, how)
    first = run(home, "verify URL --json")
    llama = next(one for one in json.loads(first.stdout) if one["namespace"] == LLAMA.hex())
    assert (first.exit_code, llama["good"], llama["deleted"]) == (1, 3, 0)
    assert [one["key"] for one in llama["bad"]] == [str(victim.relative_to(home / "kv"))]
    assert victim.exists()
    assert run(home, "verify URL --delete-bad").exit_code == 1
    assert objects(home, LLAMA) == others
    assert run(home, "verify URL --delete-bad").exit_code == 0


def test_an_object_of_another_name_or_namespace_is_bad(home):
    first, second, *_ = objects(home, LLAMA)
    first.write_bytes(second.read_bytes())
    foreign = objects(home, QWEN)[0]
    foreign.write_bytes((objects(home, LLAMA)[2]).read_bytes())
    problems = [
        one["problem"] for verdict in json.loads(run(home, "verify URL --json").stdout) for one in verdict["bad"]
    ]
    assert sorted(problems) == ["it holds other blocks than its name says", "its header names another namespace"]


def test_bad_objects_are_listed_with_their_reason(home):
    for path in objects(home, LLAMA)[:2]:
        change(path, "end")
    text = run(home, "verify URL --namespace aa --delete-bad").stdout.splitlines()
    assert text[0] == "aaaaaaaaaaaaaaaa: 4 objects read, 2 bad and deleted"
    assert [line.partition(": ")[2] for line in text[1:]] == ["block 3 does not match its checksum"] * 2


@pytest.mark.parametrize("kind", [HmacProtection, AesProtection])
def test_a_key_proves_who_wrote_an_object(tmp_path, kind):
    fill(tmp_path, LLAMA, {"model": "m"}, runs=2, age_s=0, protection=kind(SECRET.encode()))
    (tmp_path / "key").write_text(SECRET + "\n")
    (tmp_path / "wrong").write_text("another secret of them")

    def verified(options: str = "", **extra: str) -> dict[str, object]:
        outcome = run(tmp_path, f"verify URL --json {options}", **extra)
        (verdict,) = json.loads(outcome.stdout)
        assert outcome.exit_code == bool(verdict["bad"])
        return {
            name: len(verdict[name]) if name == "bad" else verdict[name]
            for name in ("good", "unproven", "hidden", "bad")
        }

    for found in (verified("--key-file key"), verified(KVBM_SHARED_KEY=SECRET)):
        assert found == {"good": 2, "unproven": 0, "hidden": 0, "bad": 0}
    assert verified("--key-file wrong") == {"good": 0, "unproven": 0, "hidden": 0, "bad": 2}
    is_hidden = kind is AesProtection
    assert verified() == {"good": 2, "unproven": 0 if is_hidden else 2, "hidden": 2 if is_hidden else 0, "bad": 0}


def test_an_unprotected_object_is_not_called_proven(home):
    outcome = run(home, "verify URL --model Qwen3-8B", KVBM_SHARED_KEY=SECRET)
    assert outcome == Outcome(0, "bbbbbbbbbbbbbbbb: 2 objects read, 0 bad; 2 without proof of origin\n", "")


@pytest.mark.parametrize(("content", "about"), [(None, "No such file or directory"), ("short", "16 to 4096 bytes")])
def test_a_key_that_cannot_be_used_is_named(home, content, about):
    if content is not None:
        (home / "key").write_text(content)
    outcome = run(home, "verify URL --key-file key")
    assert outcome.exit_code == 1
    assert "`key`" in outcome.stderr
    assert about in outcome.stderr


def test_a_sample_reads_so_many_objects(home):
    verdicts = json.loads(run(home, "verify URL --sample 3 --json").stdout)
    assert sum(verdict["good"] for verdict in verdicts) == 3


def test_purge_deletes_the_selection_and_nothing_else(home):
    assert run(home, "purge URL --tenant alice --yes").exit_code == 0
    assert listed(home) == {"Qwen3-8B": 1, "Llama-3.1-8B": 3}
    assert listed(home, "--tenant alice") == {}
    assert run(home, "purge URL --older-than 7d --yes").stdout == "deleted 3 objects of 1 namespace, 108.0 KiB\n"
    assert listed(home) == {"Qwen3-8B": 1}
    assert not (home / "kv" / "v1" / LLAMA.hex() / "namespace.json").exists()
    assert (home / "kv" / "v1" / QWEN.hex() / "namespace.json").exists()


def test_a_dry_run_deletes_nothing(home):
    before = [path for path in (home / "kv").rglob("*") if path.is_file()]
    assert run(home, "purge URL --dry-run").exit_code == 0
    assert [path for path in (home / "kv").rglob("*") if path.is_file()] == before


def test_objects_of_others_are_never_deleted(home):
    run_key = objects(home, QWEN)[0]
    others = [
        home / "kv" / "thesis.pdf",
        home / "kv" / "v1" / "notes.txt",
        home / "kv" / "v1" / ("CC" * 16) / run_key.parent.name / run_key.name,
        home / "kv" / "v1" / QWEN.hex() / "notes.txt",
        home / "kv" / "v1" / QWEN.hex() / "00" / run_key.name,
        home / "kv" / "v1" / QWEN.hex() / run_key.parent.name / run_key.name.upper(),
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    outcome = run(home, "purge URL --yes")
    assert outcome.stderr == "3 objects in these namespaces not written by kvbm, never read and never deleted\n"
    assert [path for path in (home / "kv").rglob("*") if path.is_file()] == [
        path for path in (home / "kv").rglob("*") if path in others
    ]
    assert all(path.read_bytes() == b"mine" for path in others)


@pytest.mark.parametrize("command", ["ls", "verify", "purge --yes"])
def test_an_empty_store_is_no_mistake(tmp_path, command):
    (tmp_path / "kv").mkdir()
    assert run(tmp_path, f"{command} URL") == Outcome(0, f"no objects in file://{tmp_path}/kv\n", "")
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_missing_library_is_named_with_what_brings_it(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    outcome = run(home, "ls --url s3://kv-cache/team-a")
    assert outcome.exit_code == 1
    assert "requires the package `obstore`" in outcome.stderr
    assert "hint: run `pip install 'kvbm-cli[shared]'`" in outcome.stderr


def test_neither_a_directory_nor_the_disk_tier_needs_the_library(home):
    (home / "caches").mkdir()
    program = (
        "import sys\nfrom kvbm_cli.app import run\nrun(sys.argv[1:])\nprint({'obstore', 'torch'} & {*sys.modules})"
    )
    for command in (["--help"], ["cache", "ls", "--dir", "caches"], ["cache", "ls", "--url", f"file://{home}/kv"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *command],
            cwd=home,
            env={**environment(home), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_ages_are_whole_numbers_with_a_unit():
    for text, seconds in (("90s", 90), ("30min", 1800), ("12 h", 43_200), ("7d", 7 * DAY)):
        before_s = store_selection._before(text)
        assert before_s is not None
        assert abs(time.time() - seconds - before_s) < 5
    assert re.fullmatch(store_selection.AGE, "-1d") is None


def test_a_huge_file_under_the_name_of_an_object_is_not_read_into_memory(home):
    path = next(path for path in home.rglob("*") if path.is_file() and len(path.name) >= 32 and not path.suffix)
    os.truncate(path, 1 << 36)
    outcome = run(home, "verify URL --json")
    assert outcome.exit_code == 1
    (bad,) = [one for verdict in json.loads(outcome.stdout) for one in verdict["bad"]]
    assert f"{1 << 36} bytes" in bad["problem"]


def test_an_error_of_a_store_has_one_line(home, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "name",
        "AWS_SECRET_ACCESS_KEY": "hidden",
    }.items():
        monkeypatch.setenv(name, value)
    outcome = run(home, "ls --url s3://bucket/place")
    assert outcome.exit_code != 0
    assert "Debug source" not in outcome.stderr
    assert "hidden" not in outcome.stderr
    assert len(outcome.stderr.splitlines()) <= 4, outcome.stderr
