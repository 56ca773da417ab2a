"""Variables of NVIDIA's block manager: every name that it reads or documents. Mistakes: test_profile_mistakes.py."""

from __future__ import annotations

import pytest
from test_load import BASE, HONOURED, load_text

from kvbm.config.connector import resolve_connector
from kvbm.config.document import entry_at
from kvbm.config.key_list import keys
from kvbm.config.schema import ConnectorConfig
from kvbm.config.variables import STORE_VARIABLES, VARIABLES, read_variables, variable_of
from kvbm.engines.table import load
from kvbm.errors import ProfileError
from kvbm.tiers.shared.stores.obstore import OBJECT_VARIABLES

C, D = "DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_DISK_CACHE_GB"
BUCKET, ENABLED, ENDPOINT = (f"DYN_KVBM_OBJECT_{name}" for name in ("BUCKET", "ENABLED", "ENDPOINT"))
BLOCKS, BATCH = "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE"

# What the wheel of NVIDIA reads (kvbm 1.6.1), and has no effect here. Those that set a key are `HONOURED`.
IDLE_HERE = (
    *("DYN_KVBM_LEADER_ZMQ_HOST", "DYN_KVBM_LEADER_ZMQ_PUB_PORT", "DYN_KVBM_LEADER_ZMQ_ACK_PORT"),
    *("DYN_KVBM_DISABLE_WRITE_COMBINED", "DYN_KVBM_NCCL_MLA_MODE", "DYN_KVBM_NCCL_MAX_CTAS"),
    *("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE"),
    *("DYN_KVBM_TRTLLM_ZMQ_PORT", "DYN_RUNTIME_ENABLED_KVBM", "DYN_FATBIN_PATH"),
)
# What is declared or documented there and read by nothing, and what only its branches read.
READ_NOWHERE = (
    "DYN_KVBM_OBJECT_NUM_BLOCKS",
    "DYN_KVBM_TRANSFER_BATCH_SIZE",
    "DYN_KVBM_ENABLE",
    "DYN_KVBM_NIXL_BACKEND_GDS_MT",
    "DYN_KVBM_HOST_MEMORY_PROVIDER",
    "DYN_KVBM_G2PB_ADMISSION_POLICY",
)
KEYS = {key.path for key in keys(ConnectorConfig)}


@pytest.mark.parametrize("name", [*HONOURED, *IDLE_HERE])
def test_name_that_the_wheel_reads_is_in_the_table(name: str) -> None:
    variable = variable_of(name)
    assert variable is not None
    assert (variable.key is None, variable.key is None or variable.key in KEYS) == (name in IDLE_HERE, True)
    assert variable.about


@pytest.mark.parametrize("name", [*READ_NOWHERE, *IDLE_HERE])
@pytest.mark.parametrize("value", ["1", "true", "", "-5", "not this"])
def test_name_without_an_effect_is_a_warning_whatever_its_value(name: str, value: str) -> None:
    document, warnings = read_variables({name: value})
    assert document == {}
    assert len(warnings) == 1
    assert warnings[0].startswith(f"`{name}` has no effect: ")
    assert not value or len(value) < 3 or value == "true" or value not in warnings[0]


def test_table_has_no_other_names() -> None:
    known = {*HONOURED, ENABLED, *IDLE_HERE, *STORE_VARIABLES, *READ_NOWHERE, "DYN_KVBM_NIXL_BACKEND_<NAME>"}
    assert {variable.name for variable in VARIABLES} <= known


def test_two_variables_of_one_key_may_agree() -> None:
    document, _ = read_variables({"DYN_KVBM_ENABLE_RECORD": "1", "ENABLE_KVBM_RECORD": "true"})
    entry = entry_at(document, ["metrics", "record"])
    assert entry is not None
    assert entry.value is True


def test_names_that_are_not_of_the_block_manager_are_left_alone() -> None:
    assert read_variables({"DYN_LOG": "debug", "KVBM_PROFILE": "x", "PATH": "/bin"}) == ({}, ())


# -- a size of 0 -------------------------------------------------------------------------------------------------------

WITH_DISK = f"{BASE}  disk: {{capacity: 10GB, directory: /mnt/kv}}\n"


