"""Inventory: the objects in a store, for people who list, verify and delete them. It needs no engine.

Objects belong to kvbm if they have the key of a run or of the description of a namespace; no other object is deleted.
Reads run on threads, and none is repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kvbm.errors import EnvironmentProblem
from kvbm.shared.keys import VERSION, KeySpace
from kvbm.shared.obstore_engine import connection

LIMIT_S = 30.0  # of one request
NAMESPACE_HEX = 32
PARALLEL_READS = 4  # whole objects, which may have hundreds of megabytes
PARALLEL_HEADS = 16
DELETED_AT_ONCE = 1000
MAX_FACTS_BYTES = 1 << 20

Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class StoredRun:
    """An object with the key of a run. `name` is the sequence hash of its last block; `written_s` is in seconds since
    1970, by the clock of the store."""

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
    runs: Sequence[StoredRun]
    other_count: int


class Inventory:
    """See the module's text."""

    def __init__(self, store: Any, url: str) -> None:
        self._store = store
        self.url = url

    @classmethod
    def open(cls, url: str) -> Inventory:
        """Raises EnvironmentProblem."""
        return cls(connection(url)(LIMIT_S), url)

    def namespaces(self, is_wanted: Callable[[bytes], bool], progress: Callable[[int], None]) -> list[StoredNamespace]:
        """Return the namespaces that have objects. `progress` gets the number of objects found. Raises
        EnvironmentProblem if the store does not answer."""
        import obstore
        from obstore.exceptions import BaseError

        found, count = [], 0
        try:
            for prefix in obstore.list_with_delimiter(self._store, VERSION)["common_prefixes"]:
                namespace = _namespace_of(prefix)
                if namespace is None or not is_wanted(namespace):
                    continue
                listed = self._listed(namespace, progress, count)
                if listed.runs or listed.facts:
                    found.append(listed)
                count += len(listed.runs)
        except (BaseError, OSError) as error:
            raise EnvironmentProblem(
                f"cannot list {self.url}: {_first_line(error)}", hint=f"run `kvbm doctor --url {self.url}`"
            ) from None
        return found

    def head(self, run: StoredRun, byte_count: int) -> bytes | None:
        """Return the first bytes of an object; None if it is gone. Raises OSError."""
        import obstore

        end = min(byte_count, run.byte_count)
        return self._read(lambda: obstore.get_range(self._store, run.key, start=0, end=end)) if end else b""

    def content(self, run: StoredRun) -> bytes | None:
        """Return an object; None if it is gone. Raises OSError."""
        import obstore

        return self._read(lambda: obstore.get(self._store, run.key).bytes())

    def each(
        self, read: Callable[[StoredRun], Returned], runs: Sequence[StoredRun], *, threads: int
    ) -> Iterator[Returned]:
        """Call `read` for each run on threads, and yield the results in order."""
        pool = ThreadPoolExecutor(threads, thread_name_prefix="kvbm-inventory")
        try:
            yield from pool.map(read, runs)
        finally:
            pool.shutdown(cancel_futures=True)

    def delete(self, runs: Sequence[StoredRun], progress: Callable[[int], None]) -> None:
        """Delete objects; one that is gone is no error. Raises EnvironmentProblem."""
        for start in range(0, len(runs), DELETED_AT_ONCE):
            self._delete([run.key for run in runs[start : start + DELETED_AT_ONCE]])
            progress(min(len(runs), start + DELETED_AT_ONCE))

    def delete_facts(self, namespace: bytes) -> None:
        """Delete the description of a namespace. Raises EnvironmentProblem."""
        self._delete([KeySpace(namespace).facts])

    def _listed(self, namespace: bytes, progress: Callable[[int], None], before: int) -> StoredNamespace:
        import obstore

        keys, runs, other_count = KeySpace(namespace), [], 0
        facts: Mapping[str, object] = {}
        for page in obstore.list(self._store, keys.prefix):
            for entry in page:
                key = str(entry["path"])
                name = keys.name_of(key)
                if name is not None:
                    runs.append(StoredRun(namespace, name, int(entry["size"]), entry["last_modified"].timestamp()))
                elif key == keys.facts:
                    facts = self._facts(key, int(entry["size"]))
                else:
                    other_count += 1
            progress(before + len(runs))
        return StoredNamespace(namespace, facts, runs, other_count)

    def _facts(self, key: str, byte_count: int) -> Mapping[str, object]:
        import obstore

        if byte_count > MAX_FACTS_BYTES:
            return {}
        try:
            found = json.loads(bytes(obstore.get(self._store, key).bytes()))
        except (FileNotFoundError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _read(self, read: Callable[[], Any]) -> bytes | None:
        from obstore.exceptions import BaseError

        try:
            return bytes(read())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise OSError(_first_line(error)) from error

    def _delete(self, keys: Sequence[str]) -> None:
        import obstore
        from obstore.exceptions import BaseError

        try:
            try:
                obstore.delete(self._store, list(keys))
            except FileNotFoundError:  # which of them is unknown
                for key in keys:
                    self._delete_one(key)
        except (BaseError, OSError) as error:
            raise EnvironmentProblem(
                f"cannot delete objects in {self.url}: {_first_line(error)}",
                hint=f"run `kvbm doctor --url {self.url}`",
            ) from None

    def _delete_one(self, key: str) -> None:
        from contextlib import suppress

        import obstore

        with suppress(FileNotFoundError):
            obstore.delete(self._store, key)


def _namespace_of(prefix: str) -> bytes | None:
    """Return the namespace of a place in the store; None if it is another place."""
    text = prefix.rstrip("/").rpartition("/")[2]
    if len(text) != NAMESPACE_HEX:
        return None
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        return None
    return namespace if namespace.hex() == text else None


def _first_line(error: BaseException) -> str:
    """Return the first line of a message. obstore appends a dump of its own values, which may hold credentials."""
    return str(error).partition("\n")[0] or type(error).__name__
