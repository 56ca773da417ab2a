"""bench/peers/compare.py and bench/keep_result.py: profiles of other caches, cold runs, and what may be published."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from kvbm.engines.table import kind_of
from kvbm.errors import ProfileError
from kvbm_cli.bench.arms import comparison_of, require_startable
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.profile.preflight import check
from kvbm_cli.profile.resolve import resolve

BENCH = Path(__file__).resolve().parents[2] / "bench"
PEERS = BENCH / "peers"
NAMES = ("native", "lmcache")


def script(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compare():
    return script(PEERS / "compare.py")


@pytest.fixture(scope="module")
def keep_result():
    before = list(sys.path)
    yield script(BENCH / "keep_result.py")
    sys.path[:] = before


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_of_another_cache_differs_only_in_its_connector(name):
    profile, ours = resolve(str(PEERS / f"{name}.yaml")).profile, resolve("vllm-cpu-demo").profile
    plan, baseline = (kind_of(one).launch_plan(one, connector=False, port=1) for one in (profile, ours))
    assert plan.argv[:-2] == baseline.argv
    assert plan.argv[-2] == "--kv-transfer-config"
    assert json.loads(plan.argv[-1]) == profile.engine.arguments.kv_transfer_config
    assert set(plan.environment) - set(baseline.environment) <= {
        *("PYTHONPATH", "LMCACHE_TRACK_USAGE", "PYTHONHASHSEED")
    }


def test_each_cache_has_the_host_memory_of_kvbm(compare):
    wanted = resolve("vllm-cpu-demo").profile.tiers.host.capacity
    native = resolve(str(PEERS / "native.yaml")).profile.engine.arguments.kv_transfer_config
    assert native["kv_connector_extra_config"]["cpu_bytes_to_use"] == wanted
    assert int(compare.HOST_GB) << 30 == wanted


def test_the_profile_of_lmcache_names_the_server_that_is_started(compare):
    extra = resolve(str(PEERS / "lmcache.yaml")).profile.engine.arguments.kv_transfer_config[
        "kv_connector_extra_config"
    ]
    assert extra["lmcache.mp.port"] == compare.PORT
    assert resolve(str(PEERS / "lmcache.yaml")).profile.engine.environment["PYTHONPATH"] == str(compare.LMCACHE)


@pytest.mark.parametrize("name", NAMES)
def test_kvbm_does_not_start_with_the_connector_of_another_cache(name):
    resolved = resolve(str(PEERS / f"{name}.yaml"))
    check(resolved, has_cache=False)
    with pytest.raises(ProfileError, match=r"kv_connector` must be `DynamoConnector`, not") as caught:
        check(resolved)
    assert caught.value.hint.endswith("start vLLM without kvbm: `kvbm serve --baseline`")


def test_bench_checks_the_cache_only_of_arms_that_have_kvbm(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "kvbm_cli.bench.arms.problems_here",
        lambda resolved, sizing, *, has_cache: seen.append((resolved.name, has_cache)) or (),
    )
    path = str(PEERS / "native.yaml")
    require_startable(comparison_of(("vllm-cpu-demo",), (), ["baseline", f"baseline:{path}"]))
    assert sorted(seen) == [("native", False), ("vllm-cpu-demo", True)]
    with pytest.raises(ProfileError, match="OffloadingConnector"):
        require_startable(comparison_of(("vllm-cpu-demo",), (), [path]))


def test_options_are_defaults_and_what_is_given(compare):
    options = compare.options_of(["--pressure=3", "--dry-run"], has_lmcache=False)
    assert options == [
        *("--profile", "vllm-cpu-demo", "--compare", "baseline", "--compare", "baseline:bench/peers/native.yaml"),
        *("--workload", "bench/peers/workload.yaml", "--pairs", "2", "--pressure=3", "--dry-run"),
    ]
    assert "baseline:bench/peers/lmcache.yaml" in compare.options_of([], has_lmcache=True)


def test_the_run_directory_is_required(compare, capsys):
    assert compare.directory_of(["--pairs", "1", "--output=a/b"]) == Path("a/b")
    assert compare.directory_of(["--resume", "a"]) == Path("a")
    assert compare.directory_of(["--dry-run"]) is None
    with pytest.raises(SystemExit):
        compare.directory_of(["--pairs", "1"])
    assert "one of the arguments --dry-run --output --resume is required" in capsys.readouterr().err


def test_the_workload_has_six_sessions_at_the_lower_pressure():
    workload = load_workload(str(PEERS / "workload.yaml"))
    sizes = {pressure: workload.scaled(round(pressure * 34 * 128)) for pressure in (0.8, 2)}
    assert (sizes[0.8].users, sizes[2].users) == (6, 15)
    assert sizes[0.8].users * (workload.turns - 1) >= 12


def run_with(tmp_path, *records):
    lines = [
        json.dumps({"cell": "c", "pair": pair, "arm": arm, "phase": phase, "cached_tokens": cached})
        for pair, arm, phase, cached in records
    ]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_run_that_starts_warm_is_found(compare, tmp_path):
    cold = [(1, "baseline", "cold", 128), (1, "lmcache", "cold", 128), (1, "lmcache", "steady", 512)]
    compare.require_cold(run_with(tmp_path, *cold, (2, "baseline", "cold", 128), (2, "lmcache", "cold", 0)))
    with pytest.raises(RuntimeError, match="c, pair 2: not cold: lmcache"):
        compare.require_cold(run_with(tmp_path, *cold, (2, "baseline", "cold", 128), (2, "lmcache", "cold", 512)))


def test_an_interrupted_pair_without_a_baseline_is_not_judged(compare, tmp_path):
    compare.require_cold(run_with(tmp_path, (1, "lmcache", "cold", 512)))


def result_in(directory: Path, **changes):
    summary = {"complete": True, "explanation": "", "machine": {"time_unix_s": 0.0}, "versions": {}, **changes}
    directory.mkdir(exist_ok=True)
    (directory / "summary.json").write_text(json.dumps(summary))
    (directory / "report.html").write_text("<html></html>")
    return directory


def test_a_result_is_kept_with_its_date_machine_and_command(keep_result, tmp_path):
    paths = keep_result.keep(result_in(tmp_path / "run"), "it", "kvbm bench", results=tmp_path)
    content = json.loads(paths[0].read_text())
    assert (content["date"], content["command"]) == ("1970-01-01T00:00:00+00:00", "kvbm bench")
    assert content["machine_name"] == keep_result.machine()
    assert [path.name.removeprefix(keep_result.machine()) for path in paths] == ["-it.json", "-it.html"]


@pytest.mark.parametrize(
    ("changes", "report", "message"),
    [
        ({"complete": False, "explanation": "interrupted"}, "", "no complete result: interrupted"),
        ({"profile": "/home/me/p.yaml"}, "", "summary.json has a name of this machine: .*home/me"),
        ({}, "<p>{directory}</p>", r"report.html has a name of this machine"),
    ],
)
def test_a_result_that_must_not_be_published_is_refused(keep_result, tmp_path, changes, report, message):
    directory = result_in(tmp_path / "run", **changes)
    (directory / "report.html").write_text(report.format(directory=directory))
    with pytest.raises(SystemExit, match=message):
        keep_result.keep(directory, "it", "kvbm bench", results=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_committed_results_name_no_directory_of_a_machine(keep_result):
    files = sorted((BENCH / "results").iterdir())
    assert files
    directory = re.compile(r"(?<![\w.])/(?:root|home|work|Users)/")
    found = [path.name for path in files if directory.search(path.read_text(encoding="utf-8"))]
    assert found == []
    assert [path.name for path in files if path.stat().st_size > keep_result.MAX_REPORT_BYTES] == []
