"""ObstoreAccess: a store of obstore, for people's commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvbm.shared.obstore_engine import is_unsupported
from kvbm.shared.store_access import FoundObject, NoteLeftOut

DELETED_AT_ONCE = 1000


class ObstoreAccess:
    """See the module's text. What a store cannot hold is never left out."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def directories(self, prefix: str, note: NoteLeftOut) -> list[str]:
        import obstore

        with _translated():
            found = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        return [place.rstrip("/").rpartition("/")[2] for place in found]

    def objects(self, prefix: str, note: NoteLeftOut) -> Iterator[list[FoundObject]]:
        import obstore

        with _translated():
            for page in obstore.list(self._store, prefix):
                yield [_found(entry) for entry in page]

    def about(self, key: str) -> FoundObject:
        import obstore

        with _translated():
            return _found(obstore.head(self._store, key))

    def read(self, key: str, byte_count: int | None = None) -> bytes:
        import obstore

        with _translated():
            if byte_count is None:
                return bytes(obstore.get(self._store, key).bytes())
            return bytes(obstore.get_range(self._store, key, start=0, end=byte_count))

    def write(self, key: str, content: bytes, *, creates: bool = False) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        with _translated():
            if not creates:
                obstore.put(self._store, key, content, use_multipart=False)
                return True
            try:
                obstore.put(self._store, key, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            except BaseError as error:
                if not is_unsupported(error):
                    raise
                obstore.put(self._store, key, content, use_multipart=False)
            return True

    def delete(self, keys: Sequence[str], note: NoteLeftOut) -> list[str]:
        import obstore

        for start in range(0, len(keys), DELETED_AT_ONCE):
            some = list(keys[start : start + DELETED_AT_ONCE])
            with _translated():
                try:
                    obstore.delete(self._store, some)
                except FileNotFoundError:  # which of them is unknown
                    for key in some:
                        self._delete_one(key)
        return []

    def _delete_one(self, key: str) -> None:
        from contextlib import suppress

        import obstore

        with suppress(FileNotFoundError):
            obstore.delete(self._store, key)


def first_line(error: BaseException) -> str:
    """Return the first line of a message. obstore appends a dump of its own values, which may hold credentials."""
    return str(error).partition("\n")[0] or type(error).__name__


def _found(entry: Any) -> FoundObject:
    return FoundObject(str(entry["path"]), int(entry["size"]), entry["last_modified"].timestamp())


@contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of obstore as OSError, except FileNotFoundError, which is one."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        raise OSError(first_line(error)) from None
