"""KvbmTier against the interface that vLLM's tiering calls, by names and arguments, without vLLM.

The interface is that of vLLM 0.32 and 0.33, which do not differ in it. tests/vllm/test_secondary_tier.py compares it
with the vLLM that is installed.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from kvbm.engines.installation import Installation
from kvbm.engines.table import load
from kvbm.engines.vllm import versions
from kvbm.engines.vllm.launch import plan
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.auto_capacity import with_capacities

sys.path.insert(0, str(Path(__file__).parent))
from surfaces import FILE, Surfaces

SOURCE = ast.parse(Path(versions.__file__).with_name("secondary_tier.py").read_text())
(TIER,) = [node for node in SOURCE.body if isinstance(node, ast.ClassDef) and node.name == "KvbmTier"]
METHODS = {node.name: node.args for node in TIER.body if isinstance(node, ast.FunctionDef)}

ABSTRACT = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "drain_jobs": (),
}
OPTIONAL = {
    "has_pending_work": (),
    "take_events": (),
    "touch": ("keys", "req_context"),
    "on_request_finished": ("req_context",),
    "serve_external_requests": ("parent",),
    "on_schedule_end": ("context",),
    "shutdown": (),
    "get_stats": (),
}
CONSTRUCTOR = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")
RESULT = {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"}
JOB = {"job_id", "keys", "chunk_ids", "is_promotion", "req_context"}
FLAGS = {"--host", "--port", "--enable-prompt-tokens-details", "--shutdown-timeout", "--max-model-len"}  # of both
OWN = {"note_request", "weights_may_change", "adapter_is_loaded"}  # called by kvbm's own wrappers


def names(arguments: ast.arguments) -> tuple[str, ...]:
    return tuple(one.arg for one in arguments.args[1:])


def test_each_abstract_method_is_there():
    assert set(ABSTRACT) <= set(METHODS)


@pytest.mark.parametrize("name", sorted(set(ABSTRACT | OPTIONAL) & set(METHODS)))
def test_a_method_takes_what_vllm_passes(name):
    assert names(METHODS[name]) == (ABSTRACT | OPTIONAL)[name]


def test_the_constructor_takes_what_vllm_passes_and_the_keys_of_the_configuration():
    assert names(METHODS["__init__"]) == CONSTRUCTOR
    assert METHODS["__init__"].kwarg is not None


def test_no_public_method_is_misspelt():
    assert {name for name in METHODS if not name.startswith("_")} - set(ABSTRACT | OPTIONAL) == OWN


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_profile_starts_vllm_with_what_its_parser_knows(version):
    profile = with_capacities(load("vllm-native", directories=[profiles_directory()])).profile
    installation = Installation(version, "vllm", "/venv/bin/vllm", has_kvbm=True)
    argv = plan(profile, connector=True, port=8000, installation=installation).argv
    assert {word for word in argv if word.startswith("--")} == {*FLAGS, "--kv-transfer-config"}
    transfer = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    surface = Surfaces.parse(FILE.read_text()).surface(version)
    assert set(transfer) <= set(surface["classes"]["vllm.config.kv_transfer"]["KVTransferConfig"]["attributes"])
