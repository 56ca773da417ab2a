"""Mutated profiles, variables and command lines: never a traceback, and never a word of the user's that is ignored.

The cases and their judge are in `fuzz.py`. Five hundred of them run here, all 20,000 under `nox -s soak`; with
KVBM_WRITE_RESULTS=1 what came of them is written to bench/results/<machine>-fuzz.json.
"""

import json
import os
import platform
import time
from pathlib import Path

import fuzz
import pytest
from fuzz import CASES, SEED, Case, Said, Tally, make_case, run_cases, said
from terminal import kvbm

FEW = 250
PARTS = 10
MACHINE = f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"
RESULT = Path(__file__).resolve().parents[2] / "bench" / "results" / f"{MACHINE}-fuzz.json"
TEXT = "engine: {model: 'synthetic:tiny', arguments: {num-blocks: 99}}\ntiers: {host: {capacity: 2GiB}}\n"


@pytest.mark.slow
def test_a_few_cases():
    tally = run_cases(range(FEW))
    assert tally.wrong == {}
    assert {0, 1, 2} <= set(tally.exit_codes), "cases that pass and cases that fail"
    assert tally.exit_codes[0] > FEW / 10


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_all_cases(part):
    size = CASES // PARTS
    begin = time.monotonic()
    tally = run_cases(range(part * size, (part + 1) * size))
    if os.environ.get("KVBM_WRITE_RESULTS"):
        record(f"part {part}", tally, round(time.monotonic() - begin))
    assert tally.wrong == {}


def record(name: str, tally: Tally, seconds: int) -> None:
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    kept |= {"command": "KVBM_WRITE_RESULTS=1 pytest -m soak tests/cli/test_fuzz.py", "seed": SEED, "machine": MACHINE}
    exit_codes = {str(code): count for code, count in sorted(tally.exit_codes.items())}
    row = {"date": time.strftime("%Y-%m-%d"), "seconds": seconds, "exit_codes": exit_codes, "wrong": tally.wrong}
    kept.setdefault("parts", {})[name] = {"cases": sum(tally.exit_codes.values()), **row}
    RESULT.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


@pytest.mark.parametrize("number", [3, 14, 15, 92, 65])
def test_a_process_of_its_own_says_the_same(tmp_path, number):
    case = make_case(number)
    (tmp_path / fuzz.NAME).write_bytes(case.contents)
    variables = {**fuzz.OUTSIDE, **case.variables}
    outcome = kvbm(*case.arguments, home=tmp_path, **variables)
    here = said(case, tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (here.exit_code, here.stdout)


def case_of(*sets: str, **variables: str) -> Case:
    arguments = ["profile", "show", fuzz.NAME, "--json", *(f"--set={text}" for text in sets)]
    return Case(0, TEXT.encode(), variables, arguments, list(sets))


def shown(home: Path, case: Case) -> dict[str, dict[str, object]]:
    (home / fuzz.NAME).write_bytes(case.contents)
    every: dict[str, dict[str, object]] = json.loads(said(case, home).stdout)
    return every


def verdict(case: Case, every: object) -> list[str]:
    return list(fuzz.nothing_ignored(case, Said(0, json.dumps(every), "", 0.0)))


def test_judge_notices_what_is_not_shown_as_it_was_given_and_nothing_else(tmp_path):
    case = case_of("server.port=auto", DYN_KVBM_MAX_TRANSFER_BATCH_SIZE="7")
    assert verdict(case, shown(tmp_path, case)) == []
    every = shown(tmp_path, case_of())
    every["engine.arguments.num_blocks"]["value"] = 2048
    every["tiers.host.capacity"]["origin"] = "default"
    assert verdict(case_of("transfer.max_concurrent=9", DYN_KVBM_MAX_TRANSFER_BATCH_SIZE="7"), every) == [
        "engine.arguments.num_blocks is shown as 2048",
        "tiers.host.capacity comes from default",
        "--set transfer.max_concurrent is ignored for default",
        "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE='7' is ignored",
    ]
    del every["engine.arguments.num_blocks"]
    assert verdict(case_of(), every)[0] == "engine.arguments.num_blocks is not shown"


BAD_MANNERS = {
    "a traceback": (Said(1, "", "error: x\nTraceback (most recent call last)", 0.0), ["says 'Traceback'"]),
    "a bug": (Said(1, "", "error: a bug in kvbm: KeyError", 0.0), ["says 'a bug in kvbm'"]),
    "another exit code": (Said(3, "", f"error: {fuzz.NAME}", 0.0), ["exit code 3"]),
    "silence": (Said(2, "", "", 0.0), ["fails without an error", "an error without a place"]),
    "an error that is none": (Said(0, "", "error: x", 0.0), ["an error that is none"]),
    "an error without a place": (Said(2, "", "error: something", 0.0), ["an error without a place"]),
    "waiting": (Said(0, "", "", 3.0), ["takes 3.0 s"]),
}


@pytest.mark.parametrize("name", BAD_MANNERS)
def test_judge_notices_bad_manners(name):
    outcome, wrong = BAD_MANNERS[name]
    case = Case(0, b"", {}, ["profile", "show"])
    assert list(fuzz.manners(case, outcome)) == wrong
