"""ObstoreStore: objects in S3, GCS, Azure or memory, through the library obstore.

Its calls are synchronous and release the GIL, so that threads suffice. Its own retries are off: a request that fails is
a miss, which costs less than waiting. The time limit of a request covers all of it, and follows from the size of an
object and the rates that were measured.

obstore reports a missing bucket like a missing object, and a shorter object like a whole one. So the bucket is checked
at the start, and lengths are compared here.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import UnsupportedOperation
from typing import Any, Literal
from urllib.parse import urlsplit

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared.object_store import Incoming, Outgoing, StoreAnswer, most_writing, scatter, wrong_length
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.settings import directory_of
from kvbm.tiers.shared.stores.directory import require_directory
from kvbm.tiers.shared.stores.request_limit import FIRST_LIMIT_S, TimedStore

CONNECT_S = 1.0
CHECKED_BYTES = 4096  # of an object, to find out whether the store answers
PROBES_AT_A_TIME = 16
LIST_PAGE = 1000
CHUNK_BYTES = 64 << 10  # parts smaller than this are joined; a part comes as it was received, without another copy
OBJECT_VARIABLES = {  # of NVIDIA's KVBM, for stores of kind s3
    "DYN_KVBM_OBJECT_ENDPOINT": "endpoint",
    "DYN_KVBM_OBJECT_REGION": "region",
    "DYN_KVBM_OBJECT_ACCESS_KEY": "access_key_id",
    "DYN_KVBM_OBJECT_SECRET_KEY": "secret_access_key",
}
ENDPOINT_VARIABLES = {  # read by obstore, which refuses http:// unless it is told otherwise
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}

log = logging.getLogger(__name__)


class ObstoreStore(TimedStore):
    """See the module's text. `kind` is the scheme of the URL."""

    def __init__(self, connect: Callable[[float], Any], *, kind: str, threads: int) -> None:
        """`connect(limit_s)` returns a store of obstore whose requests end within that time."""
        super().__init__()
        self.name = f"obstore {kind}"
        self.threads = threads
        self.write_threads = most_writing(threads)
        self.creates_once = False
        self._connect = connect
        self._use_limit()
        self._probing = ThreadPoolExecutor(PROBES_AT_A_TIME, thread_name_prefix="kvbm-shared-probe")

    @classmethod
    def open(cls, url: str, *, threads: int, facts_key: str, facts: bytes, writes: bool) -> ObstoreStore:
        """Connect to a store and check it. Raises EnvironmentProblem if it does not exist or is not accessible."""
        store = cls(connection(url), kind=urlsplit(url).scheme, threads=threads)
        try:
            store._require_access(url, facts_key, facts, writes=writes)
        except BaseException:
            store.close()
            raise
        return store

    def are_present(self, keys: Sequence[str]) -> list[bool | None]:
        if len(keys) == 1:
            return [self._is_present(keys[0])]
        return list(self._probing.map(self._is_present, keys))

    def keys(self, prefix: str) -> Iterator[list[str]]:
        import obstore

        with translated():
            for page in obstore.list(self._store, prefix, chunk_size=LIST_PAGE):
                yield [str(entry["path"]) for entry in page]

    def check(self, key: str | None) -> str | None:
        import obstore

        try:
            with translated():
                if key is None:
                    obstore.head(self._store, "kvbm-check")
                else:
                    obstore.get_range(self._store, key, start=0, length=CHECKED_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            return str(error)
        return None

    def close(self) -> None:
        self._probing.shutdown(wait=False, cancel_futures=True)

    def _get(self, one: Incoming) -> StoreAnswer:
        import obstore

        try:
            with translated():
                found = obstore.get(self._store, one.key)
                if (wrong := wrong_length(int(found.meta["size"]), one)) is not None:
                    return wrong
                received = scatter(found.stream(min_chunk_size=CHUNK_BYTES), one)
        except FileNotFoundError:
            return StoreAnswer(Outcome.ABSENT)
        if (wrong := wrong_length(received, one)) is not None:
            return wrong
        age_s = (datetime.now(UTC) - found.meta["last_modified"]).total_seconds()
        return StoreAnswer(Outcome.GOOD, age_s=max(0.0, age_s))

    def _put(self, one: Outgoing) -> StoreAnswer:
        import obstore

        mode: Literal["create", "overwrite"] = "create" if self.creates_once and not one.replaces else "overwrite"
        try:
            with translated():
                obstore.put(self._store, one.key, iter(one.buffers), mode=mode, use_multipart=False)
        except FileExistsError:
            return StoreAnswer(Outcome.EXISTS)
        return StoreAnswer(Outcome.GOOD)

    def _is_present(self, key: str) -> bool | None:
        import obstore

        try:
            with translated():
                obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        return True

    def _use_limit(self) -> None:
        self._store = self._connect(self._limit.seconds)

    def _require_access(self, url: str, facts_key: str, facts: bytes, *, writes: bool) -> None:
        """Read or write the description of the namespace, and find out whether a second creation fails."""
        import obstore

        try:
            with translated():
                for _ in obstore.list(self._store, chunk_size=1):  # a missing bucket is an error here
                    break
            if not writes:
                return
            self.creates_once = not all(create(self._store, facts_key, facts) for _ in range(2))
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot use `tiers.shared.url` {url}: {error}",
                hint=f"run `kvbm doctor --url {shlex.quote(url)}`",
            ) from None
        if not self.creates_once:
            log.info("kvbm: %s overwrites objects: engines that compute the same blocks may write them twice", url)


