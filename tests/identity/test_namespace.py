"""Namespaces: equal on two machines with equal content, different for every change that changes KV."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from model_files import exchange, model
from vllm_configs import HfConfig, KernelConfig, LoadConfig, ModelConfig, SchedulerConfig, vllm_config

from kvbm.engines.opening import namespace_of, public_facts
from kvbm.engines.vllm import identity
from kvbm.identity import loading, machine
from kvbm.identity.description import describe
from kvbm.identity.digests import Unidentified
from kvbm.identity.machine import release_of
from kvbm.identity.options import Options, depends_on_length
from kvbm.types import SegmentInfo

HOUR_NS = 3_600_000_000_000
SEGMENT = SegmentInfo(
    **dict.fromkeys(SegmentInfo.__dataclass_fields__, 0) | {"block_bytes": 4096, "layout_digest": "a"}
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "process_start_ns", lambda: time.time_ns() + HOUR_NS)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def path(tmp_path):
    return model(tmp_path / "one")


def name_of(path, changes=None, segments=(SEGMENT,), **more):
    facts, doubt = describe(*identity._model(vllm_config(path, changes))).result()
    assert doubt == ""
    found, doubt = namespace_of(segments, ({"engine": "vllm", "model": str(path), **facts, **more}, ""))
    assert doubt == ""
    assert str(path) not in json.dumps({name: value for name, value in found.facts.items() if name != "model"})
    return found.digest


def elsewhere(path, tmp_path):
    """An equal copy at another path, with other times, through a link."""
    copy = shutil.copytree(path, tmp_path / "other" / "place" / "renamed")
    for file in copy.iterdir():
        os.utime(file, ns=(1, 1))
    (tmp_path / "link").symlink_to(copy)
    return tmp_path / "link"


def test_equal_copies_have_equal_namespaces_and_others_have_not(path, tmp_path):
    copy = elsewhere(path, tmp_path)
    base = name_of(path)
    assert name_of(copy) == name_of(copy.resolve()) == base
    exchange(copy / "model.safetensors", (copy / "model.safetensors").read_bytes()[:-1] + b"\1")
    (path / "config.json").write_text('{"model_type": "llama", "rope_theta": 500.0}')
    assert len({base, name_of(copy), name_of(path)}) == 3


EQUAL = {
    "model_config.max_model_len": 99,
    "model_config.max_logprobs": 3,
    "model_config.served_model_name": "mine",
    "model_config.tokenizer": "/elsewhere/tokenizer",
    "model_config.seed": 7,
    "model_config.revision": "main",
    "model_config.hf_config": HfConfig(_name_or_path="/elsewhere", transformers_version="5.1.9"),
    "cache_config.gpu_memory_utilization": 0.3,
    "cache_config.num_gpu_blocks": 7,
    "parallel_config.data_parallel_size": 8,
    "parallel_config.data_parallel_rank": 3,
    "parallel_config.data_parallel_master_port": 4711,
    "parallel_config.master_addr": "10.0.0.1",
    "parallel_config.distributed_timeout_seconds": 5,
    "load_config.download_dir": "/elsewhere/hub",
    "scheduler_config": SchedulerConfig(4),
    "compilation_config": SimpleNamespace(mode=3, cache_dir="/elsewhere"),
    "instance_id": "2",
}
DIFFERENT = {
    "model_config.hf_config": HfConfig(rope_theta=500.0),
    "model_config.hf_text_config": HfConfig(rope_theta=500.0),
    "model_config.dtype": "float32",
    "model_config.quantization": "fp8",
    "model_config.disable_sliding_window": True,
    "model_config.of_a_later_version": 1,
    "cache_config.block_size": 32,
    "cache_config.cache_dtype": "fp8",
    "cache_config.prefix_match_unit": 8,
    "parallel_config.tensor_parallel_size": 2,
    "parallel_config.enable_expert_parallel": True,
    "load_config": LoadConfig("pt"),
    "kernel_config": KernelConfig("triton"),
    "compilation_config": SimpleNamespace(mode=0, cache_dir="/cache/one"),
    "additional_config": {"fused": True},
    "of_a_later_version": 1,
}


@pytest.mark.parametrize("name", EQUAL)
def test_options_in_which_replicas_differ_do_not_count(path, name):
    assert name_of(path, {name: EQUAL[name]}) == name_of(path)


@pytest.mark.parametrize("name", DIFFERENT)
def test_options_that_change_kv_count(path, name):
    assert name_of(path, {name: DIFFERENT[name]}) != name_of(path)


@pytest.mark.parametrize("changed", [{"block_bytes": 8192}, {"layout_digest": "b"}, {"slot_stride": 4096}], ids=str)
def test_the_layout_of_every_rank_counts(path, changed):
    ranks = (SEGMENT, replace(SEGMENT, **changed))
    assert len({name_of(path, segments=segments) for segments in (ranks, ranks[:1], ranks[:1] * 2)}) == 3


def test_copies_of_a_rank_do_not_count(path):
    assert name_of(path, segments=(SEGMENT, replace(SEGMENT, replica=1))) == name_of(path)


def test_the_name_that_users_see_does_not_count_and_others_see_no_directory(path):
    assert name_of(path, model="/elsewhere") == name_of(path)
    found, _ = namespace_of([SEGMENT], ({"engine": "e", "model": str(path)}, ""))
    assert found.facts["model"] == str(path)
    assert public_facts(found) == {**found.facts, "model": "one"}
    found, _ = namespace_of([SEGMENT], ({"engine": "e", "model": "owner/name"}, ""))
    assert public_facts(found)["model"] == "name"


def test_a_doubt_stays_and_an_engine_without_identity_is_in_doubt():
    assert namespace_of([SEGMENT], ({"engine": "e"}, "why"))[1] == "why"
    assert "does not say" in namespace_of([SEGMENT], ({"model": "m"}, ""))[1]


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        ({"model_type": "llama", "rope_parameters": {"rope_type": "default"}}, False),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, False),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, True),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}}, True),
        ({"model_type": "phi4mm", "text_config": {"rope_scaling": {"rope_type": "longrope"}}}, True),
        ({"model_type": "mllama4", "text_config": {"model_type": "llama4_text"}}, True),
        ({"model_type": "gemma", "rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, True),
    ],
    ids=str,
)
def test_models_whose_kv_depends_on_the_maximum_length_are_known(path, configuration, expected):
    """vLLM uses the long factors of longrope for all tokens if `max_model_len` exceeds the original length."""
    assert depends_on_length(configuration) == expected
    hf = {"model_config.hf_config": HfConfig(**configuration)}
    longer = {"model_config": ModelConfig(str(path), HfConfig(**configuration), max_model_len=9999)}
    assert (name_of(path, hf) != name_of(path, longer)) == expected


def test_a_length_that_vllm_has_reduced_to_fit_its_memory_is_not_the_one_of_the_loaded_model(path):
    """`--max-model-len auto` loads the model with the length of its configuration, and reduces it afterwards."""
    given, reduced, more_reduced = (ModelConfig(str(path), HfConfig(model_type="llama4")) for _ in range(3))
    for config, asked, allowed in ((given, 2048, 2048), (reduced, -1, 2048), (more_reduced, -1, 1024)):
        object.__setattr__(config, "original_max_model_len", asked)  # an attribute only, as in vLLM
        object.__setattr__(config, "max_model_len", allowed)
    assert name_of(path, {"model_config": reduced}) != name_of(path, {"model_config": given})
    assert name_of(path, {"model_config": reduced}) == name_of(path, {"model_config": more_reduced})


# -- texts of options --------------------------------------------------------------------------------------------------


def test_a_path_below_the_model_counts_by_its_name_there(path, tmp_path):
    copy = elsewhere(path, tmp_path)
    one = Options(path).digest({"pattern": f"{path}/part-{{part}}", "home": path})
    assert Options(copy).digest({"pattern": f"{copy}/part-{{part}}", "home": str(copy)}) == one
    assert Options(copy).digest({"pattern": f"{copy}/part-{{part}}", "home": str(copy.resolve())}) == one
    assert Options(path).digest({"pattern": f"{path}/other", "home": path}) != one
    assert Options(path).digest(f"{path}-2") != Options(path).digest(f"{path}")


def test_another_file_or_model_counts_by_its_content(path, tmp_path):
    drafts = [model(tmp_path / name, a=content) for name, content in (("d1", b"1"), ("d2", b"1"), ("d3", b"2"))]
    first, same, other = (Options(path).digest({"draft": str(draft)}) for draft in drafts)
    assert first == same != other
    files = [tmp_path / name for name in ("f1", "f2", "f3")]
    for file, text in zip(files, ("1", "1", "2"), strict=True):
        file.write_text(text)
    first, same, other = (Options(path).digest({"scales": file}) for file in files)
    assert first == same != other


def test_a_directory_of_unknown_files_or_one_that_has_just_changed_is_unidentified(path, tmp_path, monkeypatch):
    with pytest.raises(Unidentified, match="names the directory"):
        Options(path).digest(str(tmp_path))
    file, draft = tmp_path / "scales.json", model(tmp_path / "draft")
    file.write_text("1")
    monkeypatch.setattr(loading, "process_start_ns", lambda: time.time_ns() - HOUR_NS)
    for changed in (file, draft):
        with pytest.raises(Unidentified, match="changed after the engine was started"):
            Options(path).digest(str(changed))


def test_texts_with_slashes_that_are_no_paths_count_as_they_are(path):
    assert len({Options(path).digest(text) for text in ("/", "a/b", "original/**/*", "/no/such/file", "a\0/b")}) == 5


def test_values_that_python_orders_or_names_at_random_have_one_text():
    one, two = Options().digest({"a": {"x", "y"}, "b": [1, None]}), Options().digest({"b": (1, None), "a": {"y", "x"}})
    assert one == two
    with pytest.raises(Unidentified, match="no text form"):
        Options().digest({"call": object()})
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(Unidentified, match="nested"):
        Options().digest(endless)


# -- versions, machines, hashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", "0.32"),
        ("0.32.1.post2", "0.32"),
        ("2.13.1+cpu", "2.13+cpu"),
        ("0.32.0+mine", "0.32+mine"),
        ("0.33.0rc1", "0.33.0rc1"),
        ("0.33.1.dev7+gabc", "0.33.1.dev7+gabc"),
        ("", ""),
    ],
)
def test_patches_of_a_release_do_not_count_and_builds_do(version, expected):
    assert release_of(version) == expected


def test_processors_with_other_kernels_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPU_FACTS", tmp_path / "cpuinfo")

    def features(*lines):
        machine.CPU_FACTS.write_text("\n".join(lines) + "\n\nprocessor\t: 1\nflags\t: avx512_fp16\n")
        return machine.cpu_features()

    intel, amd = "vendor_id\t: GenuineIntel", "vendor_id\t: AuthenticAMD"
    one = features("processor\t: 0", intel, "cpu MHz\t: 2000", "flags\t\t: fpu avx2 avx512f amx_bf16")
    assert one == features("processor\t: 0", intel, "cpu MHz\t: 2100", "flags\t\t: amx_bf16 avx2 avx512f sse")
    assert one == "GenuineIntel amx_bf16 avx2 avx512f"
    older, other = (features(vendor, "flags\t\t: fpu avx2 avx512f") for vendor in (intel, amd))
    assert len({one, older, other}) == 3
    assert (
        features("Features\t: asimddp sve", "CPU implementer\t: 0x41", "CPU part\t: 0xd40") == "0x41 0xd40 asimddp sve"
    )
    machine.CPU_FACTS.unlink()
    assert machine.cpu_features() == ""


ARM = {  # `Features`, then `CPU part`: lines of Linux on these machines
    "Ampere Altra": ("fp asimd aes atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs", "0xd0c"),
    "Graviton 3": ("fp asimd fphp asimdhp asimddp sve asimdfhm svei8mm svebf16 i8mm bf16 dgh rng", "0xd40"),
    "Grace": ("fp asimd fphp asimdhp asimddp sve sve2 svebitperm svei8mm svebf16 i8mm bf16 dgh", "0xd4f"),
}


def test_processors_of_arm_differ_by_instructions_and_part(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPU_FACTS", tmp_path / "cpuinfo")
    found = {}
    for name, (features, part) in ARM.items():
        lines = "processor\t: 0", f"Features\t: {features}", "CPU implementer\t: 0x41", f"CPU part\t: {part}"
        machine.CPU_FACTS.write_text("\n".join([*lines, "", "processor\t: 1", "Features\t: sve2"]))
        found[name] = machine.cpu_features()
    assert found == {
        "Ampere Altra": "0x41 0xd0c asimddp asimdhp",
        "Graviton 3": "0x41 0xd40 asimddp asimdhp bf16 i8mm sve",
        "Grace": "0x41 0xd4f asimddp asimdhp bf16 i8mm sve sve2",
    }


def test_pickled_hashes_depend_on_the_version_of_python(monkeypatch):
    assert identity._serialization("sha256") == identity._serialization("xxhash")
    pickled = identity._serialization("sha256")
    assert identity._serialization("sha256_cbor") == identity._serialization("xxhash_cbor") == "cbor"
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    assert identity._serialization("sha256") != pickled


def test_media_that_another_engine_encodes_are_in_doubt():
    def config(transfer):
        return SimpleNamespace(ec_transfer_config=transfer, model_config=SimpleNamespace(multimodal_config=None))

    for transfer in (None, SimpleNamespace(ec_role="ec_producer")):
        assert not identity.takes_encodings(config(transfer))
        assert identity.encodes_by_content(config(transfer))
    consumer = config(SimpleNamespace(ec_role="ec_consumer"))
    assert identity.takes_encodings(consumer)
    assert not identity.encodes_by_content(consumer)


@pytest.mark.parametrize(
    ("dtype", "path", "expected"), [(None, None, True), ("fp8", "scales.json", True), ("fp8", None, False)]
)
def test_an_encoder_whose_scales_come_from_earlier_images_does_not_encode_by_content(dtype, path, expected):
    options = SimpleNamespace(mm_encoder_attn_dtype=dtype, mm_encoder_fp8_scale_path=path)
    model_config = SimpleNamespace(multimodal_config=options)
    assert identity.encodes_by_content(SimpleNamespace(model_config=model_config)) is expected
