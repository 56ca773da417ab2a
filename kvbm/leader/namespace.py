"""Namespace: names all blocks that are interchangeable.

Tiers that outlive the engine or that several engines share keep the blocks of each namespace apart. Engines with equal
content have equal namespaces, on all machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import PurePath

from kvbm.disk.settings import Namespace
from kvbm.hashing import namespace
from kvbm.types import SegmentInfo

KV_FORMAT = 2  # of blocks; increase it when kvbm stores the same KV in other bytes
DISPLAY = "model"  # shown to users; it does not count


Identity = tuple[Mapping[str, object], str]
"""Everything that decides the bytes and hashes of a block, except the layouts of the segments, and a doubt: why blocks
of this engine could be wrong for another one of equal identity, empty if they could not. `model` is shown to users and
does not count."""


def namespace_of(segments: Sequence[SegmentInfo], identity: Identity) -> tuple[Namespace, str]:
    """Return the namespace of an engine's blocks, and why others must not use them, empty if they may."""
    facts, doubt = identity
    layouts = [[info.block_bytes, info.slot_stride, info.layout_digest] for info in segments if info.replica == 0]
    named = {"kvbm": KV_FORMAT, "layouts": layouts, **facts}
    digest = namespace({name: value for name, value in named.items() if name != DISPLAY})
    if not doubt and "engine" not in facts:
        doubt = "the engine does not say what determines its blocks"
    return Namespace(digest, named), doubt


def known(facts: Mapping[str, object], doubt: str = "") -> Future[Identity]:
    """Return an identity that is known already."""
    identity: Future[Identity] = Future()
    identity.set_result((facts, doubt))
    return identity


def public_facts(namespace: Namespace) -> dict[str, object]:
    """Return the facts of a namespace for people on other machines: without the directory of the model."""
    facts = dict(namespace.facts)
    if DISPLAY in facts:
        facts[DISPLAY] = PurePath(str(facts[DISPLAY])).name
    return facts