def connection(url: str) -> Callable[[float], Any]:
    """Return a function that connects to the store of a URL. Raises EnvironmentProblem for a wrong one."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise EnvironmentProblem(
            "`tiers.shared` requires the package `obstore`", hint="run `pip install 'kvbm-cli[shared]'`"
        ) from error
    parts = urlsplit(url)
    if parts.password is not None:
        raise EnvironmentProblem(
            "`tiers.shared.url` must not contain credentials, which other users could see",
            hint="set the variables of the store, for example `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`",
        )
    options: dict[str, Any] = {}
    if (directory := directory_of(url)) is not None:
        require_directory(directory)
    elif parts.scheme == "memory":
        store = from_url(url)
        return lambda limit_s: store
    elif parts.scheme == "s3":
        given = {key: os.environ.get(name, "").strip() for name, key in OBJECT_VARIABLES.items()}
        options = {key: value for key, value in given.items() if value}

    def connect(limit_s: float) -> Any:
        if parts.scheme == "file":
            return from_url(url)
        endpoints = [options.get("endpoint"), *map(os.environ.get, ENDPOINT_VARIABLES.get(parts.scheme, ()))]
        is_plain = str(next(filter(None, endpoints), "")).startswith("http://")
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=limit_s),
            "connect_timeout": timedelta(seconds=CONNECT_S),
        }
        if is_plain:
            client["allow_http"] = True
        limits: Any = {
            "client_options": client,
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=limit_s)},
        }
        return from_url(url, **limits, **options)

    try:
        connect(FIRST_LIMIT_S)
    except (BaseError, OSError, ValueError, TypeError) as error:
        raise EnvironmentProblem(f"cannot use `tiers.shared.url` {url}: {_first_line(error)}") from None
    return connect


def create(store: Any, key: str, content: bytes) -> bool:
    """Write an object unless there is one; return False then. A store without conditional writes overwrites it. Raises
    OSError."""
    import obstore

    try:
        with translated():
            obstore.put(store, key, content, mode="create", use_multipart=False)
    except FileExistsError:
        return False
    except UnsupportedOperation:
        with translated():
            obstore.put(store, key, content, use_multipart=False)
    return True


@contextmanager
def translated() -> Iterator[None]:
    """Raise errors of obstore as OSError with a message of one line: FileNotFoundError for an object that is not there,
    FileExistsError for one that is, UnsupportedOperation for a request that the store does not know."""
    from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, NotSupportedError

    try:
        yield
    except (BaseError, OSError) as error:
        reason = _first_line(error)
        if isinstance(error, FileNotFoundError | NotFoundError):
            raise FileNotFoundError(reason) from None
        if isinstance(error, AlreadyExistsError):
            raise FileExistsError(reason) from None
        if isinstance(error, NotSupportedError) or "status code: 501" in reason:
            raise UnsupportedOperation(reason) from None
        raise OSError(reason) from None


def _first_line(error: BaseException) -> str:
    """Return the first line of a message. obstore appends a dump of its own values, which may hold credentials."""
    return str(error).partition("\n")[0] or type(error).__name__
