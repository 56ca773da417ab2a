"""EngineConfig: the settings of an engine, validated before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm.errors import ProfileError

DTYPES = ("float32", "bfloat16", "float16")
KV_LAYOUTS = ("block_first", "layer_first")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`model` is `synthetic:NAME` or a local Hugging Face directory. None: the engine chooses.

    `num_blocks` G1 blocks of `block_size` tokens; a step computes at most `max_num_batched_tokens` tokens of at most
    `max_num_seqs` requests. `device` is `cpu`, `cuda` or `auto`. `verify` compares a few tokens with
    the model's own attention at start-up. Raises ProfileError.
    """

    model: str
    num_blocks: int = 2048
    block_size: int = 16
    dtype: str = "float32"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 64
    seed: int = 0
    threads: int | None = None
    prefix_caching: bool = True
    kv_layout: str = "block_first"
    served_model_name: str | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("dtype", DTYPES), ("kv_layout", KV_LAYOUTS), ("device", ("auto", "cpu", "cuda"))):
            value = getattr(self, name)
            if value not in choices:
                raise ProfileError(f"`{name}` must be one of {', '.join(choices)}, not `{value}`")
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ProfileError(f"`{name}` must be at least 1, not {value}")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model
