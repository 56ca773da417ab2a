"""Request key: what besides the tokens decides the KV of a request, or that the request must bypass the cache.

Two requests share blocks only if their keys are equal. The key covers the salt of a tenant and the LoRA adapter.
Requests are objects of C++ or of Python, and versions differ in what can be read. If a feature is on and a request does
not have its attribute, the request bypasses the cache for loads and saves.

So does every request with images or other media, whose tokens are all alike. The content is not there in every version,
and the hashes of TensorRT-LLM do not replace it: in some versions they leave out the shape and the kind of a medium,
and images of equal bytes and other shapes have the same one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SALTS = ("cache_salt", "cache_salt_id")  # the text of the client, or a number made from it
_MEDIA = (
    *("multimodal_hashes", "multimodal_positions", "multimodal_lengths", "multimodal_embedding"),
    "mrope_rotary_cos_sin",
)
_MEDIA_DATA = "py_multimodal_data"  # of the PyTorch backend, also for media that it could not hash
_FROM_TOKENS = "mrope_config"  # in the data of each request, also of text
_UNKNOWN_INPUT = ("prompt_embedding_table", "encoder_tokens", "encoder_input_features")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class RequestKey:
    """`salt` is a text of everything that the key covers, None if there is nothing. `tenant` is the cache salt."""

    salt: str | None
    tenant: str | None


def request_key(request: Any, *, has_adapters: bool, has_salts: bool) -> RequestKey | None:
    """Return the key of a request, None if it must bypass the cache. `has_adapters` and `has_salts`: the engine has the
    feature, so that a request without the attribute is ambiguous."""
    salt = _first(request, SALTS)
    adapter = getattr(request, "lora_task_id", _MISSING)
    if (has_salts and salt is _MISSING) or (has_adapters and adapter is _MISSING):
        return None
    if any(_is_given(getattr(request, name, None)) for name in _UNKNOWN_INPUT):
        return None
    if _has_media(request):
        return None
    facts = {
        "salt": None if salt is _MISSING else salt,
        "adapter": None if adapter is _MISSING else adapter,
    }
    tenant = None if facts["salt"] is None else str(facts["salt"])
    given = {name: value for name, value in facts.items() if value is not None}
    return RequestKey(json.dumps(given, sort_keys=True, default=repr) if given else None, tenant)


def _first(request: Any, names: tuple[str, ...]) -> Any:
    values = [getattr(request, name, _MISSING) for name in names]
    found = [value for value in values if value is not _MISSING]
    return next((value for value in found if value is not None), found[0] if found else _MISSING)


def _has_media(request: Any) -> bool:
    data = getattr(request, _MEDIA_DATA, None) or {}
    return any(_is_given(getattr(request, name, None)) for name in _MEDIA) or not data.keys() <= {_FROM_TOKENS}


def _is_given(value: Any) -> bool:
    """Whether a request has this input. An object without a length counts, a tensor by its length."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)
