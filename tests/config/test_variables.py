"""The variables of NVIDIA's block manager: every name that it reads or documents, and each way to get one wrong."""

from __future__ import annotations

import pytest
from test_load import BASE, load_text

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

# What the wheel of NVIDIA reads (kvbm 1.6.1), with the key that it sets here; None for what has no effect here.
READ_THERE = {
    "DYN_KVBM_CPU_CACHE_GB": "tiers.host.capacity",
    "DYN_KVBM_DISK_CACHE_GB": "tiers.disk.capacity",
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "tiers.host.blocks",
    "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "tiers.disk.blocks",
    "DYN_KVBM_DISK_CACHE_DIR": "tiers.disk.directory",
    "DYN_KVBM_DISK_ALLOCATOR_TYPE": "tiers.disk.allocator",
    "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "tiers.disk.zerofill",
    "DYN_KVBM_DISK_DISABLE_O_DIRECT": "tiers.disk.o_direct",
    "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "offload.to_disk",
    "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "offload.min_priority",
    "DYN_KVBM_MAX_CONCURRENT_TRANSFERS": "transfer.max_concurrent",
    "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": "transfer.batch_blocks",
    "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": "transfer.init_timeout_s",
    "DYN_KVBM_LEADER_ZMQ_HOST": None,
    "DYN_KVBM_LEADER_ZMQ_PUB_PORT": None,
    "DYN_KVBM_LEADER_ZMQ_ACK_PORT": None,
    "DYN_KVBM_METRICS": "metrics.serve",
    "DYN_KVBM_METRICS_PORT": "metrics.port",
    "DYN_KVBM_CACHE_STATS_MAX_REQUESTS": "metrics.window_requests",
    "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": "metrics.log_interval_s",
    "DYN_KVBM_ENABLE_RECORD": "metrics.record",
    "ENABLE_KVBM_RECORD": "metrics.record",
    "DYN_KVBM_DISABLE_WRITE_COMBINED": None,
    "DYN_KVBM_ENABLE_NUMA": "transfer.numa",
    "DYN_MEMORY_DISABLE_NUMA": "transfer.numa",
    "DYN_KVBM_NCCL_MLA_MODE": None,
    "DYN_KVBM_NCCL_MAX_CTAS": None,
    "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": None,
    "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE": None,
    "DYN_KVBM_TRTLLM_ZMQ_PORT": None,
    "DYN_RUNTIME_ENABLED_KVBM": None,
    "DYN_FATBIN_PATH": None,
}
# What is documented there and read only here.
READ_HERE = {"DYN_KVBM_OBJECT_BUCKET": "tiers.shared.url", "DYN_KVBM_OBJECT_ENABLED": "tiers.shared"}
# What is declared or documented there and read by nothing, and what only its branches read.
READ_NOWHERE = (
    "DYN_KVBM_OBJECT_NUM_BLOCKS",
    "DYN_KVBM_TRANSFER_BATCH_SIZE",
    "DYN_KVBM_ENABLE",
    "DYN_KVBM_NIXL_BACKEND_GDS_MT",
    "DYN_KVBM_HOST_MEMORY_PROVIDER",
    "DYN_KVBM_G2PB_ADMISSION_POLICY",
)
OURS = {"DYN_KVBM_METRICS_HOST"}
KEYS = {key.path for key in keys(ConnectorConfig)}


@pytest.mark.parametrize("name", READ_THERE)
def test_name_that_the_wheel_reads_is_in_the_table(name: str) -> None:
    variable = variable_of(name)
    assert variable is not None
    assert (variable.key, variable.key is None or variable.key in KEYS) == (READ_THERE[name], True)
    assert variable.about


@pytest.mark.parametrize("name", [*READ_NOWHERE, *(name for name, key in READ_THERE.items() if key is None)])
@pytest.mark.parametrize("value", ["1", "true", "", "-5", "not this"])
def test_name_without_an_effect_is_a_warning_whatever_its_value(name: str, value: str) -> None:
    document, warnings = read_variables({name: value})
    assert document == {}
    assert len(warnings) == 1
    assert warnings[0].startswith(f"`{name}` has no effect: ")
    assert not value or len(value) < 3 or value == "true" or value not in warnings[0]


