"""Media: decides what the blocks of a request with images, sounds or videos are called, and whether they are kept.

vLLM calls a medium by an identifier. A client can choose it, vLLM can make it from a counter, and a text of 64 hex
digits says nothing about the content either. So an identifier never counts. Blocks are named like this:

    tokens      0 ............ offset of the first medium ......................... end of the prompt, generated tokens
    blocks      [ text ][ text ][ text, medium ][ medium ][ medium, text ][ text ][ text, second medium ] ...
    name        vLLM's hash     hash of vLLM's hash and of all media that begin before the block's end

A digest of the content is computed in a thread. Until it is known, and if there is none, nothing from the first such
medium on is kept or looked up. Text in front of it is.

vLLM caches the encodings of media, and KV in G1, by the identifier. If two contents had the same identifier, the KV of
either may be that of the other. So blocks are kept only while an identifier `is_certain`: every request of this engine
that used it had the same content, with a digest. This covers KV that vLLM computed at any time before. An identifier
that is not certain does not become certain again, unless it only waits for a digest. The table of identifiers is
bounded: those that leave it are remembered in a filter, and are not certain if they return.

The thread of vLLM's scheduler owns it.
"""

from __future__ import annotations

import hashlib
import os
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbm.engines.vllm.media_content import Content, MediaDigests

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

UNLIMITED = 1 << 62
PATIENCE_S = 1.0  # that a request waits for its digests before it is looked up without them
MAX_IDENTIFIERS = 65_536
MAX_IDENTIFIER_LENGTH = 1024  # characters; vLLM's own have at most 128, besides the name of an adapter
FILTER_BYTES, FILTER_HASHES = 1 << 23, 4  # of 5 million identifiers that left the table, 0.5 % of others are mistaken
PERSON = b"kvbm media block"


