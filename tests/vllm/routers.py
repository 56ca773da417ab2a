"""What two routers make of KV events: decoders of both wire forms, and models of the rules of Dynamo and llm-d.

The models keep only what decides whether a request finds a block: which media count as which tier, what is dropped,
what needs an earlier event, and what a removal or a clear takes away. Both count how often a block was stored, and
forget it at the last removal.

    Dynamo     needs tokens; a medium that it does not know, and what is not local, is dropped; below device memory it
               stores edges (parent, tokens) -> block, so that no order is required
    llm-d      needs tokens, or an earlier event of the same block; needs an earlier event of the parent; a removal
               needs the kind of the group; a clear takes every tier of the engine
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

KINDS = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
MAIN_ATTENTION = {"full_attention", "mla_attention", "sink_full_attention"}
GPU = "gpu"


def as_arrays(events: Iterable[Any]) -> list[list[Any]]:
    """Return events as vLLM encoded them before June 2026: arrays, in which defaults at the end are left out."""
    arrays = []
    for event in events:
        kind = type(event)
        values = [getattr(event, name) for name in kind.__struct_fields__]
        defaults = kind.__struct_defaults__
        while defaults and len(values) > len(kind.__struct_fields__) - len(defaults):
            if values[-1] != defaults[len(values) - len(kind.__struct_fields__) - 1]:
                break
            values.pop()
        arrays.append([kind.__name__, *values])
    return arrays


def decoded(payload: bytes) -> list[dict[str, Any]]:
    """Return the events of a batch, in either form, as fields by name and their `type`."""
    _, events, *_ = msgspec.msgpack.decode(payload)
    return [event if isinstance(event, dict) else _named(event) for event in events]


def _named(event: Sequence[Any]) -> dict[str, Any]:
    kind, *values = event
    return {"type": kind, **dict(zip(KINDS[kind].__struct_fields__, values, strict=False))}


TIERS_OF_DYNAMO = {
    None: GPU,
    "GPU": GPU,
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), "host"),
    **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), "disk"),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), "external"),
}


class _Router:
    """Which blocks an engine has: `tiers[tier]` maps the name of a block to what is known about it."""

    def __init__(self) -> None:
        self.tiers: dict[str, dict[int, tuple[Any, ...]]] = defaultdict(dict)
        self.dropped: Counter[str] = Counter()
        self._counts: Counter[tuple[str, int]] = Counter()

    def accept(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            getattr(self, f"_{event['type']}")(event)

    def accept_batch(self, payload: bytes) -> None:
        self.accept(decoded(payload))

    def names(self, tier: str) -> set[int]:
        return set(self.tiers[tier])

    def _AllBlocksCleared(self, event: dict[str, Any]) -> None:
        self.tiers.clear()
        self._counts.clear()

    def _count(self, tier: str, names: Iterable[int]) -> None:
        self._counts.update((tier, name) for name in names)

    def _forget(self, tier: str, names: Iterable[int]) -> None:
        for name in names:
            self._counts[tier, name] -= 1
            if self._counts[tier, name] <= 0:
                del self._counts[tier, name]
                self.tiers[tier].pop(name, None)


class Dynamo(_Router):
    """`block_tokens`: blocks of another size are dropped."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__()
        self._block_tokens = block_tokens

    def matched(self, tokens: Sequence[int]) -> dict[str, int]:
        """Return how many blocks of a prompt each tier adds, the nearest tier first."""
        parent, at, found = None, 0, {}
        for tier in (GPU, "host", "disk"):
            edges = {(known[0], known[1]): name for name, known in self.tiers[tier].items()}
            begin = at
            while (name := edges.get((parent, self._part(tokens, at)))) is not None:
                parent, at = name, at + 1
            found[tier] = at - begin
        return found

    def _part(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._block_tokens : (index + 1) * self._block_tokens])

    def _tier(self, event: dict[str, Any]) -> str | None:
        kind, group = event.get("kv_cache_spec_kind"), event.get("group_idx")
        if (kind is not None and kind not in MAIN_ATTENTION) or (kind is None and group not in (None, 0)):
            self.dropped["group"] += 1
        elif event.get("locality") not in (None, "LOCAL"):
            self.dropped["locality"] += 1
        elif event.get("medium") not in TIERS_OF_DYNAMO:
            self.dropped["medium"] += 1
        else:
            return TIERS_OF_DYNAMO[event.get("medium")]
        return None

    def _BlockStored(self, event: dict[str, Any]) -> None:
        tier, parent, names = self._tier(event), event["parent_block_hash"], event["block_hashes"]
        if tier is None:
            return
        if event["block_size"] != self._block_tokens or len({parent, *names}) <= len(names) - (parent is None):
            self.dropped["form"] += 1
            return
        self._count(tier, names)
        for index, name in enumerate(names):
            tokens = self._part(event["token_ids"], index)
            if len(tokens) < self._block_tokens:
                self.dropped["tokens"] += 1
                return
            if tier == GPU and parent is not None and parent not in self.tiers[GPU]:
                self.dropped["parent"] += 1
                return
            self.tiers[tier][name] = (parent, tokens)
            parent = name

    def _BlockRemoved(self, event: dict[str, Any]) -> None:
        if (tier := self._tier(event)) is not None:
            self._forget(tier, event["block_hashes"])


