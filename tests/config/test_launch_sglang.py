"""The whole launch plan of SGLang: the command line, and the configuration of the storage in it."""

import json
import sys
from typing import Any

import pytest

from kvbm.config.connector import resolve_connector
from kvbm.config.schema import Profile
from kvbm.engines.sglang.launch import QUICK_HEALTH, plan
from kvbm.engines.sglang.versions import is_known
from kvbm.engines.table import kind_of

ALWAYS = ("--enable-metrics", "--enable-cache-report")


def profile(
    arguments: dict[str, Any] | None = None, *, engine: dict[str, Any] | None = None, **sections: Any
) -> Profile:
    made = {"kind": "sglang", "model": "Qwen/Qwen3-8B", "arguments": arguments or {}, **(engine or {})}
    return Profile.model_validate({"engine": made, "tiers": {"disk": {"capacity": "2GiB"}}, **sections})


def storage(made: Any) -> Any:
    return json.loads(made.argv[made.argv.index("--hicache-storage-backend-extra-config") + 1])


def test_whole_plan() -> None:
    made = plan(profile({"tp_size": 2, "context_length": 8192, "enable_p2p_check": True}), connector=False, port=8000)
    assert made.argv == (
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3-8B"),
        *("--host", "127.0.0.1", "--port", "8000", *ALWAYS),
        *("--context-length", "8192", "--page-size", "64", "--tp-size", "2"),
        *("--enable-hierarchical-cache", "--enable-p2p-check"),
    )
    assert (made.base_url, made.health_url) == ("http://127.0.0.1:8000", "http://127.0.0.1:8000/health")
    assert (made.model, made.libraries, made.environment) == ("Qwen/Qwen3-8B", ("sglang",), QUICK_HEALTH)


def test_the_profile_decides_whether_a_request_for_the_health_generates_a_token() -> None:
    name = next(iter(QUICK_HEALTH))
    made = plan(profile(engine={"environment": {name: "1", "A": "b"}}), connector=True, port=8000)
    assert made.environment == {name: "1", "A": "b"}


def test_the_storage_is_the_only_difference_between_the_arms_and_has_the_whole_configuration() -> None:
    wanted = profile({"hicache_storage_backend_extra_config": {"prefetch_threshold": 64}}, metrics={"serve": True})
    kvbm, baseline = (plan(wanted, connector=has, port=1) for has in (True, False))
    assert kvbm.argv[: len(baseline.argv)] == baseline.argv
    assert kvbm.argv[len(baseline.argv) :][:2] == ("--hicache-storage-backend", "dynamic")
    extra = storage(kvbm)
    assert resolve_connector({"kvbm": extra.pop("kvbm")}, {}, engine="sglang") == wanted.connector_config()
    assert extra == {
        "backend_name": "kvbm",
        "module_path": "kvbm.sglang_integration.storage",
        "class_name": "KvbmHiCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": 64,
    }
    assert (kvbm.metrics_url, baseline.metrics_url) == ("http://127.0.0.1:6880/metrics", "")


def test_an_sglang_to_compare_with_may_have_no_host_memory_of_its_own() -> None:
    assert "--enable-hierarchical-cache" in plan(profile(), connector=False, port=1).argv
    without = plan(profile({"enable_hierarchical_cache": False}), connector=False, port=1).argv
    assert "--enable-hierarchical-cache" not in without


def test_flags_that_are_false_are_left_out_and_negative_numbers_are_no_flags() -> None:
    argv = plan(profile({"disable_cuda_graph": False, "random_seed": -1}), connector=False, port=1).argv
    assert "--disable-cuda-graph" not in argv
    assert "--random-seed=-1" in argv


def test_a_synthetic_model_is_served_without_the_colon_that_sglang_refuses() -> None:
    demo = profile(engine={"model": "synthetic:vllm-25m"})
    argv = kind_of(demo).launch_plan(demo, connector=True, port=1).argv
    assert argv[argv.index("--served-model-name") + 1] == demo.engine.served_name == "vllm-25m"


def test_stand_ins_for_kernels_are_a_module_of_kvbm() -> None:
    made = plan(profile(engine={"cpu_stand_ins": True, "python": "/v/bin/python"}), connector=True, port=1)
    assert made.argv[:3] == ("/v/bin/python", "-m", "kvbm.engines.sglang.cpu_server")


@pytest.mark.parametrize(
    ("version", "known"), [("0.5.23", True), ("0.5.23+cpu", True), ("0.5.22", False), ("0.5.24", False)]
)
def test_known_versions(version: str, known: bool) -> None:
    assert is_known(version) is known
