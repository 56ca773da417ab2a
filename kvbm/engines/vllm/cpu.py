"""What vLLM chooses by the instructions of a CPU: the attention backend of latent (MLA) layers, and bytes of states.

    backend     chosen                                     tokens in a block              weights
    CPU_MLA     without AMX, if named, and before 0.29     16, whatever is given          of any type
    AMX_MLA     otherwise                                  128, or a multiple of 32       bfloat16

    states                                                 bits of an element
    with avx512_bf16 (before 0.29: with AMX)               32; with gated delta nets 16 if the argument or model says so
    otherwise                                              as the argument, the model, or the type of the weights says

Sources: `vllm/platforms/cpu.py` of vLLM 0.27 to 0.32, and runs of 0.32 on a CPU with AMX. No variable chooses the
backend in these versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvbm.config.engine import VllmArguments
from kvbm.engines.installation import Release
from kvbm.engines.vllm.state_settings import CPU_BLOCK_TOKENS, PREFIX
from kvbm.sizing.families.facts import SizeUnknown
from kvbm.sizing.wanted import Cpu

REFERENCE_BLOCK_TOKENS = 16
AMX_KERNEL_TOKENS = 32
_AMX, _BF16 = "amx_tile", "avx512_bf16"  # flags in /proc/cpuinfo
_FIRST_WITH_AMX_MLA: Release = (0, 29)
_FIRST_WITH_NARROW_GDN: Release = (0, 29)
CPU_MLA, AMX_MLA = "CPU_MLA", "AMX_MLA"
BACKEND_KEY = f"{PREFIX}attention_backend"
PLAIN = Cpu()


def has_amx_attention(cpu: Cpu) -> bool:
    return _AMX in cpu.flags and not _is_before(cpu, _FIRST_WITH_AMX_MLA)


def widens_states(cpu: Cpu) -> bool:
    """Whether vLLM keeps states in 32 bits, also if an argument or the model names a type of 16 bits."""
    return (_AMX if _is_before(cpu, _FIRST_WITH_NARROW_GDN) else _BF16) in cpu.flags


def keeps_narrow_gdn(cpu: Cpu) -> bool:
    """Whether states of gated delta nets are an exception of `widens_states`."""
    return not _is_before(cpu, _FIRST_WITH_NARROW_GDN)


def _is_before(cpu: Cpu, release: Release) -> bool:
    return cpu.release is not None and cpu.release < release


class LatentAttention(NamedTuple):
    """Latent attention on a CPU: its backend, the tokens in a block of it and in the smallest one, and what to say."""

    backend: str
    block_tokens: int
    kernel_tokens: int
    note: str


def latent_attention(arguments: VllmArguments, cpu: Cpu) -> LatentAttention:
    """Return what vLLM uses with these arguments. SizeUnknown if they name a backend in a form that only vLLM reads."""
    is_reference, given = _named_backend(arguments).upper() == CPU_MLA, arguments.block_size
    if has_amx_attention(cpu) and not is_reference:
        tokens = given or CPU_BLOCK_TOKENS
        return LatentAttention(AMX_MLA, tokens, AMX_KERNEL_TOKENS, _note(AMX_MLA, tokens))
    tokens = REFERENCE_BLOCK_TOKENS
    ignored = "" if given in (None, tokens) else f", and ignores `block_size: {given}`"
    return LatentAttention(CPU_MLA, tokens, tokens, _note(CPU_MLA, tokens) + ignored)


def _note(backend: str, block_tokens: int) -> str:
    return f"on this CPU, vLLM uses the attention backend {backend}, with blocks of {block_tokens} tokens"


def _named_backend(arguments: VllmArguments) -> str:
    """Return the backend that the arguments name, empty without one."""
    extra = arguments.model_extra or {}
    config = extra.get("attention_config") or {}
    if not isinstance(config, Mapping) or config.get("backend_per_kind"):
        raise SizeUnknown(
            "with this `attention_config`, only vLLM knows the attention backend", hint=f"set `{BACKEND_KEY}` instead"
        )
    return str(extra.get("attention_backend") or config.get("backend") or "")