def test_zero_takes_the_disk_tier_of_a_profile_away_and_says_so(tmp_path) -> None:
    resolved = load_text(tmp_path, WITH_DISK, variables={"DYN_KVBM_DISK_CACHE_GB": "0.0"})
    assert resolved.profile.tiers.disk is None
    assert resolved.profile.tiers.host is not None
    assert resolved.warnings == ("`DYN_KVBM_DISK_CACHE_GB=0.0` removes `tiers.disk` of the profile",)


def test_zero_takes_the_host_tier_away_and_leaves_a_disk_alone(tmp_path) -> None:
    resolved = load_text(tmp_path, WITH_DISK, variables={"DYN_KVBM_CPU_CACHE_GB": "0"})
    assert resolved.profile.tiers.host is None
    assert resolved.profile.tiers.disk is not None


def test_zero_says_nothing_where_there_is_no_such_tier(tmp_path) -> None:
    assert load_text(tmp_path, BASE, variables={"DYN_KVBM_DISK_CACHE_GB": "0"}).warnings == ()


def test_a_number_of_blocks_wins_over_zero_gigabytes(tmp_path) -> None:
    variables = {"DYN_KVBM_DISK_CACHE_GB": "0", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "7"}
    disk = load_text(tmp_path, WITH_DISK, variables=variables).profile.tiers.disk
    assert disk is not None
    assert disk.blocks == 7


def test_an_override_brings_a_tier_back(tmp_path) -> None:
    variables = {"DYN_KVBM_DISK_CACHE_GB": "0"}
    disk = load_text(tmp_path, WITH_DISK, "tiers.disk.capacity=3GB", variables=variables).profile.tiers.disk
    assert disk is not None
    assert (disk.capacity, disk.directory) == (3 * 10**9, "~/.cache/kvbm")


def test_what_else_is_said_of_a_disk_of_size_zero_is_idle(tmp_path) -> None:
    variables = {"DYN_KVBM_DISK_CACHE_GB": "0", "DYN_KVBM_DISK_CACHE_DIR": "/mnt"}
    assert load_text(tmp_path, BASE, variables=variables).warnings == (
        "`DYN_KVBM_DISK_CACHE_DIR` has no effect: `DYN_KVBM_DISK_CACHE_GB=0`",
    )


# -- the shared tier ---------------------------------------------------------------------------------------------------

WITH_SHARED = f"{BASE}  shared: {{url: 's3://team'}}\n"
SECRETS = {"DYN_KVBM_OBJECT_ACCESS_KEY": "AKIA-1", "DYN_KVBM_OBJECT_SECRET_KEY": "hunter2"}
NO_S3 = "has no effect: there is no shared tier in S3 without `DYN_KVBM_OBJECT_BUCKET` or `tiers.shared.url`"


def test_the_client_of_the_store_reads_the_variables_that_set_no_key() -> None:
    assert {*OBJECT_VARIABLES} == STORE_VARIABLES


def test_bucket_is_a_shared_tier_and_credentials_appear_nowhere(tmp_path) -> None:
    variables = {BUCKET: "kv-cache", ENDPOINT: "http://ceph:7480", **SECRETS}
    resolved = load_text(tmp_path, BASE, variables=variables)
    assert resolved.profile.tiers.shared is not None
    assert resolved.profile.tiers.shared.url == "s3://kv-cache"
    assert resolved.warnings == ()
    assert not any(text in repr(resolved) for text in ("AKIA-1", "hunter2"))
    config = resolve_connector({}, {C: "1", **variables}, engine="vllm")
    assert config.tiers.shared == resolved.profile.tiers.shared


def test_shared_tier_is_switched_off_with_its_bucket(tmp_path) -> None:
    resolved = load_text(tmp_path, WITH_SHARED, variables={ENABLED: "0", BUCKET: "kv-cache", **SECRETS})
    assert resolved.profile.tiers.shared is None
    assert resolved.warnings == (
        f"`{BUCKET}` has no effect: `{ENABLED}=0`",
        f"`{ENABLED}=0` removes `tiers.shared` of the profile",
        *(f"`{name}` {NO_S3}" for name in SECRETS),
    )