class Llmd(_Router):
    """Its own names of blocks are the tuples of all tokens up to their end, with media and adapter."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[int, tuple[Any, ...]] = {}  # of every engine; not lost by a clear
        self._groups: dict[int, str] = {}
        self.without_parent: set[int] = set()  # names of blocks that came before their parents

    def matched(self, tokens: Sequence[int], block_tokens: int, model: str = "") -> list[set[str]]:
        """Return the tiers of each block of a prompt, up to the first that no tier has."""
        found: list[set[str]] = []
        key: tuple[Any, ...] = ()
        for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
            key = (key, model, tuple(tokens[at : at + block_tokens]), ())
            tiers = {tier for tier, known in self.tiers.items() if (key,) in known.values()}
            if not tiers:
                break
            found.append(tiers)
        return found

    def _tier(self, event: dict[str, Any]) -> str:
        return (event.get("medium") or GPU).lower()

    def _BlockStored(self, event: dict[str, Any]) -> None:
        tier, names, size = self._tier(event), event["block_hashes"], event["block_size"]
        group, kind = event.get("group_idx"), event.get("kv_cache_spec_kind")
        if group is not None and kind is not None:
            self._groups[group] = kind
        if group is not None and self._groups.get(group) not in MAIN_ATTENTION:
            self.dropped["group"] += 1
            return
        key: tuple[Any, ...] = ()
        if event["parent_block_hash"]:
            if event["parent_block_hash"] not in self._keys:
                self.dropped["parent"] += 1
                self.without_parent.update(names)
                return
            key = self._keys[event["parent_block_hash"]]
        if not event["token_ids"]:
            names = [name for name in names if name in self._keys]
            self.dropped["tokens"] += len(event["block_hashes"]) - len(names)
        extras = event.get("extra_keys") or [None] * len(names)
        for index, name in enumerate(names):
            if event["token_ids"]:
                tokens = tuple(event["token_ids"][index * size : (index + 1) * size])
                media = tuple(one[0] for one in extras[index] or () if isinstance(one, (list, tuple)))
                key = (key, event.get("lora_name") or "", tokens, media)
                self._keys[name] = key
            self.tiers[tier][name] = (self._keys[name],)
        self._count(tier, names)

    def _BlockRemoved(self, event: dict[str, Any]) -> None:
        group = event.get("group_idx")
        if group is not None and self._groups.get(group) not in MAIN_ATTENTION:
            self.dropped["removal"] += 1
            return
        tier = self._tier(event)
        self._forget(tier, event["block_hashes"])
        for name in event["block_hashes"]:
            if not any(name in known for known in self.tiers.values()):
                self._keys.pop(name, None)
