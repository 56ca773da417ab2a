"""Every profile that ships, under the commands that need no engine: checked, and planned to the last flag."""

import json

import pytest
from terminal import assert_snapshot, kvbm, kvbm_here, ways

from kvbm.config.layers import shipped, shipped_halves
from kvbm_cli.package_data import profiles_directory

NAMES = shipped([profiles_directory()])
HALVES = shipped_halves([profiles_directory()])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "way"), ways(NAMES))
def test_it_checks_clean_and_makes_a_plan(tmp_path, name, way):
    checked = way("profile", "check", name, "--json", home=tmp_path)
    assert (checked.exit_code, json.loads(checked.stdout)["mistakes"]) == (0, []), checked.stderr
    planned = way("serve", "--profile", name, "--dry-run", "--json", home=tmp_path)
    assert planned.exit_code == 0, planned.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_list_has_them_all(tmp_path):
    assert_snapshot("profile_list", kvbm("profile", "list", home=tmp_path).text("kvbm profile list"))
    listed = json.loads(kvbm_here("profile", "list", "--json", home=tmp_path).stdout)
    assert [one["name"] for one in listed] == [*NAMES, *HALVES]
    assert {one["engine"] for one in listed} == {"embedded", "vllm", "tensorrt-llm", "sglang", None}
