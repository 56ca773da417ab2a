"""Messages between an engine and the process that digests the files of its model.

engine ──▶ DigestOrder ──▶ child
engine ◀── Digests, Problem, Logged ◀── child

Those that are not here are in process/child.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm.identity.content import Signature


class DigestOrder(NamedTuple):
    """The first message. `cores`: allowed for the threads."""

    files: Sequence[tuple[str, Signature]]
    cores: frozenset[int]


class Digests(NamedTuple):
    """Digests of the files, in order."""

    digests: Sequence[str]
