"""kvbm's storage against the interfaces of released wheels of SGLang, which `collect_surface.py` has read.

A complaint is what would raise in that version, or what SGLang would call and kvbm does not have.
"""

import ast
import inspect
import json
from pathlib import Path

import pytest
from collect_surface import FILE

from kvbm.engines.sglang import flushes, host_pool, identity, ranks, storage, weight_updates
from kvbm.engines.sglang.storage import KvbmHiCacheStorage
from kvbm.engines.sglang.versions import TESTED

SURFACES = json.loads(FILE.read_text())
# Methods of the interface that kvbm leaves to SGLang's base class, and why.
NOT_OURS = {
    "get_stats": "kvbm has metrics of its own",
}
CONFIG_NAMES = {"_storage", "storage", "storage_config"}  # of the configuration, in the modules that read it


@pytest.fixture(params=SURFACES)
def surface(request):
    return SURFACES[request.param]


# Abstract, and never called with `interface_v1`.
OF_OLDER_INTERFACE = ("get", "batch_get", "set", "batch_set", "exists")


def parameters(text):
    return ast.parse(f"def f({text}): pass").body[0].args


def test_the_tested_versions_have_been_read():
    assert set(TESTED) <= SURFACES.keys()


def test_every_method_of_the_interface_is_ours_or_left_on_purpose(surface):
    of_sglang = surface["classes"]["HiCacheStorage"]
    assert set(of_sglang["abstract"]) <= vars(KvbmHiCacheStorage).keys()
    assert of_sglang["methods"].keys() - vars(KvbmHiCacheStorage).keys() == NOT_OURS.keys()


def test_our_methods_take_the_parameters_of_the_interface(surface):
    for name, text in surface["classes"]["HiCacheStorage"]["methods"].items():
        if name in NOT_OURS or name in OF_OLDER_INTERFACE:
            continue
        theirs = [one.arg for one in parameters(text).args]
        ours = list(inspect.signature(inspect.unwrap(getattr(KvbmHiCacheStorage, name))).parameters)
        assert ours[: len(theirs)] == theirs, name


def test_the_factory_constructs_our_class(surface):
    assert surface["constructs"], "the factory constructs no backend"
    for arguments in surface["constructs"]:
        assert not [one for one in arguments if one.endswith("=")], arguments
    assert ["storage_config", "kwargs"] in surface["constructs"]


def test_the_configuration_has_what_we_read(surface):
    has = set(surface["classes"]["HiCacheStorageConfig"]["attributes"])
    read = set()
    for module in (storage, ranks, identity):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Attribute) and _last(node.value) in CONFIG_NAMES:
                read.add(node.attr)
    assert {"tp_rank", "tp_size", "pp_rank", "model_name", "extra_config", "is_mla_model", "is_storage_writer"} <= read
    assert read <= has


def _last(node):
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_the_host_pools_have_what_we_read(surface):
    pools = [surface["classes"][name] for name in ("HostKVCache", "MHATokenToKVPoolHost")]
    has = {name for pool in pools for name in (*pool["attributes"], *pool["methods"])}
    for node in ast.walk(ast.parse(Path(host_pool.__file__).read_text())):
        if isinstance(node, ast.Attribute) and _last(node.value) in ("pool", "_pool"):
            assert node.attr in has, node.attr


def test_what_changes_weights_can_be_watched(surface):
    assert set(weight_updates.UPDATES) <= surface["classes"]["WeightUpdater"]["methods"].keys()
    wrapped = {name for place, names in weight_updates.CHANGES.items() for name in names}
    assert wrapped - set(weight_updates.UPDATES) <= surface["functions"].keys()


def test_what_we_wrap_or_call_has_the_parameters_that_we_pass(surface):
    arguments = {name: [one.arg for one in parameters(text).args] for name, text in surface["functions"].items()}
    assert arguments["check_prefetch_progress"] == ["self", "request"]
    assert arguments["_handle_prefetch_result"] == ["self", "operation"]
    assert arguments["release_aborted_request"] == ["self", "request"]
    assert arguments["release_staged_hold"][:2] == ["self", "request"]
    assert arguments[flushes.STOP] == ["self"]
    assert arguments["get_native_hash"] == ["token_ids", "prior_digest", "page_size"]


def test_the_scheduler_is_constructed_with_the_options_first(surface):
    assert [one.arg for one in parameters(surface["classes"]["Scheduler"]["methods"]["__init__"]).args][:2] == [
        "self",
        "server_args",
    ]
