"""Descriptions: what a KV event says about one block besides its name, in a compact form.

A router computes its own name of a block from the tokens and the parent, so an event without them is of no use to it. A
description is taken from the request that computes the block, and kept as long as the block is in a tier:

    form      1 byte     FORM, and flags: whether there is a parent, and whether names are bytes or integers
    parent    8 bytes    the parent's name as vLLM publishes it: the end of its hash; the whole hash if names are bytes
    tokens    4 bytes for each token of the block, little-endian
    extras    the rest   msgpack of (id of the adapter, its name, extra keys); nothing for a plain block

The same bytes are stored next to the block on disk. `is_sound` checks those that come back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, maybe_convert_block_hash

from kvbm.engines.vllm.cache_groups import is_plain

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvbm.engines.vllm.cache_groups import TransferGroup

FORM = 0x40  # increase it by 4 when the form changes
HAS_PARENT, HAS_BYTES_AS_NAMES = 1, 2
TOKEN_BYTES = 4
INTEGER_BYTES = 8  # of a hash are its name, if vLLM publishes integers


Name = int | bytes
PartOfGroup = tuple["Descriptions", Sequence[bytes], Sequence[bytes]]  # form, hashes, values


class Extras(NamedTuple):
    """What decides the hash of a block besides its tokens: the adapter, and vLLM's extra keys as it publishes them."""

    adapter_id: int | None = None
    adapter: str | None = None
    keys: Any = None


NO_EXTRAS = Extras()


class Descriptions:
    """Makes and reads the descriptions of the blocks of one KV cache group. `hash_bytes`: length of vLLM's hashes."""

    def __init__(self, group: TransferGroup, hash_bytes: int) -> None:
        self.group = group
        self.block_tokens = group.group.block_tokens
        self._hash_bytes = hash_bytes
        self._has_integers = isinstance(maybe_convert_block_hash(BlockHash(bytes(hash_bytes))), int)
        self._name_bytes = INTEGER_BYTES if self._has_integers else hash_bytes
        self._form = FORM | (0 if self._has_integers else HAS_BYTES_AS_NAMES)
        self._tokens_at = 1 + self._name_bytes
        self._width = self._tokens_at + TOKEN_BYTES * self.block_tokens

    def names(self, hashes: Sequence[bytes]) -> Sequence[Name]:
        """Return the names that vLLM publishes, of kvbm's hashes, which begin with vLLM's."""
        return self._names(self._table(hashes))

    def _table(self, hashes: Sequence[bytes]) -> NDArray[np.uint8]:
        """Return the bytes of the names, one row per block."""
        rows = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
        return rows[:, self._hash_bytes - self._name_bytes : self._hash_bytes]

    def _names(self, table: NDArray[np.uint8]) -> Sequence[Name]:
        if not self._has_integers:
            return [row.tobytes() for row in table]
        names: Sequence[Name] = np.ascontiguousarray(table).view(">u8").ravel().astype(np.uint64).tolist()
        return names

    def short_name(self, sequence_hash: bytes) -> bytes:
        """Return the part of a sequence hash that its children mention, and its group."""
        start = self._hash_bytes - self._name_bytes
        return sequence_hash[start:]

    def short_parent(self, sequence_hash: bytes, description: bytes) -> bytes | None:
        """Return the short name of the parent of a block; None if it has none."""
        if not description[0] & HAS_PARENT:
            return None
        return description[1 : self._tokens_at] + sequence_hash[self._hash_bytes :]

    def of(self, request: Request, begin: int, hashes: Sequence[bytes], parent: bytes | None) -> list[bytes]:
        """Return the descriptions of `hashes`, the blocks of a request from its block `begin` on. `parent`: the hash of
        the block before, None if there is none."""
        size, end = self.block_tokens, begin + len(hashes)
        tokens = array("I", request.all_token_ids[begin * size : end * size])
        found = self._plain(tokens.tobytes(), hashes, parent)
        if not _has_extras(request):
            return found
        extras = _extras_of(request, range(begin * size, end * size, size), size)
        return [one + extra for one, extra in zip(found, extras, strict=True)]

    def _plain(self, tokens: bytes, hashes: Sequence[bytes], parent: bytes | None) -> list[bytes]:
        """Return the descriptions without extras. `tokens`: those of all blocks, as they are stored."""
        name, step = slice(self._hash_bytes - self._name_bytes, self._hash_bytes), TOKEN_BYTES * self.block_tokens
        child = bytes((self._form | HAS_PARENT,))
        head = bytes((self._form,)) + bytes(self._name_bytes) if parent is None else child + parent[name]
        heads = [head, *(child + one[name] for one in hashes[:-1])]
        return [one + tokens[index * step : (index + 1) * step] for index, one in enumerate(heads)]

    def extents(self, hashes: Sequence[bytes], found: Sequence[bytes]) -> Iterable[dict[str, Any]]:
        """Split blocks into extents: each block is the parent of the next one. `found` are their descriptions. Yields
        what BlockStored says of the blocks of one extent."""
        joined, width, extras = b"".join(found), self._width, None
        if len(joined) != len(found) * width:
            joined = b"".join([one[:width] for one in found])
            extras = [_decoded(one[width:]) for one in found]
        rows = np.frombuffer(joined, np.uint8).reshape(len(found), width)
        table = self._table(hashes)
        parents = rows[:, 1 : self._tokens_at]
        follows = (parents[1:] == table[:-1]).all(axis=1) & ((rows[1:, 0] & HAS_PARENT) != 0)
        bounds = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(found)]
        names, forms, size = self._names(table), rows[:, 0].tolist(), self.block_tokens
        parent_names = self._names(parents[bounds[:-1]])
        tokens = np.ascontiguousarray(rows[:, self._tokens_at :]).view("<u4").ravel().tolist()
        for (begin, end), parent in zip(pairwise(bounds), parent_names, strict=True):
            first = NO_EXTRAS if extras is None else extras[begin]
            yield {
                "block_hashes": names[begin:end],
                "parent_block_hash": parent if forms[begin] & HAS_PARENT else None,
                "token_ids": tokens[begin * size : end * size],
                "lora_id": first.adapter_id,
                "lora_name": first.adapter,
                "extra_keys": [None] * (end - begin) if extras is None else [one.keys for one in extras[begin:end]],
            }

    def restored(self, note: bytes) -> bytes | None:
        """Return the description in the note of a block on disk, None if it has none or one of another form.

        The number of an adapter is one of the process that wrote it; the name is the same in every process.
        """
        if len(note) < self._width or note[0] & ~HAS_PARENT != self._form:
            return None
        if len(note) == self._width:
            return note
        try:
            extras = _decoded(note[self._width :])
        except (msgspec.DecodeError, RecursionError, TypeError, ValueError):
            return None
        return note[: self._width] + _encoded(extras._replace(adapter_id=None))


