"""Small models that see or hear, with random weights: Idefics 3 for images, Qwen2-Audio for sounds.

Both read their media at any place of a prompt. Neither needs torchvision, which PyPI builds for another torch than the
CPU's. `PLACE` is what a prompt contains where a medium belongs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from kvbm.engines import make_model

PLACE = {"image": "<image>", "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}
_TOKENS = {
    "image": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
    "audio": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
}
_FIRST = make_model.VOCABULARY_SIZE  # the number of the first of them
_VOCABULARY = _FIRST + 64
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 32768,
}
_RANGE = 0.07


def media_model(modality: str) -> Path:
    """The directory of a model in the user's cache. The first call makes it; parallel calls are safe."""
    recipe = hashlib.sha256(Path(__file__).read_bytes() + Path(make_model.__file__).read_bytes()).hexdigest()[:12]
    root = make_model.directory_of("vllm-25m").parent
    directory = root / f"{modality}-{recipe}"
    if directory.exists():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=root))
    try:
        (_write_idefics if modality == "image" else _write_qwen_audio)(unfinished)
        try:
            os.rename(unfinished, directory)
        except OSError:
            if not (directory / "config.json").exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def media_adapter(name: str, directory: Path, *, covers_vision: bool = False) -> Path:
    """Write a LoRA adapter of the model that sees; `name` is its seed. `covers_vision`: it also changes encodings."""
    import torch
    from safetensors.torch import save_file

    rank, hidden = 8, _TEXT["hidden_size"]
    prefixes = {f"text_model.layers.{layer}": hidden for layer in range(_TEXT["num_hidden_layers"])}
    if covers_vision:
        prefixes |= {f"vision_model.encoder.layers.{layer}": 64 for layer in range(2)}
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "big"))
    tensors = {
        f"base_model.model.model.{prefix}.self_attn.q_proj.{half}.weight": 0.1 * torch.randn(shape, generator=generator)
        for prefix, width in prefixes.items()
        for half, shape in (("lora_A", (rank, width)), ("lora_B", (width, rank)))
    }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(facts))
    return directory


def _write_idefics(directory: Path) -> None:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config={**vision, "image_size": 112, "patch_size": 7, "initializer_range": 0.1},
        text_config=LlamaConfig(**_TEXT, head_dim=64, initializer_range=_RANGE),
        image_token_id=_FIRST,
        scale_factor=2,
        initializer_range=_RANGE,
    )
    _write_weights(Idefics3ForConditionalGeneration, config, directory)
    edge = {"longest_edge": 112}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(image_processor=images, tokenizer=_tokenizer("image", directory), image_seq_len=64)
    processor.save_pretrained(directory)


def _write_qwen_audio(directory: Path) -> None:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    audio = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
    config = Qwen2AudioConfig(
        audio_config={**audio, "num_mel_bins": 16, "init_std": 0.1},
        text_config=Qwen2Config(**_TEXT, initializer_range=_RANGE).to_dict(),
        audio_token_index=_FIRST,
    )
    _write_weights(Qwen2AudioForConditionalGeneration, config, directory)
    extractor = WhisperFeatureExtractor(feature_size=16)
    processor = Qwen2AudioProcessor(feature_extractor=extractor, tokenizer=_tokenizer("audio", directory))
    processor.save_pretrained(directory)


def _write_weights(kind: type, config: object, directory: Path) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(31)
        model = kind(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and "norm" not in name:
                weight.normal_(0, 0.1)
    model.to(torch.bfloat16).save_pretrained(directory)
    if kind.__name__.startswith("Qwen2Audio"):  # transformers 5 writes a prefix that vLLM does not read
        from safetensors.torch import load_file, save_file

        weights = load_file(directory / "model.safetensors")
        weights = {name.replace("model.model.", "model."): weight for name, weight in weights.items()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(modality: str, directory: Path) -> object:
    from transformers import AutoTokenizer

    make_model._write_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": _TOKENS[modality]})
    assert tokenizer.convert_tokens_to_ids(_TOKENS[modality][0]) == _FIRST
    tokenizer.save_pretrained(directory)
    return tokenizer
