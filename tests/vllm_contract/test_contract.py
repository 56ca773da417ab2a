"""The connector against every vLLM version of `surfaces.txt`, without vLLM (see `contract.py`)."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest
from mypy import api

from kvbm.engines.vllm import versions

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import stubs  # noqa: E402
from contract import complaints, hooks  # noqa: E402
from stubs import Surface  # noqa: E402
from surfaces import FILE, Surfaces  # noqa: E402

SURFACES = Surfaces.parse(FILE.read_text())
VERSIONS = list(SURFACES.distributions)
BETWEEN = VERSIONS[1:5]  # the oldest one and those that have been run are enough for every change
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
INTEGRATION = Path(versions.__file__).parent
SOURCES = sorted(set(INTEGRATION.glob("*.py")) - {INTEGRATION / "launch.py"})
CONNECTORS = {
    "DynamoConnector": "kvbm.vllm_integration.connector",
    "PdConnector": "kvbm.engines.vllm.pd",
}
ALL_HOOKS = set().union(*(hooks(SURFACES.surface(version)) for version in VERSIONS))
SMALL_CONNECTOR = """
from typing import TYPE_CHECKING, Any
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:
    KVConnectorTransferResults = None

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

class Small(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._groups = getattr(kv_cache_config, "prefix_cacheable_group_ids", (0,))
        self._role_name = vllm_config.kv_transfer_config.kv_role

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
        self._pool.touch([self._pool.blocks[1]])

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return len(request.block_hashes), True

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        ids = [new.block_ids for new in scheduler_output.scheduled_new_reqs]
        return ids + [scheduler_output.has_sync_kv_loads] if hasattr(scheduler_output, "has_sync_kv_loads") else ids

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Any:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
"""


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mypy's cache of the standard library alone: with the stubs of another version in it, mypy would trust those."""
    directory = tmp_path_factory.mktemp("mypy_cache")
    api.run(["--cache-dir", str(directory), "--config-file", "", "-c", stubs.HEADER])
    return directory


@pytest.fixture
def cache(warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where mypy looks for the stubs
    return shutil.copytree(warm_cache, tmp_path / "cache")


def small(surface: Surface, directory: Path, cache: Path, source: str = SMALL_CONNECTOR) -> list[str]:
    path = directory / "small_connector.py"
    path.write_text(source)
    return complaints(surface, [path], {"Small": "small_connector"}, directory, cache)


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_a_guarded_connector_fits_old_and_new_versions(version: str, tmp_path: Path, cache: Path) -> None:
    assert small(SURFACES.surface(version), tmp_path, cache) == []


def test_each_difference_of_a_version_is_complained_about(tmp_path: Path, cache: Path) -> None:
    surface = SURFACES.surface("0.32.0")
    classes = surface["classes"]
    del classes["vllm.v1.request"]["Request"]["attributes"]["block_hashes"]
    del classes["vllm.config.kv_transfer"]["KVTransferConfig"]["attributes"]["kv_role"]
    del classes["vllm.v1.core.sched.output"]["NewRequestData"]["attributes"]["block_ids"]
    classes["vllm.v1.core.block_pool"]["BlockPool"]["methods"]["touch"] = "method (self, blocks, group_id)"
    classes[BASE]["KVConnectorBase_V1"]["methods"]["load_all"] = "abstract method (self)"
    surface["calls"]["update_state_after_alloc"].append("_, _, _, _")
    surface["calls"]["wait_for_layer_load"].append("layer=_")
    found = "\n".join(small(surface, tmp_path, cache))
    for expected in (
        '"Request" has no attribute "block_hashes"',
        'has no attribute "kv_role"',
        '"NewRequestData" has no attribute "block_ids"',
        'Missing positional argument "group_id" in call to "touch"',
        'abstract class "Small" with abstract attribute "load_all"',
        'Too many arguments for "update_state_after_alloc"',
        'Unexpected keyword argument "layer" for "wait_for_layer_load"',
    ):
        assert expected in found
    assert len(found.splitlines()) == 7


def test_a_missing_module_and_a_missing_class_are_complained_about(tmp_path: Path, cache: Path) -> None:
    surface = SURFACES.surface("0.32.0")
    del surface["classes"]["vllm.v1.core.block_pool"], surface["names"]["vllm.v1.core.block_pool"]
    del surface["classes"]["vllm.v1.request"]["Request"]
    found = small(surface, tmp_path, cache)
    assert len(found) == 2
    assert '"vllm.v1.core.block_pool"' in found[0]
    assert 'Module "vllm.v1.request" has no attribute "Request"' in found[1]


def test_what_only_new_versions_have_needs_its_guard(tmp_path: Path, cache: Path) -> None:
    source = SMALL_CONNECTOR
    for guarded, bare in {
        'getattr(kv_cache_config, "prefix_cacheable_group_ids", (0,))': "kv_cache_config.prefix_cacheable_group_ids",
        ' if hasattr(scheduler_output, "has_sync_kv_loads") else ids': "",
        "except ImportError:": "except KeyError:",
    }.items():
        assert guarded in source
        source = source.replace(guarded, bare)
    found = "\n".join(small(SURFACES.surface("0.28.0"), tmp_path, cache, source))
    for expected in ("prefix_cacheable_group_ids", "has_sync_kv_loads", "KVConnectorTransferResults"):
        assert expected in found


@pytest.mark.parametrize(
    "version",
    [pytest.param(version, marks=pytest.mark.soak) if version in BETWEEN else version for version in VERSIONS],
)
def test_our_connectors_fit(version: str, tmp_path: Path, cache: Path) -> None:
    assert complaints(SURFACES.surface(version), SOURCES, CONNECTORS, tmp_path, cache, ALL_HOOKS) == []


def test_every_version_that_we_claim_has_a_surface() -> None:
    (_, oldest), (_, newest) = versions.CONTRACT_TESTED
    assert set(VERSIONS) == {f"0.{minor}.0" for minor in range(oldest, newest + 1)}


def test_our_connectors_are_looked_into(tmp_path: Path, cache: Path) -> None:
    """Each of these is used somewhere in our sources, behind other attributes, in loops and in helpers."""
    surface = SURFACES.surface("0.32.0")
    used = {
        ("vllm.v1.core.block_pool", "BlockPool", "hash_block_size"),
        ("vllm.v1.core.sched.output", "SchedulerOutput", "scheduled_spec_decode_tokens"),
        ("vllm.v1.core.sched.output", "CachedRequestData", "resumed_req_ids"),
        ("vllm.v1.core.sched.output", "NewRequestData", "num_computed_tokens"),
        ("vllm.v1.kv_cache_interface", "KVCacheConfig", "kv_cache_groups"),
        ("vllm.v1.outputs", "KVConnectorOutput", "finished_recving"),
        ("vllm.v1.request", "Request", "block_hashes"),
        (f"{BASE.removesuffix('.base')}.multi_connector", "MultiConnector", "_connectors"),
    }
    for module, owner, name in used:
        del surface["classes"][module][owner]["attributes"][name]
    found = "\n".join(complaints(surface, SOURCES, CONNECTORS, tmp_path, cache))
    assert {name for _, _, name in used if f'no attribute "{name}"' in found} == {name for _, _, name in used}


def test_each_public_method_of_ours_is_a_hook_of_some_version() -> None:
    """A misspelt hook would never be called, and nothing would complain."""
    module = ast.parse((INTEGRATION / "connector.py").read_text())
    (owner,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "DynamoConnector"]
    public = {node.name for node in owner.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert public - ALL_HOOKS == {"worker_side_class"}


def test_every_version_that_we_say_was_run_has_a_result() -> None:
    results = INTEGRATION.parents[2] / "bench" / "results"
    rows = {name for path in results.glob("*-vllm-versions.json") for name in json.loads(path.read_text())["rows"]}
    (_, oldest), (_, newest) = versions.RUN
    assert {f"0.{minor}.0" for minor in range(oldest, newest + 1)} <= rows
