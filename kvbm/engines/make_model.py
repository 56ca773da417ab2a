"""Makes small models with random weights, for engines that require a Hugging Face directory.

    python -m kvbm_cli.make_model PRESET DIRECTORY

    vllm-25m             Qwen3, 16 KiB of float32 KV per token: fast enough for tests on one core
    vllm-81m             Qwen3, 24 KiB of bfloat16 KV per token: slow enough that a cache helps
    vllm-swa             Gemma 3, layers with a window of 256 tokens between full-attention layers
    vllm-mla             DeepSeek V2, one latent vector per token instead of keys and values
    vllm-25m-lora-a, -b  two LoRA adapters of vllm-25m, in the format of peft
    vllm-qwen3-next      Qwen3-Next, Gated DeltaNet states and attention; vLLM on a CPU requires bfloat16 for it
    vllm-granite4        Granite 4, Mamba-2 states and attention
    vllm-falcon-h1       Falcon-H1, Mamba-2 state and attention in every layer
    vllm-nemotron-h      Nemotron-H, Mamba-2 states, attention and layers with neither
    vllm-mamba2          Mamba-2, states only
    vllm-hybrid          Qwen3-Next in the size of vllm-81m: slow enough that a cache helps

synthetic_models.json has their configurations, without what all share. Weights depend only on the preset, and so does
the tokenizer, which is trained on text generated here. The initializer range is wide: at the usual 0.02 a random model
repeats one token for every prompt, and wrong KV stays undetected. With usual weights a state forgets within a few
tokens, and a wrong one stays undetected too: LONG_MEMORY replaces such weights. Files are bfloat16, which an engine
that computes in float32 reads exactly.

Why some configurations are as they are:

- Embeddings of vllm-swa are not tied: tied, its large ones would make it repeat the last token. vLLM does not tie those
  of vllm-mla, and would answer with zeroes.
- The `rope_type` of vllm-mla is not `default`: vLLM 0.32 on a CPU then takes the keys to rotate for contiguous, which
  those of latent attention are not, and the KV of a token would depend on the number of tokens in its step.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCABULARY_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_FACTS = Path(__file__).with_name("synthetic_models.json")
MODELS: dict[str, dict[str, Any]] = {
    preset: _SHARED | facts for preset, facts in json.loads(_FACTS.read_text()).items()
}
ADAPTERS = {"vllm-25m-lora-a": "vllm-25m", "vllm-25m-lora-b": "vllm-25m"}
PRESETS = (*MODELS, *ADAPTERS)

# A state keeps exp(-softplus(dt_bias + input) * exp(A_log)) of itself per token: 0.999 with these values.
LONG_MEMORY = {"A_log": -7.0, "dt_bias": 0.5}
_STATE_NORM_FACTOR = 3.0  # how much more a state counts in its layer's output

_LORA_RANK = 8
_LORA_RANGE = 0.1


def materialise(preset: str) -> Path:
    """Return the directory of a preset in the user's cache. The first call makes it; parallel calls are safe."""
    directory = directory_of(preset)
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        make(preset, directory)
    return directory


def directory_of(preset: str) -> Path:
    """Directory of a preset. Its name contains a hash of what describes it, so that an outdated model is never used."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbm" / "models"
    recipe = hashlib.sha256(Path(__file__).read_bytes() + _FACTS.read_bytes()).hexdigest()[:12]
    return root / f"{preset}-{recipe}"


def make(preset: str, directory: Path) -> None:
    """Write a preset to a new directory, completely or not at all. Keeps one that another process finished first."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        if preset in ADAPTERS:
            _write_adapter(preset, unfinished)
        else:
            _write_model(preset, unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(directory)
        except OSError:
            if not (directory / "complete").exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _hide_broken_torchvision() -> None:
    """Hide a torchvision for CUDA in an environment with a torch for CPUs, as SGLang installs it: transformers fails
    when it imports it. No text model needs it."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        for name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # "not installed"


def _write_model(preset: str, directory: Path) -> None:
    _hide_broken_torchvision()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    facts = dict(MODELS[preset])
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(preset))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _lengthen_memory(model)
    model.to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)
    (directory / "complete").touch()


def _lengthen_memory(model: torch.nn.Module) -> None:
    """Lets every state remember about a thousand tokens, and its layer's output depend on it."""
    import torch

    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "A_log"):
                for name, value in LONG_MEMORY.items():
                    getattr(module, name).fill_(value)
                module.norm.weight.mul_(_STATE_NORM_FACTOR)


def _write_adapter(preset: str, directory: Path) -> None:
    """Write an adapter with both halves of each projection random; peft's own zeros would change nothing."""
    import torch
    from safetensors.torch import save_file

    facts = MODELS[ADAPTERS[preset]]
    hidden, head = facts["hidden_size"], facts["head_dim"]
    query, key = facts["num_attention_heads"] * head, facts["num_key_value_heads"] * head
    shapes = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
    generator = torch.Generator().manual_seed(_seed(preset))
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(facts["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in (("lora_A", (_LORA_RANK, inputs)), ("lora_B", (outputs, _LORA_RANK))):
                tensors[f"{prefix}.{half}.weight"] = torch.randn(shape, generator=generator) * _LORA_RANGE
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": ADAPTERS[preset],
        "r": _LORA_RANK,
        "lora_alpha": _LORA_RANK,
        "target_modules": sorted(shapes),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter, indent=2))
    (directory / "complete").touch()


def _write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer, which encodes and decodes any text without loss."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE, tokenizer.get_vocab_size()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _text() -> list[str]:
    """Generate sentences of invented words, with short words more frequent, as in a language."""
    source = random.Random(0)
    syllables = [
        onset + vowel
        for onset in ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "st", "tr", "pl"]
        for vowel in ["a", "e", "i", "o", "u"]
    ]
    words = ["".join(source.choices(syllables, k=1 + rank // 800)) for rank in range(6000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    return [" ".join(source.choices(words, weights, k=12)).capitalize() + "." for _ in range(8000)]


def _seed(preset: str) -> int:
    return int.from_bytes(hashlib.sha256(preset.encode()).digest()[:4], "little")


def main() -> None:
    usage = f"usage: python -m kvbm_cli.make_model PRESET DIRECTORY\npresets: {', '.join(PRESETS)}"
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(usage)
        return
    if len(sys.argv) != 3 or sys.argv[1] not in PRESETS:
        sys.exit(usage)
    directory = Path(sys.argv[2])
    if directory.exists():
        sys.exit(f"`{directory}` exists already")
    directory.parent.mkdir(parents=True, exist_ok=True)
    make(sys.argv[1], directory)


if __name__ == "__main__":
    main()
