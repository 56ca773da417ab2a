"""The type of the KV cache that a quantized checkpoint asks for, as vLLM 0.32 reads it.

    ModelOpt             `kv_cache_scheme` or `kv_cache_quant_algo`
    compressed-tensors   `kv_cache_scheme` of floats in 8 bits; vLLM refuses every other one

vLLM ignores such settings of all other methods.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.sizing.families.facts import READER, SizeUnknown
from kvbm.text.outside import shown

_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
_SCHEME: Mapping[str, tuple[object, ...]] = {"type": ("float",), "num_bits": (8,), "strategy": ("tensor", "attn_head")}
_NAMES = ("kv_cache_scheme", "kv_cache_quant_algo")


def cache_type_of(model_config: Mapping[str, object], *, has_plain_attention: bool) -> str | None:
    """Return the type of the cache, None if it follows the model. SizeUnknown if only vLLM knows it.

    `has_plain_attention`: all layers keep keys and values, with or without a window.
    """
    quantization = _quantization(model_config)
    if _is_modelopt(quantization):
        return _type_of_modelopt(_section(model_config, "quantization_config"))
    if not _has_scheme(quantization):
        return None
    if not has_plain_attention:
        raise SizeUnknown(f"with a `kv_cache_scheme` of compressed-tensors, only {READER} knows the size of a block")
    return "fp8"


def require_known_scheme(model_config: Mapping[str, object]) -> None:
    """SizeUnknown for a `kv_cache_scheme` that vLLM 0.32 refuses when it loads the model, whatever its arguments."""
    quantization = _quantization(model_config)
    if not _has_scheme(quantization):
        return
    given = _section(quantization, "kv_cache_scheme")
    wrong = next((name for name, accepted in _SCHEME.items() if given.get(name) not in accepted), None)
    if wrong is None and given.get("symmetric"):
        return
    name = wrong or "symmetric"
    accepted = " or ".join(f"`{one}`" for one in _SCHEME.get(name, ("true",)))
    raise SizeUnknown(
        f"{READER} refuses this checkpoint: `kv_cache_scheme.{name}` is `{shown(given.get(name))}`, and {READER} "
        f"accepts {accepted}"
    )


def is_quantized(model_config: Mapping[str, object]) -> bool:
    """Whether the checkpoint has a section about quantization."""
    text = _section(model_config, "text_config")
    names = ("quantization_config", "compression_config")
    return any(facts.get(name) is not None for facts in (model_config, text) for name in names)


def _quantization(model_config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the section about quantization that vLLM reads, empty if there is none."""
    outer = _section(model_config, "quantization_config")
    inner = _section(_section(model_config, "text_config"), "quantization_config")
    return outer or inner or _section(model_config, "compression_config")


def _has_scheme(quantization: Mapping[str, object]) -> bool:
    return _method(quantization) == "compressed-tensors" and quantization.get("kv_cache_scheme") is not None


def _section(facts: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = facts.get(name)
    return section if isinstance(section, Mapping) else {}


def _method(quantization: Mapping[str, object]) -> str:
    return str(quantization.get("quant_method") or "").lower().replace("_", "-")


def _is_modelopt(quantization: Mapping[str, object]) -> bool:
    """vLLM names the method itself if ModelOpt wrote the section, and refuses an algorithm that it does not know."""
    inner = _section(quantization, "quantization")
    algorithm = inner.get("quant_algo")
    is_written_by_modelopt = _section(quantization, "producer").get("name") == "modelopt"
    if (is_written_by_modelopt or "modelopt_quant_config" in inner) and algorithm is not None:
        if str(algorithm).upper() not in _MODELOPT_ALGORITHMS:
            raise SizeUnknown(f"{READER} does not know the quantization `{algorithm}` of this checkpoint")
        return True
    return _method(quantization).startswith("modelopt")


def _type_of_modelopt(quantization: Mapping[str, object]) -> str | None:
    inner = quantization.get("quantization")
    sections = [inner, quantization] if isinstance(inner, Mapping) else [quantization]
    scheme = next((section[name] for name in _NAMES for section in sections if section.get(name)), None)
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        return "fp8_e4m3" if bits == 8 and scheme.get("dynamic") is False else "nvfp4" if bits == 4 else None
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower())
