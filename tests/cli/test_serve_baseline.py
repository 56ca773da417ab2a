"""`kvbm serve --baseline`: the same engine without the cache, for every kind of engine, as `kvbm bench` starts it."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import write_model
from terminal import HANGS_S, kvbm, kvbm_here
from test_manage import status
from test_serve import home as home  # the fixture
from test_serve import serving
from test_serve_vllm import PROFILE as VLLM_PROFILE
from waiting import eventually

from kvbm_cli.bench import engines as arms
from kvbm_cli.bench.arms import comparison_of

CACHE_FLAGS = {"mine": "--connector", "vllm": "--kv-transfer-config"}
NOWHERE = "disk: {capacity: 1GiB, directory: /dev/null/nowhere}"


@pytest.fixture
def both(home):
    """A home with a profile of each kind of engine."""
    write_model(home / "qwen")
    (home / "vllm.yaml").write_text(VLLM_PROFILE.replace("./model", "./qwen"))
    return home


def dry_run(home: Path, profile: str, *options: str) -> dict[str, Any]:
    outcome = kvbm_here(
        "serve", "-p", f"./{profile}.yaml", "--dry-run", "--json", "--port", "8123", *options, home=home
    )
    assert outcome.exit_code == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert isinstance(plan, dict)
    return plan


@pytest.mark.parametrize("profile", CACHE_FLAGS)
def test_baseline_is_the_same_command_without_the_connector(both, profile):
    plan, baseline = dry_run(both, profile), dry_run(both, profile, "--baseline")
    flag = plan["argv"].index(CACHE_FLAGS[profile])
    assert baseline["argv"] == [*plan["argv"][:flag], *plan["argv"][flag + 2 :]]
    assert baseline["environment"] == plan["environment"]
    assert (plan["is_baseline"], baseline["is_baseline"]) == (False, True)
    assert baseline["tiers"] == {"G1": plan["tiers"]["G1"], "G2": None, "G3": None}


class _Started(Exception):
    pass


@pytest.mark.parametrize("profile", CACHE_FLAGS)
def test_bench_starts_its_baseline_with_the_same_command(both, profile, monkeypatch):
    started = []

    def start(plan: Any, *, log_path: Path) -> None:
        started.append(plan)
        raise _Started

    monkeypatch.chdir(both)
    monkeypatch.setattr(arms.EngineProcess, "start", start)
    monkeypatch.setattr(arms, "choose_port", lambda host, port: 8123)
    engines = arms.ArmEngines(comparison_of((f"./{profile}.yaml",), (), ()))
    with pytest.raises(_Started), engines("baseline", both, arms.NeededRoom(1000, 1)):
        pass
    assert list(started[0].argv) == dry_run(both, profile, "--baseline")["argv"]


def test_baseline_takes_no_memory_and_is_named_so(home):
    """Its tiers need not fit on this machine."""
    (home / "mine.yaml").write_text((home / "mine.yaml").read_text().replace("64MiB}", f"64TiB}}, {NOWHERE}"))
    with serving(home, "--baseline") as program:
        eventually(lambda: status(home)[0]["state"] == "healthy")
        (run,) = status(home)
        assert (run["run"], run["profile"], run["is_baseline"]) == ("mine-baseline-1", "mine", True)
        assert (run["memory_bytes"], run["blocks"]) == (0, {})
        assert "no cache" in kvbm_here("status", home=home).stdout
        assert "cache      none: this is the baseline" in kvbm_here("status", "mine-baseline-1", home=home).stdout
        assert kvbm("stop", "mine", home=home).exit_code == 0, "the name of the profile names it too"
        assert program.wait(timeout=HANGS_S) == 0


def test_limit_of_the_start_applies_to_a_baseline_too(home):
    failing = ("--set", "engine.environment.FAKE=hang", "--set", "transfer.init_timeout_s=0.5")
    outcome = kvbm("serve", "-p", "./mine.yaml", "--baseline", *failing, home=home)
    assert "not healthy after 0.5 s" in outcome.stderr
