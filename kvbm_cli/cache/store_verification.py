"""`kvbm cache verify` with `--url`: reads objects, and proves their bytes and their origin."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import reason_of
from kvbm_cli.cache.store_objects import SHOWN_HEX, note_left_out
from kvbm_cli.cache.store_selection import PROGRESS_AFTER_S, Selected, StoreRequest, opened, select
from kvbm_cli.terminal.console import print_data, print_json
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.quantities import counted

if TYPE_CHECKING:
    from kvbm.tiers.shared.protection import Protection
    from kvbm_cli.store.inventory import Inventory, StoredExtent

DAMAGED = 1
SHOWN_OBJECTS = 10


@dataclass(frozen=True, slots=True)
class ObjectVerdict:
    """What a read of one object has shown. `problem` is why its bytes are wrong, `failure` why they are unknown."""

    extent: StoredExtent
    problem: str | None = None
    failure: str | None = None
    is_gone: bool = False
    protection: int = 0
    is_proven: bool = False


@dataclass(slots=True)
class NamespaceVerdict:
    """The verdicts of one namespace. `unproven` objects are intact, but are not protected although there is a key, or
    protected although there is none. Of the `hidden` ones, which are encrypted, only the header was verified."""

    namespace: str
    good: int = 0
    unproven: int = 0
    hidden: int = 0
    gone: int = 0
    deleted: int = 0
    bad: list[dict[str, str]] = field(default_factory=list)
    unread: list[dict[str, str]] = field(default_factory=list)

    @property
    def is_intact(self) -> bool:
        return not self.bad and not self.unread

    def as_data(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


class Keys:
    """The protections that a secret allows; none without a secret."""

    def __init__(self, key_file: Path | None) -> None:
        """Raise EnvironmentProblem if the secret cannot be read."""
        from kvbm.tiers.shared.protection import protection_of
        from kvbm.tiers.shared.settings import KEY_VARIABLE

        self._key_file = key_file
        self.has_secret = key_file is not None or bool(os.environ.get(KEY_VARIABLE))
        self._known: dict[int, Protection | None] = {0: None}
        if self.has_secret:
            authentic = protection_of("hmac", key_file)
            self._known[authentic.code] = authentic

    def of(self, code: int) -> Protection | None:
        """Return what opens objects with this protection, None without a secret. Raises EnvironmentProblem."""
        from kvbm.tiers.shared.protection import AesProtection, protection_of

        if self.has_secret and code == AesProtection.code and code not in self._known:
            self._known[code] = protection_of("aes-gcm", self._key_file)
        return self._known.get(code)


def verify_objects(
    request: StoreRequest, *, key_file: Path | None, sample: int | None, deletes_bad: bool, as_json: bool
) -> int:
    """Return 1 if an object is bad, or if an object or a part of the store could not be read."""
    keys = Keys(key_file)
    inventory = opened(request, changes=deletes_bad)
    found = [one for one in select(inventory, request) if one.extents]
    if not found and not as_json:
        print_data(f"no objects in {request.url}")
    verdicts = []
    for one in _sampled(found, sample):
        verdicts.append(_verify(inventory, one, keys, deletes_bad=deletes_bad))
        if not as_json:
            print_data(_text(verdicts[-1]))
    if as_json:
        print_json([verdict.as_data() for verdict in verdicts])
    is_incomplete = bool(note_left_out(inventory))
    return 0 if all(verdict.is_intact for verdict in verdicts) and not is_incomplete else DAMAGED


def _sampled(found: Sequence[Selected], sample: int | None) -> list[Selected]:
    """Return `sample` random objects of the selection, all if there are not more."""
    extents = [extent for one in found for extent in one.extents]
    if sample is None or len(extents) <= sample:
        return list(found)
    chosen = set(random.sample(extents, sample))
    parts = [Selected(one.stored, [extent for extent in one.extents if extent in chosen]) for one in found]
    return [part for part in parts if part.extents]


def _verify(inventory: Inventory, selected: Selected, keys: Keys, *, deletes_bad: bool) -> NamespaceVerdict:
    from kvbm_cli.store.inventory import PARALLEL_READS

    verdict, bad = NamespaceVerdict(selected.name), []
    read, done = partial(_read, inventory, keys=keys), 0
    with ProgressDisplay("verifying", delay_s=PROGRESS_AFTER_S) as progress:
        for one in inventory.each(read, selected.extents, threads=PARALLEL_READS):
            done += one.extent.byte_count
            progress.report_bytes(selected.name[:SHOWN_HEX], done, selected.byte_count)
            if one.problem is not None:
                bad.append(one.extent)
            _count(verdict, one, has_secret=keys.has_secret)
    for rows in (verdict.bad, verdict.unread):  # a directory lists its files in any order
        rows.sort(key=itemgetter("key"))
    if bad and deletes_bad:
        verdict.deleted = len(bad) - len(inventory.delete(bad, lambda count: None))
    return verdict


def _read(inventory: Inventory, extent: StoredExtent, keys: Keys) -> ObjectVerdict:
    from kvbm.tiers.shared.extent_format import BadObject
    from kvbm_cli.store.inspection import HEAD_BYTES, found_extent, verify

    try:
        content = inventory.read(extent, HEAD_BYTES)
        if content is not None:  # does its header allow this length, before it is read into memory
            found_extent(content, namespace=extent.namespace, byte_count=extent.byte_count)
            content = inventory.read(extent)
        if content is None:
            return ObjectVerdict(extent, is_gone=True)
        head = found_extent(content, namespace=extent.namespace, byte_count=len(content))
        is_proven = verify(content, head, extent.name, keys.of(head.protection))
        return ObjectVerdict(extent, protection=head.protection, is_proven=is_proven)
    except OSError as error:
        return ObjectVerdict(extent, failure=reason_of(error))
    except BadObject as error:
        return ObjectVerdict(extent, problem=str(error))


def _count(verdict: NamespaceVerdict, one: ObjectVerdict, *, has_secret: bool) -> None:
    from kvbm.tiers.shared.protection import AesProtection

    if one.problem is not None:
        verdict.bad.append({"key": one.extent.key, "problem": one.problem})
    elif one.failure is not None:
        verdict.unread.append({"key": one.extent.key, "problem": one.failure})
    elif one.is_gone:
        verdict.gone += 1
    else:
        verdict.good += 1
        is_hidden = one.protection == AesProtection.code and not one.is_proven
        verdict.hidden += is_hidden
        verdict.unproven += not one.is_proven and not is_hidden and has_secret != bool(one.protection)


def _text(verdict: NamespaceVerdict) -> str:
    read = verdict.good + len(verdict.bad)
    text = f"{verdict.namespace[:SHOWN_HEX]}: {counted(read, 'object')} read, {len(verdict.bad):,} bad"
    if verdict.bad:
        is_partly = 0 < verdict.deleted < len(verdict.bad)
        all_or_none = " and deleted" if verdict.deleted else ", not deleted"
        text += f", of which {verdict.deleted:,} deleted" if is_partly else all_or_none
    text += f"; {len(verdict.unread):,} could not be read" if verdict.unread else ""
    text += f"; {verdict.gone:,} deleted meanwhile" if verdict.gone else ""
    text += f"; {verdict.unproven:,} without proof of origin" if verdict.unproven else ""
    text += f"; {verdict.hidden:,} encrypted, of which only the header was verified" if verdict.hidden else ""
    problems = [*verdict.bad, *verdict.unread]
    lines = [text, *(f"  {one['key']}: {one['problem']}" for one in problems[:SHOWN_OBJECTS])]
    if len(problems) > SHOWN_OBJECTS:
        lines.append(f"  and {len(problems) - SHOWN_OBJECTS:,} more; `--json` lists all")
    return "\n".join(lines)
