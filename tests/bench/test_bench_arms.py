"""Engines of the arms: which profile, which port, which room, and a disk tier of their own."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import obstore
import pytest
from bench_rig import WORKLOAD, comparison
from bench_rig import planned as planned  # the fixture
from mock_engine import MockEngine, Options

from kvbm.engines.table import load
from kvbm.errors import EngineError, EnvironmentProblem, UsageError
from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.stores.obstore import connection
from kvbm_cli.bench import engines as arms
from kvbm_cli.bench.arms import Arm, Comparison, comparison_of
from kvbm_cli.bench.command import _surroundings  # which are written before engines start
from kvbm_cli.bench.engines import ArmEngines, NeededRoom, fresh_disk, fresh_shared, running_server, with_room
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.resolve import resolve

ROOM = NeededRoom(WORKLOAD.working_set_tokens, WORKLOAD.users)


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


@pytest.mark.parametrize(
    ("name", "arguments", "ranks"),
    [
        ("demo", {}, None),
        ("vllm", {"tensor_parallel_size": 4, "data_parallel_size": 2}, 8),
        ("sglang", {"tp_size": 2, "pp_size": 2}, 4),
    ],
)
def test_the_plan_has_the_number_of_accelerators_of_an_arm(name, arguments, ranks):
    overrides = tuple(f"engine.arguments.{key}={value}" for key, value in arguments.items())
    resolved = load(name, directories=(profiles_directory(),), overrides=overrides)
    assert Arm("kvbm", "kvbm", resolved).to_json().get("ranks") == ranks


def test_without_a_disk_tier_the_profile_stays_as_it_is():
    demo = load("demo", directories=(profiles_directory(),)).profile
    with fresh_disk(demo) as same:
        assert same is demo


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match=r"tmp|file"), fresh_disk(profile(tmp_path / "file")):
        pass


def test_a_disk_that_an_existing_cache_fills_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("kvbm_cli.bench.engines.shutil.disk_usage", lambda path: SimpleNamespace(free=2 << 30))
    overrides = ("tiers.disk.capacity=1GiB", "tiers.disk.fit=true", f"tiers.disk.directory={tmp_path}")
    fitting = load("demo", directories=(profiles_directory(),), overrides=overrides).profile
    with pytest.raises(EnvironmentProblem, match="has no space to spare"), fresh_disk(fitting):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_has_a_place_of_its_own_in_the_shared_tier_and_leaves_nothing(tmp_path):
    url = f"file://{tmp_path}/a%20b/objects"
    before = load("demo", directories=(profiles_directory(),), overrides=(f"tiers.shared.url={url}",)).profile
    (tmp_path / "a b").mkdir()
    with fresh_shared(before) as first, fresh_shared(before) as second:
        places = {one.tiers.shared.url for one in (first, second)}
        assert len(places) == 2
        assert all(place.startswith(url) for place in places)
        (tmp_path / "a b/objects" / first.tiers.shared.url.rpartition("/")[2]).mkdir()
    assert list((tmp_path / "a b/objects").iterdir()) == []


def test_the_objects_of_a_run_are_deleted_from_a_store(tmp_path):
    url = f"file://{tmp_path}/objects"
    keys, store = KeySpace(bytes(16)), connection(url)(5.0)
    for key in (keys.facts, keys.key(b"0123456789abcdef")):
        obstore.put(store, key, b"{}")
    arms.delete_objects(url)
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_the_floor_has_room_for_the_working_set_and_its_prefix_cache_on():
    overrides = ["engine.arguments.num_blocks=100", "engine.arguments.prefix_caching=false"]
    tight = resolve("demo", overrides=overrides).profile
    arguments = with_room(tight, ROOM).engine.arguments
    assert arguments.num_blocks * arguments.block_size > 1.2 * WORKLOAD.working_set_tokens
    assert arguments.prefix_caching
    assert tight.engine.arguments.num_blocks == 100


def own_blocks(*overrides):
    model = "engine.model=synthetic:vllm-25m"
    return comparison_of(("vllm-cpu-demo",), [model, "engine.environment.VLLM_CPU_KVCACHE_SPACE=1", *overrides], [])


def blocks_of(engines, arm, directory, monkeypatch, room):
    """The blocks that the engine of an arm is started with."""
    started = []
    with monkeypatch.context() as patch:
        patch.setattr(arms, "launched", lambda profile, log, *, has_kvbm: started.append(profile) or nullcontext())
        with engines(arm, directory, room):
            pass
    return started[0].engine.arguments.num_gpu_blocks_override


def test_the_floor_has_room_in_each_group_of_a_hybrid_model(monkeypatch, tmp_path):
    """Every 256 tokens take a block of attention, and may take one of each of the three state groups."""
    on_cpu = ["engine.environment.VLLM_CPU_KVCACHE_SPACE=1"]
    engines = ArmEngines(comparison_of(("vllm-hybrid-cpu-demo",), on_cpu, []))
    room = NeededRoom(8320, 5)
    blocks = [blocks_of(engines, name, tmp_path, monkeypatch, room) for name in ("baseline", "floor")]
    assert blocks == [34, 4 * (41 + 5) + 1]


@pytest.mark.parametrize("length", [32768, None])
def test_a_floor_whose_own_g1_is_not_known_holds_the_longest_sequence(monkeypatch, tmp_path, length):
    """vLLM refuses to start with fewer blocks than a sequence takes, of which the model has 32,768 tokens."""
    overrides = ["engine.model=synthetic:vllm-25m", "engine.arguments.block_size=16", "tiers.host.capacity=1GiB"]
    overrides += ["engine.python=null", f"engine.arguments.max_model_len={length or 'null'}"]
    engines = ArmEngines(comparison_of(("vllm",), overrides, []))
    assert blocks_of(engines, "recording", tmp_path, monkeypatch, None) is None
    assert blocks_of(engines, "floor", tmp_path, monkeypatch, NeededRoom(2000, 1)) == 2048 + 2 + 1
    assert blocks_of(engines, "floor", tmp_path, monkeypatch, NeededRoom(32_000, 1)) == 2500 + 1 + 1


def test_an_engine_with_enough_room_gets_no_override(monkeypatch, tmp_path):
    compared = own_blocks("engine.arguments.num_gpu_blocks_override=100")
    for arm in ("floor", "recording"):
        assert blocks_of(ArmEngines(compared), arm, tmp_path, monkeypatch, NeededRoom(9000, 5)) == 100
        assert blocks_of(ArmEngines(compared), arm, tmp_path, monkeypatch, None) == 100


def test_without_a_floor_the_recording_has_the_engine_without_kvbm_as_it_is(monkeypatch, tmp_path):
    compared = replace(own_blocks("engine.arguments.num_gpu_blocks_override=20"), floor=None)
    assert [arm.name for arm in compared.arms] == ["baseline", "kvbm"]
    assert blocks_of(ArmEngines(compared), "recording", tmp_path, monkeypatch, NeededRoom(90_000, 5)) == 20


def test_no_floor_is_an_option():
    assert comparison_of(("demo",), (), (), has_floor=False).floor is None


def test_engines_of_a_public_profile_listen_on_this_machine_only(monkeypatch, tmp_path):
    """vLLM gets its development mode, in which a client can call methods of the engine."""
    plans = []

    def start(plan, *, log_path):
        plans.append(plan)
        raise EngineError("not started")

    monkeypatch.setattr(arms.EngineProcess, "start", start)
    for name in ("demo", "vllm-cpu-demo"):
        compared = comparison_of((name,), ("server.host=0.0.0.0",), ())
        for arm in ("baseline", "kvbm"):
            with pytest.raises(EngineError, match="not started"), ArmEngines(compared)(arm, tmp_path, ROOM):
                pass
    assert {plan.argv[plan.argv.index("--host") + 1] for plan in plans} == {"127.0.0.1"}
    assert [plan.environment.get("VLLM_SERVER_DEV_MODE") for plan in plans] == [None, None, "1", "1"]


def test_arms_are_processes_of_their_own_which_end_with_the_arm(tmp_path, planned):
    with ArmEngines(comparison())("kvbm", tmp_path, ROOM) as engine:
        assert not engine.has_ended()
        assert engine.startup_s > 0
        assert engine.model == "mock"
        assert Path(f"/proc/{engine.pid}").exists()
    assert engine.has_ended()
    assert (tmp_path / "engine.log").exists()


def test_profiles_run_with_the_block_manager_and_a_free_metrics_port(tmp_path, planned):
    """The baseline and the floor run without it, the floor with room for everything."""
    another = tmp_path / "another.yaml"
    another.write_text("extends: demo\nengine: {arguments: {num_blocks: 80}}\n")
    compared = comparison_of(("demo",), ["engine.arguments.num_blocks=60"], ["baseline", str(another)])
    engines = ArmEngines(compared)
    for name in ("recording", *(arm.name for arm in compared.arms)):
        with engines(name, tmp_path, NeededRoom(16_000, 3)):
            pass
    room = planned[0][0]
    assert room > 1000
    by_name = dict(zip(("recording", *(arm.name for arm in compared.arms)), planned, strict=True))
    assert by_name == {
        "recording": (room, False, 0),
        "baseline": (60, False, 0),
        "demo": (60, True, 6880),
        "another": (80, True, 0),
        "floor": (room, False, 0),
    }


def test_the_engine_of_a_compared_profile_runs_without_kvbm_with_baseline_before_its_name(tmp_path, planned):
    other = tmp_path / "other.yaml"
    other.write_text("extends: demo\nengine: {arguments: {num_blocks: 80}}\n")
    compared = comparison_of(("demo",), (), [f"baseline:{other}"])
    with ArmEngines(compared)(compared.references[0].name, tmp_path, ROOM):
        pass
    assert planned == [(80, False, 0)]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_running_server_is_used_as_it_is(suffix, monkeypatch):
    monkeypatch.setenv("KVBM_BENCH_API_KEY", "secret")
    with MockEngine(Options(model="theirs")) as server:
        engine = running_server(server.url + suffix)
        assert (engine.base_url, engine.model, engine.pid) == (server.url, "theirs", None)
        assert engine.headers == {"Authorization": "Bearer secret"}
        assert not engine.has_ended()
        with ArmEngines(comparison_of((), (), [server.url]))("url-1", Path(), ROOM) as opened:
            assert opened.base_url == server.url


@pytest.mark.parametrize("key", ["a\nb", "a b", "ü"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key, monkeypatch):
    monkeypatch.setenv("KVBM_BENCH_API_KEY", key)
    with pytest.raises(UsageError, match="`KVBM_BENCH_API_KEY` must be ASCII") as caught:
        running_server("http://127.0.0.1:9")
    assert key not in str(caught.value)


def test_results_hold_no_secret_of_the_engine():
    one, other = (resolve("demo", overrides=[f"engine.environment.HF_TOKEN={token}"]) for token in ("hf_abc", "hf_xyz"))
    differences = {"engine.environment.HF_TOKEN": ("hf_abc", "hf_xyz")}
    arms = [Arm("kvbm", "kvbm", one), Arm("other", "profile", other, differences=differences)]
    surroundings = _surroundings(Comparison(arms[0], (arms[1],), None))
    written = json.dumps([*(arm.to_json() for arm in arms), surroundings["profile"]])
    assert "hf_abc" not in written
    assert "hf_xyz" not in written
    assert written.count("***") == 3
