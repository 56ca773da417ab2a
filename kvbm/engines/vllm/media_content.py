"""Content of media: a digest of everything that vLLM's encoder receives of an image, a sound or a video.

The digest covers the name, the type, the shape and the bytes of each tensor, plain values, and how all of them are
nested. It resists collisions, because clients choose the contents. Two contents that differ anywhere have different
digests, also if the encoder would ignore the difference: that costs hits, never answers.

What cannot be read has no digest: tensors on a device, types that are not known here, and the address of data in a
shared memory, which vLLM sends instead of the data with `--mm-processor-cache-type shm`.

Digests are computed in threads: the content of an image can be 100 MB, and an engine step must not wait. The thread of
vLLM's scheduler submits data and reads results. The threads write `digest` and then `is_known` of a Content, and
nothing else. Data is kept until it has been digested.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

FORM = b"kvbm media 1"  # increase the number when the same content gets another digest
MAX_DEPTH = 16
THREADS = 2
MAX_WAITING_BYTES = 1 << 30  # of data that waits; more of it gets no digest
_PLAIN = (str, bytes, int, float, bool, type(None))
_ADDRESS = "address"  # the key by which vLLM itself recognises an item in shared memory

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int], ...]


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


def stamp_of(data: Any) -> Stamp | None:
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


class Content:
    """The content of one medium. `digest` is None until it `is_known`, and afterwards if the content has none."""

    __slots__ = ("digest", "is_known")

    def __init__(self, *, is_known: bool = False) -> None:
        self.digest: bytes | None = None
        self.is_known = is_known


Key = tuple[int, str]


class MediaDigests:
    """Digests the data of media once per object. vLLM's processor cache gives equal media the same object."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvbm-media")  # start with the first medium
        self._known: dict[Key, tuple[weakref.ref[Any], Stamp, Content]] = {}
        self._waiting: list[tuple[int, Content]] = []  # with their bytes

    def of(self, data: Any, modality: str) -> Content:
        """Return the content of `data`, whose digest comes later. Without data, or if too much waits, it has none."""
        if data is None:
            return Content(is_known=True)
        key, stamp = (id(data), modality), stamp_of(data)
        known = self._known.get(key)
        if known is not None and known[0]() is data and stamp is not None and known[1] == stamp:
            return known[2]
        self._waiting = [one for one in self._waiting if not one[1].is_known]
        if sum(size for size, _ in self._waiting) > MAX_WAITING_BYTES:
            return Content(is_known=True)
        content = Content()
        try:
            self._threads.submit(_digest, content, data, modality)
        except (RuntimeError, MemoryError) as error:  # the data waits; the next medium tries again
            log.warning("kvbm: cannot start a thread that digests media: %s", error)
        self._waiting.append((size_of(data), content))
        if stamp is not None:
            self._remember(key, data, stamp, content)
        return content

    def close(self) -> None:
        """Let the threads end after their present task."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _remember(self, key: Key, data: Any, stamp: Stamp, content: Content) -> None:
        known = self._known

        def forget(reference: weakref.ref[Any]) -> None:
            if (entry := known.get(key)) is not None and entry[0] is reference:
                del known[key]

        try:
            known[key] = weakref.ref(data, forget), stamp, content
        except TypeError:  # a type without weak references
            known.pop(key, None)


def _digest(content: Content, data: Any, modality: str) -> None:
    try:
        content.digest = digest_of(data, modality)
    except UnreadableContent as error:
        log.debug("kvbm: no digest of a medium (%s): %s", modality, error)
    except Exception:  # data has any form that a model's processor gives it
        log.exception("kvbm: a medium (%s) cannot be digested", modality)
    content.is_known = True
