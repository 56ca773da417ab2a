"""`disaggregated` in a profile: what it may say, and the command lines that it makes."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from test_load import load_text

from kvbm.engines.launch_plan import LaunchPlan
from kvbm.engines.table import copy_count, load
from kvbm.errors import EnvironmentProblem, ProfileError
from kvbm_cli.disaggregated.plan import DisaggregatedPlan, plan
from kvbm_cli.package_data import profiles_directory

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "disaggregated.md"
BASE = """\
engine:
  kind: vllm
  model: ./model
  python: /usr/bin/python3
  arguments: {served_model_name: m, kv_transfer_config: {kv_load_failure_policy: fail}}
  environment: {UCX_TLS: tcp}
tiers: {host: {capacity: 1GiB}}
server: {host: 0.0.0.0}
"""


def plan_of(
    directory: Path, disaggregated: str, *overrides: str, environment: dict[str, str] | None = None
) -> DisaggregatedPlan:
    resolved = load_text(directory, f"{BASE}disaggregated: {disaggregated}\n", *overrides)
    return plan(resolved.profile, port=8000, ports=count(9000), environment=environment or {})


def gpus(of: DisaggregatedPlan) -> list[str | None]:
    return [engine.environment.get("CUDA_VISIBLE_DEVICES") for _, engine in of.engines]


def option(of: LaunchPlan, name: str) -> str:
    return of.argv[of.argv.index(name) + 1]


def transfer_config(of: LaunchPlan) -> dict[str, object]:
    written: dict[str, object] = json.loads(option(of, "--kv-transfer-config"))
    return written


def test_engines_have_names_and_ports_of_their_own(tmp_path: Path) -> None:
    made = plan_of(tmp_path, "{prefill: 2, decode: 2}")
    assert [name for name, _ in made.engines] == ["prefill 0", "prefill 1", "decode 0", "decode 1"]
    plans = [of for _, of in made.engines]
    assert [of.base_url for of in plans] == [f"http://127.0.0.1:{port}" for port in (9000, 9002, 9004, 9006)]
    assert [of.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for of in plans] == ["9001", "9003", "9005", "9007"]
    assert {of.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] for of in plans} == {"127.0.0.1"}
    assert {of.environment["VLLM_SSM_CONV_STATE_LAYOUT"] for of in plans} == {"DS"}, (
        "vLLM with NIXL refuses states else"
    )
    assert {option(of, "--host") for of in plans} == {"127.0.0.1"}
    assert {of.environment["UCX_TLS"] for of in plans} == {"tcp"}
    assert {of.model for of in plans} == {"m"}


def test_proxy_listens_where_the_profile_says_and_knows_all_engines(tmp_path: Path) -> None:
    proxy = plan_of(tmp_path, "{prefill: 1, decode: 2}").proxy
    assert (proxy.base_url, proxy.model) == ("http://127.0.0.1:8000", "m")
    assert proxy.argv[1:] == (
        *("-m", "kvbm_cli.disaggregated.proxy", "--host", "0.0.0.0", "--port", "8000"),
        *("--prefill", "http://127.0.0.1:9000", "--decode", "http://127.0.0.1:9002", "http://127.0.0.1:9004"),
    )


def test_prefill_has_our_connector_before_nixl_and_decode_has_nixl_alone(tmp_path: Path) -> None:
    prefill, decode = (transfer_config(of) for _, of in plan_of(tmp_path, "{prefill: 1, decode: 1}").engines)
    children = prefill.pop("kv_connector_extra_config")["connectors"]  # type: ignore[index]
    assert prefill == {
        "kv_connector": "PdConnector",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
    }
    assert [child["kv_connector"] for child in children] == ["DynamoConnector", "NixlConnector"]
    assert children[0]["kv_connector_extra_config"]["kvbm"]["tiers"]["host"]["capacity"] == "1GiB"
    assert children[1]["kv_role"] == "kv_producer"
    assert decode == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
    }


def test_every_engine_has_gpus_of_its_own_unless_the_profile_names_them(tmp_path: Path) -> None:
    size, two_ranks = "{prefill: 1, decode: 1}", "engine.arguments.tensor_parallel_size=2"
    assert gpus(plan_of(tmp_path, size)) == ["0", "1"]
    assert gpus(plan_of(tmp_path, size, two_ranks)) == ["0,1", "2,3"]
    visible = {"CUDA_VISIBLE_DEVICES": "7,5,3"}
    assert gpus(plan_of(tmp_path, size, environment=visible)) == ["7", "5"]
    with pytest.raises(EnvironmentProblem, match="the engines need 4 GPUs, but CUDA_VISIBLE_DEVICES lists 3"):
        plan_of(tmp_path, size, two_ranks, environment=visible)
    shared = "engine.environment.CUDA_VISIBLE_DEVICES=6"
    assert gpus(plan_of(tmp_path, size, shared, environment=visible)) == ["6", "6"]


@pytest.mark.parametrize(
    ("disaggregated", "message"),
    [
        ("{prefill: 1}", "`disaggregated` requires engines of both kinds: set `prefill` and `decode`"),
        ("{prefill: 0, decode: 2}", "`disaggregated` requires engines of both kinds: set `prefill` and `decode`"),
        ("{prefill: 1, decode: -1}", "`disaggregated.decode` must be at least 0, not `-1`"),
        ("{prefil: 1}", "unknown key `disaggregated.prefil`"),
    ],
)
def test_mistakes(tmp_path: Path, disaggregated: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        plan_of(tmp_path, disaggregated)
    assert str(caught.value).startswith(message)


def test_it_needs_an_engine_that_transfers_blocks(tmp_path: Path) -> None:
    text = "engine: {model: synthetic:tiny}\ntiers: {host: {blocks: 1}}\ndisaggregated: {prefill: 1, decode: 1}\n"
    with pytest.raises(ProfileError, match=r"`disaggregated` requires `engine\.kind` `vllm` or `tensorrt-llm`"):
        load_text(tmp_path, text)


def test_an_engine_is_one(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="`disaggregated` cannot be combined with"):
        plan_of(tmp_path, "{prefill: 1, decode: 1}", "engine.arguments.data_parallel_size=2")


def test_host_memory_is_that_of_all_engines_that_prefill(tmp_path: Path) -> None:
    counts = [
        copy_count(
            load_text(tmp_path, BASE, *(f"disaggregated.{kind}={count}" for kind in ("prefill", "decode"))).profile
        )
        for count in (0, 1, 3)
    ]
    assert counts == [1, 1, 3]


def test_profile_in_the_guide_is_right(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GUIDE.read_text().partition("```yaml\n")[2].partition("```")[0])
    profile = load(str(tmp_path / "mine.yaml"), directories=[profiles_directory()]).profile
    assert (profile.disaggregated.prefill, profile.disaggregated.decode) == (1, 1)


def test_one_engine_does_all_unless_asked_otherwise(tmp_path: Path) -> None:
    assert not load_text(tmp_path, BASE).profile.disaggregated.is_enabled
