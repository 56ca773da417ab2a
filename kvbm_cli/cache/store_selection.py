"""Selection: which objects of a store a command works on, by namespace, model, tenant and age."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbm.config.values import shared_url
from kvbm.errors import UsageError
from kvbm.hashing import tenant
from kvbm.tiers.shared.settings import directory_of
from kvbm_cli.system.answering import require_answering
from kvbm_cli.terminal.progress import ProgressDisplay

if TYPE_CHECKING:
    from kvbm_cli.store.inventory import Inventory, StoredExtent, StoredNamespace

NAMESPACE_HEX = 32
PROGRESS_AFTER_S = 2.0
AGE = re.compile(r"([0-9]{1,6}) ?(s|min|h|d)")
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """The options of a command, as they were given."""

    url: str
    namespace: str | None = None
    model: str | None = None
    tenant: str | None = None
    older_than: str | None = None


@dataclass(frozen=True, slots=True)
class Selected:
    """The objects of one namespace that were selected. `is_whole`: these are all extents of the namespace."""

    stored: StoredNamespace
    extents: Sequence[StoredExtent]

    @property
    def is_whole(self) -> bool:
        return len(self.extents) == len(self.stored.extents)

    @property
    def name(self) -> str:
        return self.stored.namespace.hex()

    @property
    def byte_count(self) -> int:
        return sum(extent.byte_count for extent in self.extents)

    def fact(self, name: str) -> str | None:
        value = self.stored.facts.get(name)
        return None if value is None else str(value)

    def as_data(self) -> dict[str, object]:
        written = [extent.written_s for extent in self.extents]
        facts: Mapping[str, object] = self.stored.facts
        return {
            "namespace": self.name,
            "model": facts.get("model"),
            "engine": facts.get("engine"),
            "block_tokens": block_tokens(self),
            "block_bytes": facts.get("block_bytes"),
            "objects": len(self.extents),
            "bytes": self.byte_count,
            "oldest": min(written, default=None),
            "newest": max(written, default=None),
            "other_objects": self.stored.other_count,
            "facts": dict(facts),
        }


def block_tokens(selected: Selected) -> int | None:
    """Return the tokens of a block, None if unknown."""
    facts = selected.stored.facts
    found = facts.get("block_tokens", facts.get("block_size"))
    return found if isinstance(found, int) else None


def opened(request: StoreRequest, *, changes: bool = False) -> Inventory:
    """Connect to the store. `changes`: the command changes it. UsageError for a wrong option, EnvironmentProblem for a
    store that cannot be used."""
    url = checked_url(request.url)
    if url.startswith("mooncake:"):
        raise UsageError(
            f"`--url {request.url}`: the objects of Mooncake Store cannot be listed; it removes old ones itself"
        )
    if (directory := directory_of(url)) is not None:
        require_answering(directory, changes=changes)
    if directory is not None and not directory.is_dir():
        raise UsageError(f"`--url {request.url}`: there is no such directory")
    from kvbm_cli.store.inventory import open_inventory

    return open_inventory(url)


def checked_url(url: str) -> str:
    """Return the URL with the user's home in place of `~`. UsageError if it is none of a store."""
    try:
        scheme, _, rest = shared_url(url).partition("://")
    except ValueError as error:
        raise UsageError(f"`--url` {error}") from None
    return f"{scheme}://{os.path.expanduser(rest)}" if scheme == "file" else url


def select(inventory: Inventory, request: StoreRequest) -> list[Selected]:
    """Return the selection, the namespace with the most recent object first, those of one time by their names."""
    prefix, before_s = _namespace(request.namespace), _before(request.older_than)
    with ProgressDisplay("listing", delay_s=PROGRESS_AFTER_S) as progress:
        stored = inventory.namespaces(
            lambda namespace: namespace.hex().startswith(prefix), lambda count: progress.report(f"{count:,} objects")
        )
        found = [Selected(one, one.extents) for one in stored if request.model in (None, one.facts.get("model"))]
        if before_s is not None:
            found = [
                replace(one, extents=[extent for extent in one.extents if extent.written_s < before_s]) for one in found
            ]
        if request.tenant is not None:
            progress.restart("reading headers")
            found = [replace(one, extents=_of_tenant(inventory, one, request.tenant, progress)) for one in found]
    if request.tenant is not None or before_s is not None:
        found = [one for one in found if one.extents]
    return sorted(found, key=lambda one: (-max((part.written_s for part in one.extents), default=0.0), one.name))


def _namespace(text: str | None) -> str:
    if text is None:
        return ""
    if not re.fullmatch(f"[0-9a-f]{{1,{NAMESPACE_HEX}}}", text):
        raise UsageError(
            f"`--namespace {text}` is not the beginning of a namespace: 1 to {NAMESPACE_HEX} of the digits 0-9 and a-f",
            hint="`kvbm cache ls --url URL` lists the namespaces",
        )
    return text


def _before(age: str | None) -> float | None:
    """Return the time in seconds since 1970 of an age."""
    if age is None:
        return None
    found = AGE.fullmatch(age.strip())
    if found is None:
        raise UsageError(
            f"`--older-than {age}` is not a number with the unit s, min, h or d",
            hint="for example `30min`, `12h` or `7d`",
        )
    return time.time() - int(found[1]) * SECONDS[found[2]]


def _of_tenant(inventory: Inventory, selected: Selected, salt: str, progress: ProgressDisplay) -> list[StoredExtent]:
    """Return the extents of the requests with this cache salt. A damaged header has no tenant."""
    from kvbm.errors import EnvironmentProblem
    from kvbm.tiers.shared.extent_format import BadObject, tenant_tag
    from kvbm_cli.store.inspection import HEAD_BYTES, found_extent
    from kvbm_cli.store.inventory import PARALLEL_HEADS

    wanted = tenant_tag(tenant(salt))

    def is_of_tenant(extent: StoredExtent) -> bool:
        head = inventory.read(extent, HEAD_BYTES)
        try:
            return head is not None and (
                found_extent(head, namespace=extent.namespace, byte_count=extent.byte_count).tenant == wanted
            )
        except BadObject:
            return False

    found = []
    try:
        answers = inventory.each(is_of_tenant, selected.extents, threads=PARALLEL_HEADS)
        for done, (extent, is_wanted) in enumerate(zip(selected.extents, answers, strict=True), 1):
            progress.report(f"{done} of {len(selected.extents)} objects")
            if is_wanted:
                found.append(extent)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read the headers of objects in {inventory.url}: {error}") from None
    return found