@dataclass(slots=True)
class Identifier:
    """What is known of an identifier: the contents that are not known yet, the digest of all others, the encoder."""

    digest: bytes | None = None
    waiting: list[Content] = field(default_factory=list)
    is_doubtful: bool = False
    encoder: str | None = None

    def add(self, content: Content, encoder: str = "") -> None:
        if self.encoder not in (None, encoder):
            self.distrust()
        self.encoder = encoder
        if not self.is_doubtful and content not in self.waiting:
            self.waiting.append(content)

    def is_certain(self) -> bool:
        """Return whether every content so far has the same digest."""
        self._settle()
        return not (self.waiting or self.is_doubtful)

    def is_waiting(self) -> bool:
        self._settle()
        return bool(self.waiting) and not self.is_doubtful

    def distrust(self) -> None:
        self.is_doubtful, self.waiting, self.digest = True, [], None

    def _settle(self) -> None:
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        for content in waiting:
            if not content.is_known:  # asked once: it can become known at any time
                self.waiting.append(content)
            elif content.digest is None or self.digest not in (None, content.digest):
                self.distrust()
                return
            else:
                self.digest = content.digest


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of a request, at `offset`. `place` is the rest of its position, in bytes."""

    offset: int
    place: bytes
    identifier: Identifier
    content: Content


class RequestMedia:
    """The media of one request, in the order of their offsets, and the names of its blocks."""

    def __init__(self, media: Sequence[Medium], hash_bytes: int, deadline_s: float) -> None:
        self._media = media
        self._offsets = [one.offset for one in media]
        self._hash_bytes = hash_bytes
        self._deadline_s = deadline_s
        self._prefixes = [b""]  # of the first media, by their number: what they contribute to a name

    def certain_tokens(self) -> int:
        """Return how many tokens of the request can be in blocks that are kept or looked up."""
        first = self._first_uncertain()
        return UNLIMITED if first is None else first.offset

    def is_waiting(self, now_s: float) -> bool:
        """Return whether more tokens will be certain when a digest is known, for which the request may still wait."""
        first = self._first_uncertain()
        return first is not None and now_s < self._deadline_s and first.identifier.is_waiting()

    def distrust(self) -> None:
        """Note that another engine may have computed KV of these media."""
        for one in self._media:
            one.identifier.distrust()

    def name(self, block_hash: bytes, end: int) -> bytes:
        """Return the name of the block that ends after `end` tokens, of at most `certain_tokens`."""
        count = bisect_left(self._offsets, end)
        if not count:
            return block_hash
        return _digest(self._prefix(count), block_hash, size=self._hash_bytes)

    def _first_uncertain(self) -> Medium | None:
        return next((one for one in self._media if not one.identifier.is_certain()), None)

    def _prefix(self, count: int) -> bytes:
        while len(self._prefixes) <= count:
            one = self._media[len(self._prefixes) - 1]
            assert one.content.digest is not None
            self._prefixes.append(_digest(self._prefixes[-1], one.place, one.content.digest))
        return self._prefixes[count]


class Media:
    """The media of all requests of one engine. Every request must be added, also one whose blocks are not kept.

    `hash_bytes`: length of vLLM's block hashes. `encodes_here`: whether this engine computes every encoding, and
    from the content alone.
    """

    def __init__(
        self, hash_bytes: int, *, encodes_here: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hash_bytes = hash_bytes
        self._encodes_here = encodes_here
        self._clock = clock
        self._digests = MediaDigests()
        self._identifiers: OrderedDict[bytes, Identifier] = OrderedDict()  # by their hashes; the least recent one first
        self._filter = bytearray()  # of identifiers that have left the table
        self._secret = os.urandom(32)  # so that no client finds identifiers which the filter mistakes for others
        self._sessions: dict[str, tuple[Request, int]] = {}  # requests that can get more media, and how many they have

    def add(self, request: Request) -> RequestMedia | None:
        """Note the media of a new request. None if it has none."""
        features = request.mm_features
        if request.resumable:
            self._sessions[request.request_id] = request, len(features)
        if not features:
            return None
        is_here = self._encodes_here and not is_computed_elsewhere(request.kv_transfer_params)
        adapter = request.lora_request
        media = sorted((self._medium(feature, is_here, adapter) for feature in features), key=lambda one: one.offset)
        return RequestMedia(media, self._hash_bytes, self._clock() + PATIENCE_S)

    def look_again(self) -> None:
        """Note what was added to live sessions. Call it in each step, before blocks are kept."""
        for request_id, (request, count) in self._sessions.items():
            for feature in request.mm_features[count:]:
                self._medium(feature, False, request.lora_request)
            self._sessions[request_id] = request, len(request.mm_features)

    def end(self, request: Request) -> None:
        if request.request_id in self._sessions:
            self.look_again()
            del self._sessions[request.request_id]

    def now_s(self) -> float:
        return self._clock()

    def close(self) -> None:
        self._digests.close()

    def _medium(self, feature: Any, is_computed_here: bool, adapter: LoRARequest | None) -> Medium:
        position = feature.mm_position
        place = _place(position)
        has_content = is_computed_here and place is not None
        content = self._digests.of(feature.data, feature.modality) if has_content else Content(is_known=True)
        text = str(feature.identifier)
        identifier = self._identifier(text)
        identifier.add(content, _encoder(text, adapter))
        return Medium(int(position.offset), place or b"", identifier, content)

    def _identifier(self, text: str) -> Identifier:
        """Return the entry of an identifier, which becomes the most recent one."""
        if len(text) > MAX_IDENTIFIER_LENGTH:
            return Identifier(is_doubtful=True)
        key = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=32, key=self._secret).digest()
        found = self._identifiers.pop(key, None) or Identifier(is_doubtful=self._has_left(key))
        self._identifiers[key] = found
        if len(self._identifiers) > MAX_IDENTIFIERS:
            oldest, entry = self._identifiers.popitem(last=False)
            entry.distrust()  # live requests have it
            self._let_go(oldest)
        return found

    def _let_go(self, key: bytes) -> None:
        self._filter = self._filter or bytearray(FILTER_BYTES)
        for byte, bit in _bits(key):
            self._filter[byte] |= bit

    def _has_left(self, key: bytes) -> bool:
        return bool(self._filter) and all(self._filter[byte] & bit for byte, bit in _bits(key))


def _encoder(identifier: str, adapter: LoRARequest | None) -> str:
    """Return which adapter changes the encoding of a medium, empty if none does.

    vLLM then puts its name in front of the identifier, as any client can. The same name can stand for other weights.
    """
    if adapter is None or not identifier.startswith(f"{adapter.lora_name}:"):
        return ""
    return f"{adapter.lora_int_id} {adapter.lora_name}"


def _place(position: Any) -> bytes | None:
    """Return where a medium is, and which of its positions take an encoding. None if that cannot be read."""
    mask = getattr(position, "is_embed", None)
    try:
        taken = b"all" if mask is None else mask.numpy().tobytes()
    except (TypeError, RuntimeError):  # on a device
        return None
    return f"{position.offset} {position.length} ".encode() + taken


def _bits(key: bytes) -> list[tuple[int, int]]:
    """Return the places of a key in the filter: byte and bit."""
    numbers = [int.from_bytes(key[start : start + 8], "little") for start in range(0, 8 * FILTER_HASHES, 8)]
    return [(number // 8 % FILTER_BYTES, 1 << number % 8) for number in numbers]


def _digest(*parts: bytes, size: int = 32) -> bytes:
    found = hashlib.blake2b(digest_size=size, person=PERSON)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def is_computed_elsewhere(params: object) -> bool:
    """Whether another engine computes the prompt of a request (disaggregated prefill): with which media and weights is
    unknown."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))
