"""ObstoreAccess: a store of obstore, for people's commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvbm.tiers.shared.stores.obstore import translated
from kvbm_cli.store.access import FoundObject, NoteLeftOut

DELETED_AT_ONCE = 1000


class ObstoreAccess:
    """See the module's text. What a store cannot hold is never left out."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def directories(self, prefix: str, note: NoteLeftOut) -> list[str]:
        import obstore

        with translated():
            found = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        return [place.rstrip("/").rpartition("/")[2] for place in found]

    def objects(self, prefix: str, note: NoteLeftOut) -> Iterator[list[FoundObject]]:
        import obstore

        with translated():
            for page in obstore.list(self._store, prefix):
                yield [_found(entry) for entry in page]

    def about(self, key: str) -> FoundObject:
        import obstore

        with translated():
            return _found(obstore.head(self._store, key))

    def read(self, key: str, byte_count: int | None = None) -> bytes:
        import obstore

        with translated():
            if byte_count is None:
                return bytes(obstore.get(self._store, key).bytes())
            return bytes(obstore.get_range(self._store, key, start=0, end=byte_count))

    def write(self, key: str, content: bytes) -> None:
        import obstore

        with translated():
            obstore.put(self._store, key, content, use_multipart=False)

    def delete(self, keys: Sequence[str], note: NoteLeftOut) -> list[str]:
        import obstore

        for start in range(0, len(keys), DELETED_AT_ONCE):
            some = list(keys[start : start + DELETED_AT_ONCE])
            try:
                with translated():
                    obstore.delete(self._store, some)
            except FileNotFoundError:  # which of them is unknown
                for key in some:
                    with suppress(FileNotFoundError), translated():
                        obstore.delete(self._store, key)
        return []


def _found(entry: Any) -> FoundObject:
    return FoundObject(str(entry["path"]), int(entry["size"]), entry["last_modified"].timestamp())
