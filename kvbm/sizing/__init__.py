"""Sizing: computes the bytes of a block and the number of blocks of each tier from a model and a profile.

Pure functions. Model facts have the names of a Hugging Face `config.json`. The bytes of a token depend on the engine,
whose folder has a module `sizing`. A block in G2 occupies a slot on every rank: the rank's part of the block, rounded
up to whole pages. `tiers.host.capacity` is the sum over the ranks. Ranks with equal KV share one slot.
"""

from __future__ import annotations

from kvbm.sizing.families.facts import SizeUnknown
from kvbm.sizing.findings import StateFinding, StateLevel
from kvbm.sizing.tiers import ESTIMATE, PAGE_BYTES, Device, Sizing, SnapshotSize, TierSize
from kvbm.sizing.wanted import Cpu, Wanted

__all__ = [
    "ESTIMATE",
    "PAGE_BYTES",
    "Cpu",
    "Device",
    "SizeUnknown",
    "Sizing",
    "SnapshotSize",
    "StateFinding",
    "StateLevel",
    "TierSize",
    "Wanted",
]