def test_table_has_no_other_names() -> None:
    known = {*READ_THERE, *READ_HERE, *STORE_VARIABLES, *READ_NOWHERE, *OURS, "DYN_KVBM_NIXL_BACKEND_<NAME>"}
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


# -- mistakes: one row each --------------------------------------------------------------------------------------------

GB = "a number of GB (1e9 bytes), fractions allowed"
BOOLEAN = "one of 1, true, yes, on, 0, false, no, off"
MISTAKES: dict[str, tuple[dict[str, str], str, str | None]] = {
    "no number": ({C: "lots"}, f"`{C}` must be {GB}, not `lots`", None),
    "comment of an env file": (
        {D: "1", "DYN_KVBM_DISK_CACHE_DIR": "/data # mine"},
        "`DYN_KVBM_DISK_CACHE_DIR` contains the comment of an env file",
        "remove the comment, which `docker run --env-file` keeps",
    ),
    "negative": ({C: "-5"}, f"`{C}` must be {GB}, not `-5`", None),
    "not a number": ({C: "NaN"}, f"`{C}` must be {GB}, not `NaN`", None),
    "infinite": ({D: "inf"}, f"`{D}` must be {GB}, not `inf`", None),
    "with a unit": ({C: "100GB"}, f"`{C}` must be {GB}, not `100GB`", None),
    "decimal comma": ({C: "2,5"}, f"`{C}` must be {GB}, not `2,5`", None),
    "huge": ({C: "1e30"}, "`tiers.host.capacity` must be more than 0 and at most 1024PiB, not `{VALUE}`", None),
    "less than a byte": ({C: "1e-20"}, "`tiers.host.capacity` must be more than 0 and at most 1024PiB", None),
    "empty": ({C: ""}, f"`{C}` is empty", f"`unset {C}`, or set a value"),
    "blocks with a fraction": (
        {BLOCKS: "12.0"},
        f"`{BLOCKS}` must be a whole number, not `12.0`",
        None,
    ),
    "negative blocks": ({BLOCKS: "-1"}, f"`{BLOCKS}` must be a whole number, not `-1`", None),
    "blocks out of range": ({BLOCKS: "9" * 18}, "`tiers.host.blocks` must be at most 1099511627776", None),
    "batch of none": ({C: "1", BATCH: "0"}, "`transfer.batch_blocks` must be at least 1, not `0`", None),
    "half a switch": (
        {C: "1", "DYN_KVBM_METRICS": "2"},
        f"`DYN_KVBM_METRICS` must be {BOOLEAN}, not `2`",
        None,
    ),
    "switch in words": (
        {D: "1", "DYN_KVBM_DISK_ZEROFILL_FALLBACK": "enabled"},
        f"`DYN_KVBM_DISK_ZEROFILL_FALLBACK` must be {BOOLEAN}, not `enabled`",
        None,
    ),
    "port that there is not": (
        {C: "1", "DYN_KVBM_METRICS": "1", "DYN_KVBM_METRICS_PORT": "70000"},
        "`metrics.port` must be at most 65535, not `70000`",
        None,
    ),
    "window of none": (
        {C: "1", "DYN_KVBM_CACHE_STATS_MAX_REQUESTS": "0"},
        "`metrics.window_requests` must be at least 1, not `0`",
        None,
    ),
    "interval beyond a day": (
        {C: "1", "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": "99999999"},
        "`metrics.log_interval_s` must be at most 86400, not `99999999`",
        None,
    ),
    "allocator": (
        {D: "1", "DYN_KVBM_DISK_ALLOCATOR_TYPE": "direct"},
        "`tiers.disk.allocator` must be 'default' or 'open-direct', not the text `direct`",
        "did you mean `open-direct`?",
    ),
    "directory from nowhere": (
        {D: "1", "DYN_KVBM_DISK_CACHE_DIR": "cache"},
        "`tiers.disk.directory` must be an absolute path or start with `~`, not `cache`",
        None,
    ),
    "priorities that nobody sends": (
        {C: "1", "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": "10"},
        "`offload.min_priority` requires an engine that sends priorities, but `vllm` sends none; remove it",
        "`unset DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY`",
    ),
    "misspelt": ({"DYN_KVBM_CPU_CACHE_GBS": "1"}, "unknown variable `DYN_KVBM_CPU_CACHE_GBS`", f"did you mean `{C}`?"),
    "in small letters": (
        {"dyn_kvbm_cpu_cache_gb": "1"},
        "unknown variable `dyn_kvbm_cpu_cache_gb`",
        f"did you mean `{C}`?",
    ),
    "words swapped": (
        {"DYN_KVBM_CACHE_CPU_GB": "1"},
        "unknown variable `DYN_KVBM_CACHE_CPU_GB`",
        "`unset DYN_KVBM_CACHE_CPU_GB`",
    ),
    "bucket as a URL": (
        {C: "1", BUCKET: "s3://kv-cache/"},
        f"`{BUCKET}` must be the name of a bucket, not `s3://kv-cache/`",
        None,
    ),
    "bucket per worker": (
        {C: "1", BUCKET: "kv-{worker_id}"},
        f"`{BUCKET}` must be the name of a bucket, not `kv-{{worker_id}}`",
        None,
    ),
    "endpoint without a scheme": (
        {C: "1", ENDPOINT: "minio:9000"},
        f"`{ENDPOINT}` must be a URL that begins with `http://` or `https://`, without credentials, not `minio:9000`",
        None,
    ),
    "bucket without another tier": (
        {BUCKET: "kv-cache"},
        "no tier is configured: kvbm cannot store blocks",
        f"set `{C}` (1e9 bytes, summed over the ranks) or `{BLOCKS}`; for a disk tier `{D}`",
    ),
    "like no other": (
        {"DYN_KVBM_GO_FASTER": "1"},
        "unknown variable `DYN_KVBM_GO_FASTER`",
        "`unset DYN_KVBM_GO_FASTER`",
    ),
    "two that disagree": (
        {C: "1", "DYN_KVBM_ENABLE_NUMA": "1", "DYN_MEMORY_DISABLE_NUMA": "1"},
        "`DYN_MEMORY_DISABLE_NUMA=1` contradicts `DYN_KVBM_ENABLE_NUMA=1`",
        "both set `transfer.numa`: `unset` one of them",
    ),
    "old and new name disagree": (
        {C: "1", "DYN_KVBM_ENABLE_RECORD": "no", "ENABLE_KVBM_RECORD": "1"},
        "`ENABLE_KVBM_RECORD=1` contradicts `DYN_KVBM_ENABLE_RECORD=no`",
        "both set `metrics.record`: `unset` one of them",
    ),
    "no tier": (
        {"DYN_KVBM_METRICS": "1"},
        "no tier is configured: kvbm cannot store blocks",
        f"set `{C}` (1e9 bytes, summed over the ranks) or `{BLOCKS}`; for a disk tier `{D}`",
    ),
    "both tiers of no size": (
        {C: "0", D: "0"},
        "no tier is configured: kvbm cannot store blocks",
        f"set `{C}` (1e9 bytes, summed over the ranks) or `{BLOCKS}`; for a disk tier `{D}`",
    ),
}


ONLY_BARE = ("no tier", "both tiers of no size", "priorities that nobody sends", "bucket without another tier")
NO_VALUE = ("no tier", "bucket without another tier")


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_names_variable_value_and_what_would_be_right(name: str) -> None:
    variables, message, hint = MISTAKES[name]
    with pytest.raises(ProfileError) as caught:
        resolve_connector({}, variables, engine="vllm")
    said = caught.value.message
    assert said.startswith(message.partition("{VALUE}")[0])
    assert caught.value.hint == hint
    assert len(variables) > 1 or any(f"{one}={value}" in said for one, value in variables.items()) or name in NO_VALUE


@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in ONLY_BARE])
def test_the_same_mistake_over_a_profile(tmp_path, name: str) -> None:
    variables, message, _ = MISTAKES[name]
    with pytest.raises(ProfileError) as caught:
        load_text(tmp_path, BASE, variables=variables)
    assert message.partition("{VALUE}")[0] in caught.value.message
