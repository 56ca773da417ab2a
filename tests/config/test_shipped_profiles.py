"""Every profile that ships is right: it loads, its tiers have a size, and it makes a launch plan."""

from pathlib import Path

import pytest
import yaml

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


SITUATIONS, HALVES = yaml.safe_load(Path(__file__).with_name("shipped_profiles.yaml").read_text()).values()


def test_every_shipped_profile_has_a_situation() -> None:
    assert set(SITUATIONS) == set(shipped(DIRECTORIES))


@pytest.mark.parametrize("name", SITUATIONS)
def test_shipped_profile_is_for_its_situation(name: str) -> None:
    values = load(name, directories=DIRECTORIES).values
    assert {key: values[key] for key in SITUATIONS[name]} == SITUATIONS[name]


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
