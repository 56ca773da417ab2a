"""What vLLM itself says of the KV cache of each model in the catalogue. Run as a script, it prints JSON.

Arguments: a file of configurations by name, and the numbers of ranks, by default TENSOR_PARALLEL.

vLLM's own model class is built on the meta device, which takes no memory, and asked for the spec of each layer; then
vLLM's own functions form the groups. Experts and vocabulary are made small, because they do not change the cache. A
model with an image part is built as its language model alone. The ranks of tensor parallelism are only claimed, and so
are the instructions of the CPU, which vLLM asks torch for: "plain" has neither AMX nor bfloat16, "AMX" has both.

    {model: {"1 LBNHC plain": {"block_tokens": 128, "bytes": 2097152, "groups": [[128, 32, 0], ...]}, ...}}

`groups` has of each group the tokens, or "state", the layers, and the length of the window. For a model that this
build of vLLM cannot construct, there is the error instead.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

TENSOR_PARALLEL = (1, 2, 8)
LAYOUTS = ("LBNHC", "BLHNC")
CPUS = {"plain": frozenset(), "AMX": frozenset({"amx_tile", "avx512_bf16"})}  # flags of /proc/cpuinfo
MORE_ARGUMENTS = "MODEL_SPECS_ARGUMENTS"  # variable with arguments of vLLM, as JSON
LANGUAGE_MODELS = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Gemma4ForConditionalGeneration": ("Gemma4ForCausalLM", "gemma4_text"),
    "KimiK25ForConditionalGeneration": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "KimiK3ForConditionalGeneration": ("KimiLinearForCausalLM", "kimi_linear"),
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM", "llama4_text"),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", "qwen3"),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "MiMoForCausalLM": ("MiMoForCausalLM", "qwen2"),
}
# What vLLM needs to construct a model, and what does not change its cache.
MORE_FACTS = {
    "minimax_m2": {"scoring_func": "sigmoid", "use_qk_norm": True},
    "mimo_v2_flash": {"layernorm_epsilon": 1e-5, "scoring_func": "sigmoid", "norm_topk_prob": True},
    "falcon_h1": {"mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5},
}
AT_MOST = {
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "vocab_size": 4096,
}


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    architecture = config["architectures"][0]
    if architecture in LANGUAGE_MODELS:
        name, model_type = LANGUAGE_MODELS[architecture]
        config = {**config.get("text_config", config), "architectures": [name], "model_type": model_type}
    small = {name: min(config[name], most) for name, most in AT_MOST.items() if isinstance(config.get(name), int)}
    config = {name: value for name, value in config.items() if name != "quantization_config"} | small
    config |= MORE_FACTS.get(config["model_type"], {})
    if isinstance(kinds := config.get("layers_block_type"), list):
        config["layers_block_type"] = ["mlp" if kind == "moe" else kind for kind in kinds]
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        config["hybrid_override_pattern"] = pattern.replace("E", "-")
    return config


def prepare() -> None:
    """Let vLLM look at model classes in this process, and without torchvision, which language models do not need."""
    import torch

    torch.set_num_threads(1)
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        module = ModuleType(f"torchvision{name}")
        module.__getattr__ = lambda _: MagicMock()  # type: ignore[method-assign]
        module.__spec__ = MagicMock()
        module.__path__ = []
        sys.modules[f"torchvision{name}"] = module
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def claim_cpu(name: str) -> None:
    import torch

    torch.cpu._is_amx_tile_supported = lambda: "amx_tile" in CPUS[name]
    torch.cpu._is_avx512_bf16_supported = lambda: "avx512_bf16" in CPUS[name]


def specs_of(config: dict[str, Any], tensor_parallel: int) -> tuple[Any, dict[str, Any]]:
    """Return vLLM's configuration and the specs of the layers by name."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        arguments: dict[str, Any] = {
            "model": directory,
            "tokenizer": directory,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "enforce_eager": True,
            "max_model_len": 2048,
            "dtype": "bfloat16",
            "mamba_ssm_cache_dtype": "float32",
            "enable_prefix_caching": True,
            **json.loads(os.environ.get(MORE_ARGUMENTS, "{}")),
        }
        vllm_config = EngineArgs(**arguments).create_engine_config()
        with set_current_vllm_config(vllm_config):
            if not parallel_state.model_parallel_is_initialized():
                where = f"file://{tempfile.mktemp()}"
                parallel_state.init_distributed_environment(1, 0, where, 0, backend="gloo")
                parallel_state.initialize_model_parallel(1, 1)
            vllm_config.parallel_config.tensor_parallel_size = tensor_parallel
            parallel_state.get_tp_group().world_size = tensor_parallel
            with torch.device("meta"):
                initialize_model(vllm_config, model_config=vllm_config.model_config)
            current_platform.update_block_size_for_backend(vllm_config)
            layers = vllm_config.compilation_config.static_forward_context.items()
            found = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers if _has_cache(layer)}
    return vllm_config, {name: spec for name, spec in found.items() if spec is not None}


def _has_cache(layer: object) -> bool:
    """vLLM's runner skips layers that share the cache of another one."""
    return hasattr(layer, "get_kv_cache_spec") and not getattr(layer, "kv_sharing_target_layer_name", None)


def groups_of(vllm_config: Any, specs: dict[str, Any], layout: str) -> dict[str, Any]:
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout

    order = KVCacheLayout[layout]
    type(vllm_config.cache_config).get_resolved_kv_cache_layout = lambda _: order
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, dict(specs))
    found = [_group(group.kv_cache_spec, len(group.layer_names)) for group in groups]
    return {
        "block_tokens": vllm_config.cache_config.block_size,
        "bytes": kv_cache_utils._get_kv_cache_bytes_per_block(groups, order),
        "groups": sorted(found, key=str),
    }


def _group(spec: Any, layers: int) -> list[object]:
    """Return the tokens, the layers, and how many tokens back they look; 0 for all."""
    if hasattr(spec, "mamba_type"):
        return ["state", layers, 0]
    one = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
    reach = getattr(one, "sliding_window", None) or getattr(one, "attention_chunk_size", None) or 0
    return [spec.block_size, layers, reach]


def main(catalogue: Path, tensor_parallel: Sequence[int]) -> None:
    prepare()
    models: dict[str, Any] = {}
    for name, config in json.loads(catalogue.read_text()).items():
        models[name] = {}
        for ranks in tensor_parallel:
            for cpu in CPUS if _depends_on_cpu(config) else ("plain",):
                claim_cpu(cpu)
                try:
                    vllm_config, specs = specs_of(language_model(config), ranks)
                except Exception as error:  # whatever this build of vLLM cannot construct; the test lists which ones
                    models[name][f"{ranks}"] = f"{type(error).__name__}: {error}"[:300]
                    continue
                for layout in LAYOUTS:
                    models[name][f"{ranks} {layout} {cpu}"] = groups_of(vllm_config, specs, layout)
    print(json.dumps(models))


def _depends_on_cpu(config: dict[str, Any]) -> bool:
    return "kv_lora_rank" in config.get("text_config", config)


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]), [int(ranks) for ranks in sys.argv[2:]] or TENSOR_PARALLEL)
