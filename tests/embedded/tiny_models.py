"""Tiny random models of the 16 architectures that the embedded engine runs, saved as Hugging Face directories.

Windows are shorter than the prompts that tests use, and initial weights are wide, so that greedy outputs vary.
"""

from pathlib import Path

import torch
import yaml

SHARED, ARCHITECTURES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).values()
VOCABULARY = SHARED["vocab_size"]


def save(name: str, directory: Path) -> Path:
    """Write the model `name` below `directory`; returns its path."""
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = {key: value for key, value in (SHARED | ARCHITECTURES[name]).items() if (key, value) != ("head_dim", None)}
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = directory / name
    model.save_pretrained(path)
    return path


def generate(path: Path, prompts: list[list[int]], new_tokens: int | list[int]) -> list[list[int]]:
    """What transformers' own greedy generation gives for each prompt alone: so many tokens, for all or for each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs, counts = [], [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    for prompt, count in zip(prompts, counts, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        result = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, use_cache=True)
        outputs.append(result[0, len(prompt) :].tolist())
    return outputs
