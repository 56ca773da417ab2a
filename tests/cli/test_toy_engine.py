"""A fifth engine, which no file of the two packages names, in every command that asks an engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import environment
from toy_engine.kind import PROFILE

HERE = str(Path(__file__).parent)


@pytest.fixture
def kvbm_with_toy(tmp_path):
    def run(*arguments):
        variables = environment(tmp_path)
        variables["PYTHONPATH"] = ":".join(filter(None, (HERE, variables.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "toy_engine", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)

    return run


def test_a_profile_of_a_fifth_engine_is_checked(kvbm_with_toy):
    assert f"{PROFILE}: no mistakes found" in kvbm_with_toy("profile", "check", "-p", str(PROFILE)).stdout
    wrong = ("engine.arguments.ring=9", "engine.arguments.leaf_token=4")
    refused, unknown = (kvbm_with_toy("profile", "check", "-p", str(PROFILE), "--set", one) for one in wrong)
    assert "a ring of Toy has at most 8 ranks" in refused.stderr
    assert "leaf_tokens" in unknown.stderr
    assert (refused.returncode, unknown.returncode) == (2, 2)


@pytest.mark.parametrize("given", [("-p", str(PROFILE)), ("Qwen/Qwen3-8B", "--engine", "toy", "--tp", "1")])
def test_a_block_of_a_fifth_engine_has_a_size(kvbm_with_toy, given):
    found = json.loads(kvbm_with_toy("size", *given, "--json").stdout)
    assert (found["block"], found["token_bytes"]) == ({"tokens": 32, "bytes": 32768, "ranks": 1}, 1024)
    assert found["tiers"]["G2"]["blocks"] == 2048


def test_a_fifth_engine_is_started_by_its_own_command(kvbm_with_toy):
    argv = json.loads(kvbm_with_toy("serve", "-p", str(PROFILE), "--dry-run", "--json").stdout)["argv"]
    assert argv == ["toy-serve", "Qwen/Qwen3-8B", "--port", "0", "--kvbm"]


def test_the_doctor_knows_a_fifth_engine(kvbm_with_toy):
    checks = json.loads(kvbm_with_toy("doctor", "--quick", "--profile", str(PROFILE), "--json").stdout)["checks"]
    (version,) = (one for one in checks if one["name"] == "version")
    assert (version["state"], version["finding"]) == ("ok", "Toy 1.0 (tested with Toy 1)")


def test_a_fifth_engine_can_be_measured(kvbm_with_toy):
    found = kvbm_with_toy("bench", "--profile", str(PROFILE), "--dry-run", "--json")
    arms = json.loads(found.stdout)["arms"]
    assert {name: one["memory_bytes"] - arms["baseline"]["memory_bytes"] for name, one in arms.items()} == {
        "baseline": 0,
        "floor": 0,
        "kvbm": 64 << 20,
    }
