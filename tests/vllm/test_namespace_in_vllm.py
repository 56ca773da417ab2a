"""Namespaces of real configurations of vLLM: equal where only places and limits differ. No engine starts."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time

import pytest
import vllm.config
from vllm import EngineArgs, ModelRegistry
from vllm.model_executor import custom_op
from vllm.model_executor.layers import quantization
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends import registry
from vllm.v1.core import kv_cache_utils

from kvbm.engines.make_model import materialise
from kvbm.engines.opening import namespace_of
from kvbm.engines.vllm import identity
from kvbm.engines.vllm.options import OMITTED, OTHER_SECTIONS
from kvbm.identity import code, loading
from kvbm.identity.description import describe

HOUR_NS = 3_600_000_000_000
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """The process starts in an hour, so that no file is newer, and reports updates of weights."""
    monkeypatch.setattr(loading, "process_start_ns", lambda: time.time_ns() + HOUR_NS)
    monkeypatch.setattr(identity, "reports_weight_updates", lambda: True)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    kv_cache_utils.init_none_hash(get_hash_fn_by_name("sha256"))


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Two equal models, with other paths and times."""
    home = tmp_path_factory.mktemp("models")
    one = shutil.copytree(materialise("vllm-25m"), home / "one")
    two = shutil.copytree(one, home / "other" / "place" / "renamed")
    for file in two.iterdir():
        os.utime(file, ns=(1, 1))
    return one, two


def facts_of(path, **arguments):
    """Facts and doubt of an engine with these arguments."""
    config = EngineArgs(model=str(path), **{"max_model_len": 1024} | arguments).create_engine_config()
    return describe(*identity.identity(config)).result()


def name_of(path, **arguments):
    facts, doubt = facts_of(path, **arguments)
    assert doubt == ""
    return namespace_of([], (facts, doubt))[0].digest


@pytest.fixture
def base(copies):
    return name_of(copies[0])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": 4096},
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_rpc_port": 4711},
        {"data_parallel_size": 2, "data_parallel_address": "10.0.0.7", "data_parallel_backend": "mp"},
        {"master_addr": "10.0.0.1", "master_port": 4712, "distributed_timeout_seconds": 77},
        {"served_model_name": "mine", "max_logprobs": 3, "seed": 7, "revision": "main"},
        {"gpu_memory_utilization": 0.3, "num_gpu_blocks_override": 99, "kv_cache_memory_bytes": 10**8},
        {"distributed_executor_backend": "uni", "async_scheduling": True, "enable_chunked_prefill": False},
        {"override_generation_config": {"temperature": 0.1}, "structured_outputs_config": {"backend": "xgrammar"}},
    ],
    ids=lambda arguments: "-".join(arguments) or "equal",
)
def test_copies_in_which_places_and_limits_differ_have_one_namespace(copies, base, arguments):
    places = {"tokenizer": str(copies[0]), "hf_config_path": str(copies[0])} if arguments else {}
    assert name_of(copies[1], **places, **arguments) == base


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float32"},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 32},
        {"prefix_match_unit": 32},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"load_format": "pt"},
        {"attention_config": {"backend": "FLEX_ATTENTION"}},
        {"compilation_config": {"mode": 0}},
        {"disable_sliding_window": True},
        {"speculative_config": NGRAM},
        {"additional_config": {"fused": True}},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_arguments_that_change_kv_change_the_namespace(copies, base, arguments):
    assert name_of(copies[0], **arguments) != base


def test_other_files_change_the_namespace(copies, base, tmp_path):
    changed = shutil.copytree(copies[0], tmp_path / "one")
    configuration = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(configuration | {"rms_norm_eps": 1e-3}))
    with_epsilon = name_of(changed)
    shutil.copy2(copies[0] / "config.json", changed)
    assert name_of(changed) == base
    (weights,) = changed.glob("*.safetensors")
    contents = weights.read_bytes()
    weights.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    assert len({name_of(changed), with_epsilon, base}) == 3


def test_no_fact_but_the_shown_name_has_a_path(copies):
    facts, _ = facts_of(copies[0], tokenizer=str(copies[1]), hf_config_path=str(copies[1]))
    assert facts.pop("model") == str(copies[0])
    assert str(copies[0].parent) not in json.dumps(facts)
    assert facts["length"] == [0]
    assert facts["version"].count(".") == 1


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_random_root_of_the_hashes_is_in_doubt(copies, algorithm, monkeypatch):
    assert "PYTHONHASHSEED" in facts_of(copies[0], prefix_caching_hash_algo=algorithm)[1]
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert facts_of(copies[0], prefix_caching_hash_algo=algorithm)[1] == ""


def test_adapters_are_in_doubt(copies):
    assert "adapter" in facts_of(copies[0], enable_lora=True)[1]


def test_every_name_that_does_not_count_exists_in_some_version():
    """A misspelt name would count."""
    former = {"model_weights", "swap_space", "cpu_offload_gb"}
    sections = {"VllmConfig": OTHER_SECTIONS} | OMITTED
    for name, omitted in sections.items():
        assert omitted <= {*getattr(vllm.config, name).__dataclass_fields__, *former}, name


# -- code from outside vLLM --------------------------------------------------------------------------------------------

OWN_CODE = """
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_worker import CPUWorker


class Model(LlamaForCausalLM):
    pass


class Backend(CPUAttentionBackend):
    pass


class Worker(CPUWorker):
    pass


class Layer:
    pass


class Method(QuantizationConfig):
    get_name = get_supported_act_dtypes = get_min_capability = None
    get_config_filenames = from_config = get_quant_method = None
"""


def register_class(module):
    ModelRegistry.register_model("OwnForCausalLM", module.Model)


def register_lazily(module):
    ModelRegistry.register_model("OwnForCausalLM", "own_code:Model")


def register_attention(module):
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "own_code.Backend")


def register_layer(module):
    custom_op.CustomOp.register_oot(module.Layer, name="OwnLayer")


def register_quantization(module):
    quantization.register_quantization_config("own")(module.Method)


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A module of the user, imported; vLLM's registries are as before afterwards."""
    path = tmp_path / "own_code.py"
    path.write_text(OWN_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(code, "process_start_ns", lambda pid=None: time.time_ns() + HOUR_NS)
    for holder, name in (
        (ModelRegistry, "models"),
        (registry, "_ATTN_OVERRIDES"),
        (custom_op, "op_registry_oot"),
        (quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG"),
    ):
        monkeypatch.setattr(holder, name, dict(getattr(holder, name)))
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", list(quantization.QUANTIZATION_METHODS))
    yield importlib.import_module("own_code")
    del sys.modules["own_code"]


@pytest.mark.parametrize(
    "register", [register_class, register_lazily, register_attention, register_layer, register_quantization]
)
def test_code_that_is_registered_counts_by_content(copies, base, own_code, register):
    register(own_code)
    first = name_of(copies[0])
    with open(own_code.__file__, "a") as file:
        file.write("# edited\n")
    assert len({name_of(copies[0]), first, base}) == 3


@pytest.mark.parametrize("option", ["worker_cls", "worker_extension_cls"])
def test_code_of_an_own_worker_counts_by_content(copies, base, own_code, option):
    first = name_of(copies[0], **{option: "own_code.Worker"})
    with open(own_code.__file__, "a") as file:
        file.write("# edited\n")
    assert len({name_of(copies[0], **{option: "own_code.Worker"}), first, base}) == 3


def test_an_engine_without_such_code_has_no_fact_about_it(copies):
    """Its caches keep the names that they had before code counted."""
    assert "code" not in facts_of(copies[0])[0]
