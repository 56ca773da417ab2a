"""Every profile that ships is right: it loads, its tiers have a size, and it makes a launch plan."""

import pytest

from kvbm.config.load import load, shipped
from kvbm.sizing import SizeUnknown, size
from kvbm_cli.engines import launch_plan
from kvbm_cli.model_facts import model_facts
from kvbm_cli.shipped import profiles_directory, workloads_directory

DIRECTORIES = [profiles_directory()]


@pytest.mark.parametrize("name", shipped(DIRECTORIES))
def test_shipped_profile_is_right(name: str) -> None:
    profile = load(name, directories=DIRECTORIES).profile
    assert profile.description, "`kvbm profile list` shows it"
    assert launch_plan(profile, connector=True, port=1).argv
    try:
        sizing = size(profile, model_facts(profile.engine.model, kind=profile.engine.kind), on_cpu=True)
    except SizeUnknown:
        assert "/" in profile.engine.model, "only a name on a hub may be unknown"
    else:
        assert sizing.device is not None
        assert sizing.host.block_count > sizing.device.block_count
    if profile.bench.workload is not None and "/" not in profile.bench.workload:
        assert (workloads_directory() / f"{profile.bench.workload}.yaml").is_file()
