"""Each run of the arm with kvbm has a disk tier of its own."""

import contextlib

import pytest
from bench_rig import WORKLOAD

from kvbm.config.load import load
from kvbm.errors import EngineError, EnvironmentProblem
from kvbm_cli.bench import arms
from kvbm_cli.bench.arms import ProfileEngines, fresh_disk
from kvbm_cli.bench.comparison import AGAINST_BASELINE
from kvbm_cli.bench.control import ScrapedMetrics
from kvbm_cli.bench.experiment import _require_empty_disk
from kvbm_cli.bench.output_directory import OutputDirectory
from kvbm_cli.package_data import profiles_directory


def profile(directory):
    overrides = ("tiers.disk.blocks=8", f"tiers.disk.directory={directory}")
    return load("demo", directories=(profiles_directory(),), overrides=overrides).profile


def test_a_run_has_a_directory_of_its_own_on_the_same_file_system_and_leaves_nothing(tmp_path):
    before = profile(tmp_path / "cache")
    with fresh_disk(before) as first, fresh_disk(before) as second:
        directories = {one.tiers.disk.directory for one in (first, second)}
        assert len(directories) == 2
        assert all(directory.startswith(str(tmp_path / "cache")) for directory in directories)
        assert first.tiers.disk.blocks == 8
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_disk_tier_the_profile_stays_as_it_is():
    demo = load("demo", directories=(profiles_directory(),)).profile
    with fresh_disk(demo) as same:
        assert same is demo


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match=r"tmp|file"), fresh_disk(profile(tmp_path / "file")):
        pass


def test_a_disk_that_is_not_empty_before_the_run_ends_it():
    _require_empty_disk(
        ScrapedMetrics.parse('kvbm_disk_blocks{state="free"} 8.0\nkvbm_disk_blocks{state="evictable"} 0.0\n')
    )
    _require_empty_disk(ScrapedMetrics.parse(""))
    with pytest.raises(EngineError, match="holds 3 blocks"):
        _require_empty_disk(ScrapedMetrics.parse('kvbm_disk_blocks{state="evictable"} 3.0\n'))


def test_engines_of_a_public_profile_listen_on_this_machine_only(monkeypatch, tmp_path):
    """vLLM gets its development mode, in which a client can call methods of the engine."""
    directories, public = (profiles_directory(),), ("server.host=0.0.0.0",)
    plans = []

    def start(plan, *, log_path):
        plans.append(plan)
        raise EngineError("not started")

    monkeypatch.setattr(arms.EngineProcess, "start", start)
    for name in ("demo", "vllm-cpu-demo"):
        measured = load(name, directories=directories, overrides=public).profile
        with contextlib.closing(OutputDirectory(tmp_path)) as directory:
            engines = ProfileEngines(measured, WORKLOAD, directory)
            for arm in AGAINST_BASELINE.arms[:2]:
                with pytest.raises(EngineError, match="not started"), engines(arm):
                    pass
    assert {plan.argv[plan.argv.index("--host") + 1] for plan in plans} == {"127.0.0.1"}
    assert [plan.environment.get("VLLM_SERVER_DEV_MODE") for plan in plans] == [None, None, "1", "1"]
