"""`kvbm size` against engines that have started: bytes of a block, blocks of G2, and tokens in G1.

The tokens in G1 depend on the groups that vLLM forms. Weights are random and not written to a file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_server import CONNECTOR, MAX_MODEL_LEN, VllmServer, host_blocks

from kvbm.config.schema import Profile
from kvbm.engines.make_model import MODELS
from kvbm.engines.table import size
from kvbm.identity.machine import cpu_flags
from kvbm.sizing import Cpu, Wanted
from kvbm_cli.serve.reported_sizes import ReportedSizes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
BLOCKS, HOST_BLOCKS = 300, 50
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 5,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 4096,
}
# Name: the model's configuration, and arguments besides those of every server here.
STARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped-query attention, blocks of 32 tokens": (LLAMA, {"block_size": 32}),
    "normalized heads, 16 bits": (MODELS["vllm-25m"], {"dtype": "bfloat16"}),
    "sliding windows": (MODELS["vllm-swa"], {}),
    "latent attention": (MODELS["vllm-mla"], {"attention_backend": "CPU_MLA"}),
    "latent attention as this CPU has it": (MODELS["vllm-mla"], {"dtype": "bfloat16"}),
    "states of gated delta nets": (
        MODELS["vllm-qwen3-next"],
        {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "block_size": 128},
    ),
    "states of Mamba 2": (MODELS["vllm-granite4"], {"block_size": 128, "max_num_batched_tokens": 128}),
    "states of Mamba 2 as this CPU has them": (
        MODELS["vllm-granite4"],
        {"dtype": "bfloat16", "block_size": 128, "max_num_batched_tokens": 128},
    ),
    "states of gated delta nets in 16 bits": (
        MODELS["vllm-qwen3-next"],
        {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16", "block_size": 128},
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_the_engine_reports_the_computed_sizes(name: str, tmp_path: Path) -> None:
    facts, more = STARTS[name]
    (tmp_path / "config.json").write_text(json.dumps(facts))
    arguments = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": BLOCKS, **more}
    profile = Profile.model_validate(
        {
            "engine": {"kind": "vllm", "model": str(tmp_path), "arguments": arguments},
            "tiers": {"host": {"blocks": HOST_BLOCKS}},
        }
    )
    computed = size(profile, facts, on_cpu=True, wanted=Wanted(cpu=Cpu(cpu_flags())))
    assert computed.device is not None
    flags = [word for key, value in more.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    flags += ["--load-format", "dummy", "--skip-tokenizer-init"]
    with VllmServer(
        tmp_path, *flags, blocks=BLOCKS, connector=CONNECTOR, environment=host_blocks(HOST_BLOCKS)
    ) as server:
        reported = ReportedSizes.of(server.log())
    assert reported == ReportedSizes(computed.block_bytes, HOST_BLOCKS, computed.device.token_count)
    assert reported.differences(computed) == []