class Forms:
    """The descriptions of all groups. The last byte of a hash says to which group a block belongs (block_tables.py)."""

    def __init__(self, groups: Sequence[TransferGroup], hash_bytes: int) -> None:
        self.all = [Descriptions(group, hash_bytes) for group in groups]
        self._by_index = {form.group.index: form for form in self.all}

    def of(self, sequence_hash: bytes) -> Descriptions | None:
        return self._by_index.get(sequence_hash[-1])

    def split(self, hashes: Sequence[bytes], values: Sequence[bytes]) -> Iterator[PartOfGroup]:
        """Split blocks, and a value of each, by their KV cache group."""
        for form in self.all:
            pairs = [pair for pair in zip(hashes, values, strict=True) if pair[0][-1] == form.group.index]
            if pairs:
                yield form, [name for name, _ in pairs], [value for _, value in pairs]


class PlainForms(Forms):
    """The descriptions of the only group, whose hashes do not name it."""

    def of(self, sequence_hash: bytes) -> Descriptions:
        return self.all[0]

    def split(self, hashes: Sequence[bytes], values: Sequence[bytes]) -> Iterator[PartOfGroup]:
        if hashes:
            yield self.all[0], hashes, values


def forms_of(groups: Sequence[TransferGroup], hash_bytes: int) -> Forms:
    return (PlainForms if is_plain(groups) else Forms)(groups, hash_bytes)


def _has_extras(request: Request) -> bool:
    adapter, embeddings = request.lora_request, getattr(request, "prompt_embeds", None)
    return adapter is not None or bool(request.cache_salt or request.mm_features) or embeddings is not None


def _extras_of(request: Request, starts: Iterable[int], size: int) -> list[bytes]:
    """Return the encoded extras of the blocks of `size` tokens that begin at `starts`."""
    adapter, medium, keys = request.lora_request, 0, []
    for start in starts:
        some, medium = generate_block_hash_extra_keys(request, start, start + size, medium)
        keys.append(some)
    publish = getattr(kv_cache_utils, "to_event_extra_keys", list)  # before 0.31 they are published as they are
    number, name = (None, None) if adapter is None else (adapter.adapter_id, adapter.name)
    return [_encoded(Extras(number, name, some)) for some in publish(keys)]


def _encoded(extras: Extras) -> bytes:
    return b"" if extras == NO_EXTRAS else msgspec.msgpack.encode(extras)


def _decoded(extras: bytes) -> Extras:
    if not extras:
        return NO_EXTRAS
    number, name, keys = msgspec.msgpack.decode(extras)
    return Extras(number, name, keys)
