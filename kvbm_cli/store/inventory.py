"""Inventory: the objects in a store, for people who list, verify and delete them. It needs no engine.

Objects belong to kvbm if they have the key of an extent or of the description of a namespace; no others are deleted.
Reads run on threads, and none is repeated. The module of a store is imported when it is opened, because only then must
its library be installed; Mooncake Store cannot list its objects.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kvbm.errors import EnvironmentProblem
from kvbm.text.reading import parse_json
from kvbm.tiers.shared.keys import VERSION, KeySpace
from kvbm.tiers.shared.settings import directory_of
from kvbm_cli.store.access import FoundObject, LeftOut, StoreAccess

NAMESPACE_HEX = 32
LIMIT_S = 30.0  # of one request
PARALLEL_READS = 4  # whole objects, which may have hundreds of megabytes
PARALLEL_HEADS = 16
DELETED_AT_ONCE = 1000
MOST_LEFT_OUT = 1000
MAX_FACTS_BYTES = 1 << 20

Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class StoredExtent:
    """An object with the key of an extent. `name` is the sequence hash of its last block; `written_s` is in seconds
    since 1970, by the clock of the store."""

    namespace: bytes
    name: bytes
    byte_count: int
    written_s: float

    @property
    def key(self) -> str:
        return KeySpace(self.namespace).key(self.name)


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """The objects of one namespace. `facts` describe it, empty if there is no valid description. `other_count` objects
    in its place are not of kvbm."""

    namespace: bytes
    facts: Mapping[str, object]
    extents: Sequence[StoredExtent]
    other_count: int


class Inventory:
    """See the module's text. `left_out` are names that were found and not touched, at most MOST_LEFT_OUT of them."""

    def __init__(self, access: StoreAccess, url: str) -> None:
        self._access = access
        self.url = url
        self.left_out: list[LeftOut] = []
        self.left_out_count = self.failure_count = 0

    def namespaces(self, is_wanted: Callable[[bytes], bool], progress: Callable[[int], None]) -> list[StoredNamespace]:
        """Return the namespaces that have objects. `progress` gets the number of objects found. Raises
        EnvironmentProblem if the store does not answer."""
        found, count = [], 0
        try:
            for name in self._access.directories(VERSION, self._leave_out):
                namespace = _namespace_of(name)
                if namespace is None or not is_wanted(namespace):
                    continue
                listed = self._listed(namespace, progress, count)
                if listed.extents or listed.facts:
                    found.append(listed)
                count += len(listed.extents)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot list {self.url}: {_reason(error)}", hint=f"run `kvbm doctor --url {shlex.quote(self.url)}`"
            ) from None
        return found

    def read(self, extent: StoredExtent, byte_count: int | None = None) -> bytes | None:
        """Return an object or its first bytes; None if it is gone. Raises OSError."""
        end = None if byte_count is None else min(byte_count, extent.byte_count)
        if end == 0:
            return b""
        try:
            return self._access.read(extent.key, end)
        except FileNotFoundError:
            return None

    def each(
        self, read: Callable[[StoredExtent], Returned], extents: Sequence[StoredExtent], *, threads: int
    ) -> Iterator[Returned]:
        """Call `read` for each extent on threads, and yield the results in order."""
        pool = ThreadPoolExecutor(threads, thread_name_prefix="kvbm-inventory")
        try:
            yield from pool.map(read, extents)
        finally:
            pool.shutdown(cancel_futures=True)

    def delete(self, extents: Sequence[StoredExtent], progress: Callable[[int], None]) -> list[StoredExtent]:
        """Delete objects; one that is missing is ignored. Return those that remain. Raises EnvironmentProblem."""
        remaining: set[str] = set()
        for start in range(0, len(extents), DELETED_AT_ONCE):
            remaining.update(self._delete([extent.key for extent in extents[start : start + DELETED_AT_ONCE]]))
            progress(min(len(extents), start + DELETED_AT_ONCE))
        return [extent for extent in extents if extent.key in remaining]

    def delete_facts(self, namespace: bytes) -> None:
        """Delete the description of a namespace. Raises EnvironmentProblem."""
        self._delete([KeySpace(namespace).facts])

    def _leave_out(self, one: LeftOut) -> None:
        self.left_out_count += 1
        self.failure_count += one.is_failure
        if len(self.left_out) < MOST_LEFT_OUT:
            self.left_out.append(one)

    def _listed(self, namespace: bytes, progress: Callable[[int], None], before: int) -> StoredNamespace:
        keys, extents, other_count = KeySpace(namespace), [], 0
        facts: Mapping[str, object] = {}
        for page in self._access.objects(keys.prefix, self._leave_out):
            for found in page:
                name = keys.name_of(found.key)
                if name is not None:
                    extents.append(StoredExtent(namespace, name, found.byte_count, found.written_s))
                elif found.key == keys.facts:
                    facts = self._facts(found)
                else:
                    other_count += 1
            progress(before + len(extents))
        return StoredNamespace(namespace, facts, extents, other_count)

    def _facts(self, found: FoundObject) -> Mapping[str, object]:
        if not 0 < found.byte_count <= MAX_FACTS_BYTES:
            return {}
        try:
            facts = parse_json(self._access.read(found.key, found.byte_count))
        except (FileNotFoundError, ValueError):
            return {}
        except OSError as error:
            self._leave_out(LeftOut(found.key, _reason(error), is_failure=True))
            return {}
        return facts if isinstance(facts, dict) else {}

    def _delete(self, keys: Sequence[str]) -> list[str]:
        try:
            return self._access.delete(keys, self._leave_out)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot delete objects in {self.url}: {_reason(error)}",
                hint=f"run `kvbm doctor --url {shlex.quote(self.url)}`",
            ) from None


def open_access(url: str, limit_s: float) -> StoreAccess:
    """Connect to a store, whose requests end within that time. Raises EnvironmentProblem."""
    if (directory := directory_of(url)) is not None:
        from kvbm.tiers.shared.stores.directory import require_directory
        from kvbm_cli.store.directory_access import DirectoryAccess

        require_directory(directory)
        return DirectoryAccess(directory)
    from kvbm.tiers.shared.stores.obstore import connection
    from kvbm_cli.store.obstore_access import ObstoreAccess

    return ObstoreAccess(connection(url)(limit_s))


def open_inventory(url: str) -> Inventory:
    """May raise EnvironmentProblem."""
    return Inventory(open_access(url, LIMIT_S), url)


def _namespace_of(name: str) -> bytes | None:
    """Return the namespace that a directory is named after; None if it is another directory."""
    if len(name) != NAMESPACE_HEX:
        return None
    try:
        namespace = bytes.fromhex(name)
    except ValueError:
        return None
    return namespace if namespace.hex() == name else None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
