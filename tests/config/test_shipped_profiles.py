"""Every profile that ships is right: it loads, its tiers have a size, and it makes a launch plan."""

import pytest

from kvbm.config.engine import EmbeddedArguments
from kvbm.config.layers import shipped, shipped_halves
from kvbm.engines.table import kind_of, load, size
from kvbm.sizing import SizeUnknown
from kvbm_cli.package_data import profiles_directory, workloads_directory
from kvbm_cli.profile.auto_capacity import with_capacities
from kvbm_cli.profile.diff import differences, value_of

DIRECTORIES = [profiles_directory()]


@pytest.mark.parametrize("name", shipped(DIRECTORIES))
def test_shipped_profile_is_right(name: str) -> None:
    profile = with_capacities(load(name, directories=DIRECTORIES)).profile
    assert profile.description, "`kvbm profile list` shows it"
    assert kind_of(profile).launch_plan(profile, connector=True, port=1).argv
    try:
        sizing = size(profile, kind_of(profile).model_facts(profile.engine.model), on_cpu=True)
    except SizeUnknown:
        assert "/" in profile.engine.model, "only a name on a hub may be unknown"
    else:
        is_known = isinstance(profile.engine.arguments, EmbeddedArguments) or "/" not in profile.engine.model
        assert (sizing.device is not None) == is_known, "the engine determines G1 on a GPU at start-up"
        next_tier = sizing.host if profile.tiers.host is not None else sizing.disk
        assert sizing.device is None or next_tier.block_count > sizing.device.block_count
    if profile.bench.workload is not None and "/" not in profile.bench.workload:
        assert (workloads_directory() / f"{profile.bench.workload}.yaml").is_file()


# The situation that each is for, as the keys that make it so.
SITUATIONS: dict[str, dict[str, object]] = {
    "demo": {"engine.kind": "embedded", "engine.model": "synthetic:tiny", "tiers.disk": None},
    "demo-disk": {"engine.kind": "embedded", "tiers.disk.capacity": "1GiB"},
    "vllm": {"engine.kind": "vllm", "tiers.host.capacity": "auto", "tiers.disk": None},
    "vllm-disk": {"engine.kind": "vllm", "tiers.host.capacity": "auto", "tiers.disk.capacity": "auto"},
    "vllm-native": {"tiers.host.managed_by": "engine", "tiers.host.capacity": "auto", "tiers.disk.capacity": "auto"},
    "sglang": {"engine.kind": "sglang", "tiers.host": None, "tiers.disk.capacity": "auto"},
    "sglang-disk": {"engine.kind": "sglang", "tiers.disk.capacity": "auto", "tiers.disk.io": "auto"},
    "sglang-s3": {
        "tiers.shared.url": "s3://kv-cache/kvbm",
        "tiers.host.capacity": "4GiB",
        "tiers.disk.capacity": "1TB",
    },
    "sglang-cpu-demo": {"engine.kind": "sglang", "engine.cpu_stand_ins": True, "tiers.disk.capacity": "1GB"},
    "trtllm": {"engine.kind": "tensorrt-llm", "tiers.host.capacity": "auto", "tiers.disk": None},
    "trtllm-disk": {"engine.kind": "tensorrt-llm", "tiers.host.capacity": "auto", "tiers.disk.capacity": "auto"},
    "trtllm-pd-1p1d": {"engine.kind": "tensorrt-llm", "disaggregated.prefill": 1, "disaggregated.decode": 1},
    "vllm-large-ssd": {"tiers.disk.capacity": "auto", "tiers.disk.io": "auto", "tiers.disk.reclaim": True},
    "vllm-lustre": {"tiers.disk.zerofill": True, "tiers.disk.allocator": "default", "tiers.disk.o_direct": True},
    "demo-shared": {"tiers.shared.url": "file:///tmp/kvbm-demo-shared", "offload.to_shared": "always"},
    "vllm-s3": {"tiers.shared.url": "s3://kv-cache/kvbm", "tiers.host.capacity": "auto"},
    "vllm-mooncake": {"tiers.shared.url": "mooncake://mooncake-master:50051", "tiers.host.capacity": "auto"},
    "vllm-gpfs": {"tiers.disk.zerofill": False, "tiers.disk.allocator": "open-direct", "tiers.disk.o_direct": True},
    "vllm-cpu-demo": {"engine.kind": "vllm", "engine.model": "synthetic:vllm-81m"},
    "vllm-hybrid-cpu-demo": {"engine.model": "synthetic:vllm-hybrid", "engine.arguments.block_size": 256},
    "vllm-qwen3-next": {"engine.model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tiers.host.capacity": "auto"},
    "vllm-pd-1p1d": {"disaggregated.prefill": 1, "disaggregated.decode": 1, "engine.kind": "vllm"},
    "vllm-pd-2p2d": {"disaggregated.prefill": 2, "disaggregated.decode": 2, "engine.kind": "vllm"},
    "vllm-pd-cpu-demo": {"disaggregated.prefill": 1, "engine.model": "synthetic:vllm-81m"},
}


def test_every_shipped_profile_has_a_situation() -> None:
    assert set(SITUATIONS) == set(shipped(DIRECTORIES))


@pytest.mark.parametrize("name", SITUATIONS)
def test_shipped_profile_is_for_its_situation(name: str) -> None:
    values = load(name, directories=DIRECTORIES).values
    assert {key: values[key] for key in SITUATIONS[name]} == SITUATIONS[name]


# What each half changes in the profile in front of it.
NETWORK = {"tiers.disk.capacity": "1TB", "tiers.disk.threads": 16, "onboard.disk_timeout_s": 10.0}
HALVES: dict[str, dict[str, object]] = {
    "storage/lustre": {**NETWORK, "tiers.disk.zerofill": True},
    "storage/gpfs": {**NETWORK, "tiers.disk.allocator": "open-direct"},
    "storage/large-ssd": {
        "tiers.disk.capacity": "auto",
        "tiers.disk.io": "auto",
        "tiers.disk.threads": 16,
        "tiers.disk.reclaim": True,
        "offload.frequency_entries": 4_000_000,
    },
    "storage/s3": {"tiers.shared.url": "s3://kv-cache/kvbm"},
    "storage/mooncake": {"tiers.shared.url": "mooncake://mooncake-master:50051"},
}


def changed(before: str, *after: str) -> dict[str, object]:
    one, other = load(before, directories=DIRECTORIES), load(*after, directories=DIRECTORIES)
    return {key: value_of(side) for key, _, side in differences(one, other)}


def test_every_half_has_its_changes() -> None:
    assert set(HALVES) == set(shipped_halves(DIRECTORIES))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["demo", "vllm", "vllm-cpu-demo", "trtllm"])
def test_half_fits_every_engine_and_changes_only_its_keys(name: str, half: str) -> None:
    assert changed(name, name, half) == HALVES[half]


@pytest.mark.parametrize("half", HALVES)
def test_profile_of_vllm_with_this_storage_is_the_half_over_vllm(half: str) -> None:
    name = half.replace("storage/", "vllm-")
    assert changed("vllm", name) == HALVES[half]
    assert changed(name, "vllm", half) == {}
