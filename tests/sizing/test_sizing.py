"""Bytes per token, block and tier, against numbers that are known from elsewhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.config.schema import Profile, Tiers
from kvbm.engines.embedded.engine.synthetic_models import SYNTHETIC
from kvbm.engines.embedded.sizing import bytes_per_token
from kvbm.engines.table import size
from kvbm.errors import ProfileError
from kvbm.sizing import PAGE_BYTES
from kvbm.sizing.tiers import Device, sizing_of

LLAMA_3_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
QWEN3_8B = {**LLAMA_3_8B, "num_hidden_layers": 36, "head_dim": 128}
DEEPSEEK_V3 = {
    "num_hidden_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def profile(arguments: dict[str, Any], host: dict[str, Any]) -> Profile:
    return Profile.model_validate({"engine": {"model": "m", "arguments": arguments}, "tiers": {"host": host}})


@pytest.mark.parametrize(
    ("facts", "element_bytes", "expected"),
    [
        (LLAMA_3_8B, 2, 128 * 1024),
        (QWEN3_8B, 2, 144 * 1024),
        (DEEPSEEK_V3, 2, 2 * 40960),
        (SYNTHETIC["tiny"], 4, 8 * 1024),
        (SYNTHETIC["small"], 4, 24 * 1024),
        (SYNTHETIC["8b"], 2, 144 * 1024),
        ({"text_config": LLAMA_3_8B, "vision_config": {}}, 2, 128 * 1024),
        ({**LLAMA_3_8B, "num_key_value_heads": None}, 2, 512 * 1024),
    ],
)
def test_bytes_per_token(facts: dict[str, object], element_bytes: int, expected: int) -> None:
    assert bytes_per_token(facts, element_bytes=element_bytes) == expected


def test_100_gb_of_llama_3_8b() -> None:
    sizing = size(profile({"dtype": "bfloat16", "num_blocks": 1000}, {"capacity": "100GB"}), LLAMA_3_8B)
    assert sizing.block_bytes == 2 * 2**20
    assert (sizing.host.block_count, sizing.host.token_count) == (47_683, 762_928)
    assert sizing.device is not None
    assert (sizing.device.block_count, sizing.device.token_count) == (1000, 16_000)
    assert sizing.device.total_bytes == 1000 * 2 * 2**20
    assert sizing.device.set_by == "engine.arguments.num_blocks"


STORE = {"url": "file:///store"}
DISK = {"blocks": 100, "directory": "/cache"}


@pytest.mark.parametrize(
    ("block_bytes", "tiers", "keeps_host_memory", "host_blocks", "buffer_blocks"),
    [
        (1 << 20, {"disk": DISK, "shared": STORE}, True, 512, 0),
        (1 << 12, {"disk": DISK, "shared": STORE}, True, 4096, 0),
        (1 << 30, {"disk": DISK, "shared": STORE}, True, 64, 0),
        (1 << 20, {"disk": DISK}, True, 64, 0),
        (1 << 20, {"disk": DISK, "shared": STORE}, False, 64, 0),
        (1 << 20, {"disk": DISK, "shared": STORE, "host": {"blocks": 3}}, True, 3, 0),
        (1 << 20, {"shared": STORE, "host": {"capacity": "1GiB", "managed_by": "engine"}}, False, 1024, 512),
        (1 << 20, {"disk": DISK, "host": {"capacity": "1GiB", "managed_by": "engine"}}, False, 1024, 64),
    ],
)
def test_memory_above_a_shared_store_counts(block_bytes, tiers, keeps_host_memory, host_blocks, buffer_blocks):
    device = Device(16, (block_bytes // 2,) * 2 if block_bytes > 1 << 12 else (block_bytes,), 100, "g1")
    sizing = sizing_of(device, Tiers.model_validate(tiers), keeps_host_memory=keeps_host_memory)
    assert (sizing.host.block_count, sizing.buffer_bytes) == (host_blocks, buffer_blocks * block_bytes)


def test_blocks_win_over_capacity() -> None:
    assert size(profile({}, {"capacity": "1GB", "blocks": 3}), LLAMA_3_8B).host.block_count == 3


def test_host_memory_below_one_block_is_an_error() -> None:
    with pytest.raises(ProfileError) as caught:
        size(profile({"dtype": "bfloat16"}, {"capacity": "2MB"}), LLAMA_3_8B)
    assert caught.value.message == "host memory of 2MB is too small: one block requires 2MiB"
    assert caught.value.hint == "raise `tiers.host.capacity`"


@pytest.mark.parametrize("value", [None, 0, "32", 1.5])
def test_config_without_a_usable_fact_is_an_error(value: object) -> None:
    with pytest.raises(ProfileError, match="no valid `num_hidden_layers`"):
        bytes_per_token({**LLAMA_3_8B, "num_hidden_layers": value}, element_bytes=2)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(8, 256), st.integers(1, 64), st.integers(30, 40))
def test_tiers_fit_their_memory_and_slots_are_whole_pages(
    layers: int, heads: int, head_dim: int, block_size: int, capacity_log2: int
) -> None:
    facts = {"num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": head_dim, "hidden_size": 8}
    sizing = size(profile({"block_size": block_size}, {"capacity": f"{2**capacity_log2}B"}), facts)
    slot_bytes = sizing.host.total_bytes // sizing.host.block_count
    assert slot_bytes % PAGE_BYTES == 0
    assert slot_bytes - PAGE_BYTES < sizing.block_bytes <= slot_bytes
    assert 0 <= 2**capacity_log2 - sizing.host.total_bytes < slot_bytes


def test_a_slot_is_rounded_like_the_memory_it_lies_in() -> None:
    from kvbm.host import layout

    assert PAGE_BYTES == layout.PAGE_BYTES
