"""Content of media: a digest of everything that vLLM's encoder receives of an image, a sound or a video.

The digest covers the name, the type, the shape and the bytes of each tensor, plain values, and how all of them are
nested. It resists collisions, because clients choose the contents. Two contents that differ anywhere have different
digests, also if the encoder would ignore the difference: that costs hits, never answers.

What cannot be read has no digest: tensors on a device, types that are not known here, and the address of data in a
shared memory, which vLLM sends instead of the data with `--mm-processor-cache-type shm`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

FORM = b"kvbm media 1"  # increase the number when the same content gets another digest
MAX_DEPTH = 16
_PLAIN = (str, bytes, int, float, bool, type(None))
_ADDRESS = "address"  # the key by which vLLM itself recognises an item in shared memory


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...

    def digest(self) -> bytes: ...


class UnreadableContent(Exception):
    """The content of a medium cannot be digested."""


def digest_of(data: Any, modality: str) -> bytes:
    """Return the digest of one medium. Raises UnreadableContent. hashlib releases the GIL while it reads a tensor."""
    if data is None or (isinstance(data, Mapping) and _ADDRESS in data):
        raise UnreadableContent("the data is not there")
    found = hashlib.sha256()
    _add(found, b"form", FORM)
    _add(found, b"modality", modality.encode())
    if not _add_value(found, data, 0):
        raise UnreadableContent("the data has no tensor")
    return found.digest()


def stamp_of(data: Any) -> tuple[tuple[int, int], ...] | None:
    """Return the number of bytes of each tensor in `data`, and how often it was changed in place. None if unknown."""
    try:
        return tuple((tensor.nbytes, tensor._version) for tensor in _tensors(data, 0))
    except (AttributeError, RuntimeError, UnreadableContent):  # arrays and inference tensors count no changes
        return None


def size_of(data: Any) -> int:
    """Return the number of bytes in the tensors and arrays of `data`."""
    try:
        return sum(int(tensor.nbytes) for tensor in _tensors(data, 0))
    except UnreadableContent:
        return 0


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    if depth > MAX_DEPTH:
        raise UnreadableContent("the data is nested too deeply")
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one, depth + 1)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one, depth + 1)
    elif hasattr(value, "nbytes"):
        yield value
    elif hasattr(value, "field"):
        yield from _tensors(value.data, depth + 1)


def _add_value(found: _Hash, value: Any, depth: int) -> bool:
    """Add a value to the hash. Return whether it contains a tensor or an array with at least one byte."""
    import numpy as np
    import torch

    if depth > MAX_DEPTH:
        raise UnreadableContent("the data is nested too deeply")
    if isinstance(value, torch.Tensor):
        return _add_tensor(found, value)
    if isinstance(value, np.ndarray | np.generic):
        return _add_array(found, np.asarray(value))
    if isinstance(value, Mapping):
        return _add_mapping(found, value, depth)
    if isinstance(value, list | tuple):
        _add(found, b"list", str(len(value)).encode())
        has_content = False
        for one in value:
            has_content |= _add_value(found, one, depth + 1)
        return has_content
    if type(value) in _PLAIN:
        text = value if isinstance(value, bytes) else repr(value).encode("utf-8", "backslashreplace")
        _add(found, type(value).__name__.encode(), text)
        return False
    if hasattr(value, "field") and hasattr(value, "data"):  # a MultiModalFieldElem
        # How vLLM joins it with others. Its positions among the others of a request are not content.
        _add(found, b"field", f"{type(value.field).__name__} {getattr(value.field, 'dim', '')}".encode())
        return _add_value(found, value.data, depth + 1)
    raise UnreadableContent(f"`{type(value).__name__}` is not a known type of data")


def _add_mapping(found: _Hash, value: Mapping[Any, Any], depth: int) -> bool:
    if not all(type(name) is str for name in value):
        raise UnreadableContent("a name in the data is not text")
    _add(found, b"mapping", str(len(value)).encode())
    has_content = False
    for name in sorted(value):
        _add(found, b"name", name.encode("utf-8", "backslashreplace"))
        has_content |= _add_value(found, value[name], depth + 1)
    return has_content


def _add_tensor(found: _Hash, tensor: Any) -> bool:
    import torch

    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        raise UnreadableContent(f"a tensor on {tensor.device} of layout {tensor.layout}")
    _add(found, b"tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    _add(found, b"bytes", flat.numpy().data)
    return bool(flat.numel())


def _add_array(found: _Hash, array: Any) -> bool:
    import numpy as np

    if array.dtype.hasobject:
        raise UnreadableContent("an array of objects")
    _add(found, b"array", f"{array.dtype.descr} {array.shape}".encode())
    _add(found, b"bytes", np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return bool(array.nbytes)


def _add(found: _Hash, tag: bytes, data: Any) -> None:
    """Add a tag and data, each with its length, so that no two sequences of them give the same bytes."""
    for part in (tag, data):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
