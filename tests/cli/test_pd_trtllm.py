"""`kvbm serve` of a disaggregated profile of TensorRT-LLM: stand-in engines behind a stand-in of its own server."""

import json
import signal
from itertools import count
from pathlib import Path

import psutil
import pytest
import yaml
from terminal import kvbm_here
from test_manage import status
from test_serve import RUNS, serving
from test_serve_trtllm import PROFILE
from test_serve_trtllm import home as home  # the fixture
from waiting import is_gone

from kvbm.config.load import load
from kvbm.config.schema import Profile
from kvbm.errors import EnvironmentProblem, ProfileError
from kvbm_cli.disaggregated.plan import DisaggregatedPlan
from kvbm_cli.disaggregated.trtllm_plan import trtllm_plan
from kvbm_cli.package_data import profiles_directory

BASE = """\
engine:
  kind: tensorrt-llm
  model: Qwen/Qwen3-8B
  arguments: {tensor_parallel_size: 2}
tiers: {host: {capacity: 1GiB}}
metrics: {serve: true}
server: {host: 0.0.0.0}
"""


@pytest.fixture
def pd(home):
    (home / "mine.yaml").write_text(f"{PROFILE}disaggregated: {{prefill: 2, decode: 1}}\n")
    return home


def profile_of(directory: Path, text: str, *overrides: str) -> Profile:
    (directory / "made.yaml").write_text(text)
    return load(str(directory / "made.yaml"), directories=[], overrides=overrides).profile


def plan_of(directory: Path, *overrides: str, **environment: str) -> DisaggregatedPlan:
    profile = profile_of(directory, f"{BASE}disaggregated: {{prefill: 2, decode: 1}}\n", *overrides)
    return trtllm_plan(profile, port=8000, ports=count(9000), environment=environment)


def contents(made: DisaggregatedPlan) -> dict[str, dict[str, object]]:
    plans = [*(one for _, one in made.engines), made.proxy]
    return {name: yaml.safe_load(text) for one in plans for name, text in one.files.items()}


def test_every_program_has_a_file_of_its_own(tmp_path):
    made = plan_of(tmp_path)
    found = contents(made)
    assert list(found) == ["prefill-0.yaml", "prefill-1.yaml", "decode-0.yaml", "disaggregated.yaml"]
    assert [one.argv[-1] for _, one in made.engines] == list(found)[:3]
    assert made.proxy.argv[-3:] == ("disaggregated", "-c", "disaggregated.yaml")
    assert found["disaggregated.yaml"] == {
        "hostname": "0.0.0.0",
        "port": 8000,
        "backend": "pytorch",
        "context_servers": {"num_instances": 2, "urls": ["127.0.0.1:9000", "127.0.0.1:9001"]},
        "generation_servers": {"num_instances": 1, "urls": ["127.0.0.1:9002"]},
    }


def test_only_prefill_engines_have_the_connector(tmp_path):
    made = plan_of(tmp_path)
    found = contents(made)
    assert ["kv_connector_config" in found[f"{name}.yaml"] for name in ("prefill-0", "prefill-1", "decode-0")] == [
        True,
        True,
        False,
    ]
    variables = [one.environment.get("TLLM_KVBM_CONFIG") for _, one in made.engines]
    assert variables[2] is None
    ports = [json.loads(text)["metrics"]["port"] for text in variables[:2] if text is not None]
    assert ports == [6880, 6881]
    assert all(found[f"{name}.yaml"]["cache_transceiver_config"] == {"backend": "DEFAULT"} for name in PLANNED)


PLANNED = ("prefill-0", "prefill-1", "decode-0")


def test_profile_overrides_the_transceiver(tmp_path):
    found = contents(plan_of(tmp_path, "engine.arguments.cache_transceiver_config.backend=UCX"))
    assert {found[f"{name}.yaml"]["cache_transceiver_config"]["backend"] for name in PLANNED} == {"UCX"}  # type: ignore[index]


def test_each_engine_gets_gpus_for_its_ranks(tmp_path):
    made = plan_of(tmp_path, CUDA_VISIBLE_DEVICES="7,6,5,4,3,2,1")
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for _, one in made.engines] == ["7,6", "5,4", "3,2"]
    with pytest.raises(EnvironmentProblem, match="the engines need 6 GPUs, but CUDA_VISIBLE_DEVICES lists 2"):
        plan_of(tmp_path, CUDA_VISIBLE_DEVICES="0,1")


def test_shipped_profile_and_the_kinds_that_can_be_split(tmp_path):
    shipped = load("trtllm-pd-1p1d", directories=[profiles_directory()]).profile
    assert [name for name, _ in trtllm_plan(shipped, port=1, ports=count(9)).engines] == ["prefill 0", "decode 0"]
    embedded = "engine: {model: m}\ntiers: {host: {blocks: 1}}\ndisaggregated: {prefill: 1, decode: 1}\n"
    with pytest.raises(ProfileError, match=r"requires `engine\.kind` `vllm` or `tensorrt-llm`"):
        profile_of(tmp_path, embedded)


def test_all_start_and_a_signal_ends_all(pd):
    with serving(pd) as program:
        processes = psutil.Process(program.pid).children(recursive=True)
        (run,) = status(pd)
        directory = pd / RUNS / str(run["run"])
        assert sorted(file.name for file in directory.glob("*.yaml")) == [
            *("decode-0.yaml", "disaggregated.yaml", "prefill-0.yaml", "prefill-1.yaml", "profile.yaml"),
        ]
        assert program.url.endswith(f":{yaml.safe_load((directory / 'disaggregated.yaml').read_text())['port']}")
        assert program.code_after(signal.SIGTERM) == 0
    assert all(is_gone(process.pid) for process in processes)


def test_dry_run_as_json_has_every_file(pd):
    plan = json.loads(kvbm_here("serve", "-p", "./mine.yaml", "--dry-run", "--json", home=pd).stdout)
    assert list(plan["engines"]) == ["prefill 0", "prefill 1", "decode 0"]
    assert list(plan["files"]) == ["disaggregated.yaml"]
    assert [list(one["files"]) for one in plan["engines"].values()] == [[f"{name}.yaml"] for name in PLANNED]
