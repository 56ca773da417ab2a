"""Models that draft, with random weights, and vLLM's `speculative_config` for them.

    drafter("draft_model")    a second model with KV of its own: the target with a little noise, so that most of its
                              guesses are right and some are wrong
    drafter("eagle")          one layer that reads the target's last hidden state; nearly all guesses are wrong
    drafter("eagle3")         the same, of three hidden states
    drafter("mtp")            a layer of the target's own files, in the form of MiMo; it reads the last hidden state

They are made in the user's cache, next to TARGET, for which all but the last draft: it has a target of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvbm.engines.make_model import MODELS, materialise

TARGET = "vllm-25m"
GUESSED_TOKENS = 3
MTP_LAYER = "model.mtp_layers.0"
NOISE = 0.02  # of the standard deviation of each weight
Tensors = dict[str, torch.Tensor]


def target(method: str) -> Path:
    """Return the directory of the model for which it drafts."""
    return _materialise(method) if method == "mtp" else materialise(TARGET)


def drafter(method: str) -> dict[str, Any]:
    if method == "mtp":  # vLLM reads the target's files; MiMo's layer guesses one token
        return {"method": method, "num_speculative_tokens": 1}
    return {"method": method, "model": str(_materialise(method)), "num_speculative_tokens": GUESSED_TOKENS}


def _materialise(method: str) -> Path:
    target = materialise(TARGET)
    directory = target.parent / f"{target.name}-{method}"
    if not directory.exists():
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        _MAKERS[method](target, unfinished)
        try:
            os.rename(unfinished, directory)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
            assert directory.exists()
    return directory


def _write_noisy_target(target: Path, directory: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    for path in target.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, directory)
            continue
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * NOISE
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, directory / path.name, metadata={"format": "pt"})


def _write_eagle(target: Path, directory: Path) -> None:
    hidden = MODELS[TARGET]["hidden_size"]
    tensors = _layer("layers.0", inputs=hidden) | _random({"fc": (hidden, 2 * hidden)})
    _write(directory, tensors)


def _write_eagle3(target: Path, directory: Path) -> None:
    hidden, vocabulary = MODELS[TARGET]["hidden_size"], MODELS[TARGET]["vocab_size"]
    tensors = _layer("midlayer", inputs=2 * hidden) | _random({"fc": (hidden, 3 * hidden)})
    tensors |= _random({"lm_head": (vocabulary, hidden)}) | _ones("midlayer.hidden_norm", "midlayer.input_layernorm")
    _write(directory, tensors | _ones("norm"))


def _write_mtp(target: Path, directory: Path) -> None:
    """Write a whole model: layers of Qwen2, which MiMo uses, and the layer that drafts."""
    hidden, vocabulary = MODELS[TARGET]["hidden_size"], MODELS[TARGET]["vocab_size"]
    layers = [f"model.layers.{index}" for index in range(MODELS[TARGET]["num_hidden_layers"])]
    tensors = _random({"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)})
    for layer in (*layers, MTP_LAYER):
        tensors |= _layer(layer, inputs=hidden) | _ones(f"{layer}.input_layernorm") | _biases(layer)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    tensors |= _random({f"{MTP_LAYER}.input_proj": (hidden, 2 * hidden)})
    tensors |= _ones("model.norm", *(f"{MTP_LAYER}.{norm}" for norm in norms))
    _write(
        directory,
        tensors,
        architectures=["MiMoForCausalLM"],
        model_type="qwen2",  # `mimo` needs code that comes with the model's files
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
    )


_MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "draft_model": _write_noisy_target,
    "eagle": _write_eagle,
    "eagle3": _write_eagle3,
    "mtp": _write_mtp,
}


def _layer(name: str, *, inputs: int) -> Tensors:
    """Return a layer of Llama whose attention reads `inputs` values per token."""
    facts = MODELS[TARGET]
    hidden, inner, head = facts["hidden_size"], facts["intermediate_size"], facts["head_dim"]
    query, key = facts["num_attention_heads"] * head, facts["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (query, inputs),
        "self_attn.k_proj": (key, inputs),
        "self_attn.v_proj": (key, inputs),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = _random({f"{name}.{part}": shape for part, shape in shapes.items()})
    return tensors | _ones(f"{name}.post_attention_layernorm")


def _biases(layer: str) -> Tensors:
    head = MODELS[TARGET]["head_dim"]
    sizes = {"q": MODELS[TARGET]["num_attention_heads"] * head} | dict.fromkeys(
        "kv", MODELS[TARGET]["num_key_value_heads"] * head
    )
    return {f"{layer}.self_attn.{part}_proj.bias": torch.zeros(size) for part, size in sizes.items()}


def _random(shapes: dict[str, tuple[int, int]]) -> Tensors:
    scale = MODELS[TARGET]["initializer_range"]
    return {
        f"{name}.weight": torch.randn(shape, generator=torch.Generator().manual_seed(index)) * scale
        for index, (name, shape) in enumerate(sorted(shapes.items()))
    }


def _ones(*names: str) -> Tensors:
    return {f"{name}.weight": torch.ones(MODELS[TARGET]["hidden_size"]) for name in names}


def _write(directory: Path, tensors: Tensors, **form: object) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    facts: dict[str, Any] = {name: value for name, value in MODELS[TARGET].items() if name != "initializer_range"}
    facts |= form or {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(facts | {"torch_dtype": "float32"}))
