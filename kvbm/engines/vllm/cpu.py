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
from dataclasses import dataclass
from enum import Enum

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
BACKEND_KEY = f"{PREFIX}attention_backend"


class LatentBackend(Enum):
    """The attention backend of a model with latent attention on a CPU, by its name in vLLM."""

    REFERENCE = "CPU_MLA"
    AMX = "AMX_MLA"


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


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Latent attention with these arguments on this CPU."""

    arguments: VllmArguments
    cpu: Cpu

    @property
    def backend(self) -> LatentBackend:
        """SizeUnknown if the arguments name a backend in a form that only vLLM reads."""
        is_named = self._named_backend().upper() == LatentBackend.REFERENCE.value
        return LatentBackend.AMX if has_amx_attention(self.cpu) and not is_named else LatentBackend.REFERENCE

    @property
    def block_tokens(self) -> int:
        if self.backend is LatentBackend.REFERENCE:
            return REFERENCE_BLOCK_TOKENS
        return self.arguments.block_size or CPU_BLOCK_TOKENS

    @property
    def kernel_tokens(self) -> int:
        """The smallest block of the backend."""
        return AMX_KERNEL_TOKENS if self.backend is LatentBackend.AMX else REFERENCE_BLOCK_TOKENS

    def note(self) -> str:
        """Return which backend vLLM uses, why, and what the other one would do."""
        given = self.arguments.block_size
        if self.backend is LatentBackend.AMX:
            return (
                f"this CPU has AMX, so vLLM uses the attention backend {LatentBackend.AMX.value}, with blocks of "
                f"{self.block_tokens} tokens; without AMX, or with `{BACKEND_KEY}: {LatentBackend.REFERENCE.value}`, "
                f"a block of this model has {REFERENCE_BLOCK_TOKENS}"
            )
        ignored = "" if given in (None, REFERENCE_BLOCK_TOKENS) else f" and ignores `block_size: {given}`"
        reason = "with these arguments" if _AMX in self.cpu.flags else "on this CPU, which has no AMX"
        return (
            f"vLLM uses the attention backend {LatentBackend.REFERENCE.value} {reason}{ignored}: a block of this model "
            f"has {REFERENCE_BLOCK_TOKENS} tokens; with {LatentBackend.AMX.value} it has {given or CPU_BLOCK_TOKENS}"
        )

    def _named_backend(self) -> str:
        """Return the backend that the arguments name, empty without one."""
        extra = self.arguments.model_extra or {}
        config = extra.get("attention_config") or {}
        if not isinstance(config, Mapping) or config.get("backend_per_kind"):
            raise SizeUnknown(
                "with this `attention_config`, only vLLM knows the attention backend",
                hint=f"set `{BACKEND_KEY}` instead",
            )
        return str(extra.get("attention_backend") or config.get("backend") or "")
