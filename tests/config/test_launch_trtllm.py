"""The whole launch plan of TensorRT-LLM: the file of options, the command line, and the connector's configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbm.config.connector import resolve_connector
from kvbm.config.schema import Profile
from kvbm.engines.installation import Installation
from kvbm.engines.trtllm.launch import CONFIG_VARIABLE, OPTIONS_FILE, plan
from kvbm.engines.trtllm.versions import is_known

INSTALLED = Installation("1.2.0", "tensorrt_llm", "/venv/bin/trtllm-serve", has_kvbm=True)
WITHOUT_COMMAND = Installation("1.2.0", "tensorrt_llm", None, has_kvbm=True)
CONNECTOR = {
    "connector_module": "kvbm.trtllm_integration.connector",
    "connector_scheduler_class": "DynamoKVBMConnectorLeader",
    "connector_worker_class": "DynamoKVBMConnectorWorker",
}


def profile(
    arguments: dict[str, Any] | None = None, *, engine: dict[str, Any] | None = None, **sections: Any
) -> Profile:
    made = {"kind": "tensorrt-llm", "model": "Qwen/Qwen3-8B", "arguments": arguments or {}, **(engine or {})}
    return Profile.model_validate({"engine": made, "tiers": {"host": {"capacity": "2GiB"}}, **sections})


def content(made: Any) -> Any:
    (text,) = made.files.values()
    return yaml.safe_load(text)


def test_whole_plan() -> None:
    arguments = {"tensor_parallel_size": 2, "max_seq_len": 8192, "kv_cache_config": {"dtype": "fp8"}}
    made = plan(profile(arguments), connector=True, port=8000, installation=INSTALLED)
    assert made.argv == (
        *("/venv/bin/trtllm-serve", "Qwen/Qwen3-8B", "--backend", "pytorch", "--host", "127.0.0.1", "--port", "8000"),
        *("--extra_llm_api_options", OPTIONS_FILE),
    )
    assert content(made) == {
        "tensor_parallel_size": 2,
        "max_seq_len": 8192,
        "kv_cache_config": {"enable_block_reuse": True, "enable_partial_reuse": False, "dtype": "fp8"},
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "kv_connector_config": CONNECTOR,
    }
    assert (made.base_url, made.health_url) == ("http://127.0.0.1:8000", "http://127.0.0.1:8000/health")
    assert (made.model, made.libraries) == ("Qwen/Qwen3-8B", ("tensorrt_llm",))


def test_connector_gets_the_profile_through_the_variable_that_reaches_every_rank() -> None:
    wanted = profile(offload={"min_priority": 35}, transfer={"max_concurrent": 7})
    made = plan(wanted, connector=True, port=1)
    found = resolve_connector(
        {"kvbm": json.loads(made.environment[CONFIG_VARIABLE])}, {}, engine="tensorrt-llm", place=CONFIG_VARIABLE
    )
    assert found == wanted.connector_config()
    assert CONFIG_VARIABLE.startswith("TLLM")


def test_connector_is_the_only_difference_between_the_arms() -> None:
    wanted = profile({"max_seq_len": 4096, "cuda_graph_config": None}, engine={"environment": {"A": "1"}})
    kvbm, baseline = (plan(wanted, connector=has, port=1, installation=INSTALLED) for has in (True, False))
    assert kvbm.argv == baseline.argv
    assert "kv_connector_config" not in content(baseline)
    assert {**content(baseline), "kv_connector_config": CONNECTOR} == content(kvbm)
    assert kvbm.environment.keys() - baseline.environment.keys() == {CONFIG_VARIABLE}
    assert baseline.environment == {"A": "1"}


def test_null_and_nested_options_arrive_as_they_were_meant() -> None:
    given = {"cuda_graph_config": None, "moe_config": {"backend": "CUTLASS", "max_num_tokens": None}, "x": [1, "a"]}
    found = content(plan(profile(given), connector=False, port=1))
    assert {name: found[name] for name in given} == given


@pytest.mark.parametrize(
    ("python", "installation", "program"),
    [
        (None, None, ["trtllm-serve"]),
        (None, INSTALLED, ["/venv/bin/trtllm-serve"]),
        ("/venv/bin/python", INSTALLED, ["/venv/bin/trtllm-serve"]),
        ("/venv/bin/python", None, ["/venv/bin/python", "-m", "tensorrt_llm.commands.serve"]),
        ("/venv/bin/python", WITHOUT_COMMAND, ["/venv/bin/python", "-m", "tensorrt_llm.commands.serve"]),
    ],
)
def test_program(python: str | None, installation: Installation | None, program: list[str]) -> None:
    made = plan(profile(engine={"python": python}), connector=True, port=1, installation=installation)
    assert list(made.argv[: len(program) + 1]) == [*program, "Qwen/Qwen3-8B"]


def test_placed_plan_names_its_file_by_its_path(tmp_path: Path) -> None:
    made = plan(profile(), connector=True, port=1)
    placed = made.placed(tmp_path)
    assert placed.argv[-1] == str(tmp_path / OPTIONS_FILE)
    assert list(placed.files) == [str(tmp_path / OPTIONS_FILE)]
    assert list(placed.files.values()) == list(made.files.values())
    assert placed.argv[:-1] == made.argv[:-1]


def test_host_of_the_server_is_the_address_to_reach_it() -> None:
    made = plan(profile(server={"host": "0.0.0.0"}), connector=True, port=9)
    assert made.argv[-6:-4] == ("--host", "0.0.0.0")
    assert made.health_url == "http://127.0.0.1:9/health"


@pytest.mark.parametrize(
    ("metrics", "url"),
    [
        ({}, ""),
        ({"serve": True}, "http://127.0.0.1:6880/metrics"),
        ({"serve": True, "host": "0.0.0.0", "port": 7000}, "http://127.0.0.1:7000/metrics"),
        ({"serve": True, "port": 0}, ""),
    ],
)
def test_metrics_are_those_of_the_connector(metrics: dict[str, Any], url: str) -> None:
    assert plan(profile(metrics=metrics), connector=True, port=1).metrics_url == url
    assert plan(profile(metrics=metrics), connector=False, port=1).metrics_url == ""


@pytest.mark.parametrize(
    ("version", "known"),
    [("1.0.0", False), ("1.1.0rc5", True), ("1.2.0", True), ("1.3.0rc29", True), ("1.4.0rc1", True), ("1.5.0", False)],
)
def test_known_versions(version: str, known: bool) -> None:
    assert is_known(version) == known
