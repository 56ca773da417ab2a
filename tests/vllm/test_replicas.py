"""One copy of the blocks of two ranks with equal KV: servers with tensor parallelism.

A model with one KV head answers as before a hit. Latent attention on a CPU cannot continue a cached prompt
(test_latent.py), so there a hit of a whole conversation goes on with the same numbers.
"""

from __future__ import annotations

import re
from random import Random

import pytest
from traffic import Request, asker, assert_equal, repeat, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer, host_blocks

from kvbm.config.schema import Profile
from kvbm.engines import make_model
from kvbm.engines.make_model import materialise
from kvbm.engines.table import size
from kvbm_cli.serve.reported_sizes import ReportedSizes

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
CACHED = 5 * BLOCK_TOKENS
REQUESTS = [Request(tokens(Random(f"replicas {number}"), CACHED + 60), 8) for number in range(6)]
CAPACITY = 64 << 20
BLOCKS = 40


def with_one_head(preset, directory):
    """Write a model like a preset, but with one KV head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_model.MODELS, "one-head", make_model.MODELS[preset] | {"num_key_value_heads": 1})
        make_model._write_model("one-head", directory / "one-head")
    return directory / "one-head"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return with_one_head("vllm-25m", tmp_path_factory.mktemp("model"))


def server(model, directory, *arguments, blocks=BLOCKS, **transfer):
    tiers = {"host": {"capacity": f"{CAPACITY}B"}, "disk": {"blocks": 200, "directory": str(directory)}}
    contents = {"tiers": tiers, "onboard": {"policy": "always"}, "offload": {"to_disk": "always"}, "transfer": transfer}
    connector = CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}
    flags = ("--tensor-parallel-size", "2", "--shutdown-timeout", "30", *arguments)
    return VllmServer(model, *flags, blocks=blocks, max_model_len=2048, connector=connector)


def computed(model, **transfer):
    facts = make_model.MODELS["vllm-25m"] | {"num_key_value_heads": 1}
    arguments = {
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "max_model_len": 2048,
        "num_gpu_blocks_override": BLOCKS,
    }
    profile = Profile.model_validate(
        {
            "engine": {"kind": "vllm", "model": str(model), "arguments": arguments},
            "tiers": {"host": {"capacity": f"{CAPACITY}B"}},
            "transfer": transfer,
        }
    )
    return size(profile, facts, on_cpu=True)


def segments(log):
    """Of every rank: whether it has allocated memory or uses that of another one, and bytes of it."""
    found = re.findall(r"kvbm: rank (\d) (\w+) \d+ blocks of \d+ bytes in host memory \(([\d.]+) GB\)", log)
    return {int(rank): (what, float(gigabytes)) for rank, what, gigabytes in found}


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_ranks_with_one_head_have_one_copy_and_answer_as_without_a_cache(model, tmp_path, is_shared):
    with server(model, tmp_path, share_equal_kv=is_shared) as engine:
        sizes = computed(model, share_equal_kv=is_shared)
        reported = ReportedSizes.of(engine.log())
        assert reported is not None
        assert reported.differences(sizes) == []
        assert {rank: what for rank, (what, _) in segments(engine.log()).items()} == {
            0: "allocated",
            1: "shares" if is_shared else "allocated",
        }
        assert sizes.host.block_count == CAPACITY // sizes.block_bytes // (1 if is_shared else 2)
        ask = asker(engine)
        truth = repeat(ask, REQUESTS)
        engine.wait_until("copies", lambda metrics: metrics["kvbm_offload_blocks_h2d"] >= 5 * len(REQUESTS))
        assert engine.reset_prefix_cache(external=False)
        assert_equal(repeat(ask, REQUESTS), truth)
        metrics = engine.metrics()
        assert metrics["kvbm_onboard_blocks_h2d"] == 5 * len(REQUESTS)
        assert metrics["kvbm_disabled"] == metrics["kvbm_onboard_failed_blocks"] == 0
    with server(model, tmp_path, share_equal_kv=is_shared) as engine:
        answers = repeat(asker(engine), REQUESTS)
        assert_equal(answers, truth)
        assert engine.hits_by_source() == {"disk": CACHED * len(REQUESTS)}
        assert engine.metrics()["kvbm_disk_checksum_failures"] == 0
    with server(model, tmp_path, share_equal_kv=not is_shared) as engine:
        assert_equal(repeat(asker(engine), REQUESTS[:1]), {REQUESTS[0]: truth[REQUESTS[0]]})
        assert engine.hits_by_source() == {}, "blocks of another number of copies were found"


def test_two_ranks_with_latent_attention_have_one_copy():
    size_of_block, prompt = 16, tokens(Random("latent"), 500)
    flags = ("--tensor-parallel-size", "2", "--attention-backend", "CPU_MLA")  # the other one needs AMX
    with VllmServer(
        materialise("vllm-mla"),
        *flags,
        blocks=200,
        connector=CONNECTOR,
        environment=host_blocks(600),
        max_model_len=2048,
    ) as engine:
        assert [what for what, _ in segments(engine.log()).values()].count("shares") == 1
        original = engine.ask(prompt, 64)
        engine.wait_until("all blocks on the host", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
        whole = (len(prompt) + 40) // size_of_block * size_of_block
        known = whole - len(prompt)
        again = engine.ask((*prompt, *original.tokens[:known]), 8)
        assert again.tokens == original.tokens[known : known + 8]
        assert again.logprobs == pytest.approx(original.logprobs[known : known + 8], abs=1e-4)
        assert again.cached == whole
        assert engine.metrics()["kvbm_disabled"] == 0


def test_two_ranks_with_one_head_and_windows_have_one_copy(tmp_path):
    """Blocks of several KV cache groups share memory, so that a block contains older bytes of other layers."""
    with server(with_one_head("vllm-swa", tmp_path), tmp_path / "disk", blocks=200) as engine:
        assert [what for what, _ in segments(engine.log()).values()].count("shares") == 1
        ask = asker(engine)
        truth = repeat(ask, REQUESTS)
        engine.wait_until("all blocks on the host", lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0)
        for _ in range(2):
            assert engine.reset_prefix_cache(external=False)
            assert_equal(repeat(ask, REQUESTS), truth)
        metrics = engine.metrics()
        assert metrics["kvbm_onboard_blocks_h2d"] > 0
        assert metrics["kvbm_disabled"] == metrics["kvbm_onboard_failed_blocks"] == 0