@pytest.mark.parametrize(("text", "names"), [(BASE, [ENABLED, *SECRETS]), (WITH_SHARED, [])])
def test_settings_of_a_store_need_a_store_in_s3(tmp_path, text: str, names: list[str]) -> None:
    resolved = load_text(tmp_path, text, variables={ENABLED: "1", **SECRETS})
    assert resolved.warnings == tuple(f"`{name}` {NO_S3}" for name in names)


def test_an_endpoint_with_credentials_is_refused_without_showing_them() -> None:
    with pytest.raises(ProfileError) as caught:
        resolve_connector({}, {C: "1", ENDPOINT: "http://me:hunter2@ceph"}, engine="vllm")
    assert "without credentials, not `http://***@ceph`" in caught.value.message
    assert "hunter2" not in caught.value.message


# -- a value of a file that a variable replaces ------------------------------------------------------------------------

OVERRULED = {
    "capacity": ("host: {capacity: 1GB}", {C: "2"}, f"`{C}=2` overrides `tiers.host.capacity: 1GB`"),
    "the same in another unit": ("host: {capacity: 1000MB}", {C: "1"}, None),
    "blocks lose to a capacity": ("host: {blocks: 7}", {C: "2"}, f"`{C}=2` overrides `tiers.host.blocks: 7`"),
    "capacity loses to blocks": (
        "host: {capacity: 1GB}",
        {BLOCKS: "7"},
        f"`{BLOCKS}=7` overrides `tiers.host.capacity: 1GB`",
    ),
    "the same blocks": ("host: {capacity: 1GB, blocks: 7}", {BLOCKS: "7"}, None),
    "no tier": ("host: {capacity: 1GB}\n  disk: null", {D: "2"}, f"`{D}=2` overrides `tiers.disk: null`"),
    "nothing is said": ("host: {capacity: 1GB}", {"DYN_KVBM_METRICS": "1"}, None),
    "a boolean": (
        "host: {capacity: 1GB}\nmetrics: {serve: false}",
        {"DYN_KVBM_METRICS": "1"},
        "`DYN_KVBM_METRICS=1` overrides `metrics.serve: false`",
    ),
}


@pytest.mark.parametrize("name", OVERRULED)
def test_variable_that_replaces_a_value_of_the_users_file_is_told_of(tmp_path, name: str) -> None:
    text, variables, told = OVERRULED[name]
    (tmp_path / "parent.yaml").write_text(f"engine: {{model: m}}\ntiers:\n  {text}\n")
    (tmp_path / "mine.yaml").write_text("extends: ./parent.yaml\n")
    warnings = load(str(tmp_path / "mine.yaml"), directories=[], variables=variables).warnings
    assert [warning.partition(" (")[0] for warning in warnings] == ([] if told is None else [told])
    assert all(f"{tmp_path}/parent.yaml:" in warning for warning in warnings)


def test_variable_may_replace_a_value_of_a_shipped_profile_and_lose_to_an_override(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("engine: {model: m}\ntiers: {host: {capacity: 1GB}}\n")
    assert load("mine", directories=[tmp_path], variables={C: "2"}).warnings == ()
    overridden = load(
        str(tmp_path / "mine.yaml"), directories=[], variables={C: "2"}, overrides=["tiers.host.capacity=3GB"]
    )
    assert overridden.warnings == ()


def test_disk_without_host_memory_under_a_bare_command() -> None:
    config = resolve_connector({}, {"DYN_KVBM_CPU_CACHE_GB": "0", "DYN_KVBM_DISK_CACHE_GB": "2.5"}, engine="vllm")
    assert config.tiers.host is None
    assert config.tiers.disk is not None
    assert config.tiers.disk.capacity == 2_500_000_000


def test_port_that_nothing_serves_on_is_idle() -> None:
    from kvbm.config.variables import drop_unused

    document, _ = read_variables({"DYN_KVBM_METRICS_PORT": "7000", "DYN_KVBM_METRICS": "0"})
    why = "there is no metrics server without `DYN_KVBM_METRICS=1` or `metrics.serve`"
    assert drop_unused(document, {}) == (f"`DYN_KVBM_METRICS_PORT` has no effect: {why}",)
