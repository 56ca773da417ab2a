"""ObstoreEngine: objects in S3, GCS, Azure, a directory or memory, through the library obstore.

Its calls are synchronous and release the GIL, so that threads suffice. Its own retries are off: a request that fails is
a miss, which costs less than waiting. The time limit of a request covers all of it, and follows from the size of an
object and the rates that were measured.

obstore reports a missing bucket like a missing object, and a shorter object like a whole one. So the bucket is checked
at the start, and lengths are compared here.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem
from kvbm.shared.keys import MIN_RUN_BYTES
from kvbm.shared.object_engine import Incoming, Outgoing, StoreAnswer
from kvbm.shared.orders import Outcome
from kvbm.shared.protection import Buffer
from kvbm.shared.settings import directory_of

CONNECT_S = 1.0
FIRST_LIMIT_S = 5.0  # before any rate is known
LEAST_LIMIT_S, MOST_LIMIT_S = 1.0, 20.0
PATIENCE = 4  # a request may take so many times its expected duration
KEPT = 0.9  # weight of the earlier measurements, per request
CHANGE = 1.5  # a limit that changed by a smaller factor needs no new client
PROBES_AT_A_TIME = 16
LIST_PAGE = 1000
CHUNK_BYTES = 1 << 20  # of what is received at a time
DIRECTORY_MODE = 0o700
REMAINS = re.compile("[0-9a-f]+#[0-9]+")  # obstore's name of an object that is being written
REMAINS_S = 3600.0
OF_ONE_FILE = (errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO, errno.EPERM)
WITHOUT_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system; "create" needs hard links
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


class ObstoreEngine:
    """See the module's text. `kind` is the scheme of the URL."""

    batch_objects = 1
    can_list = True
    min_run_bytes = MIN_RUN_BYTES

    def __init__(self, connect: Callable[[float], Any], *, kind: str, threads: int, directory: Path | None) -> None:
        """`connect(limit_s)` returns a store of obstore whose requests end within that time. A store in a `directory`
        is read without obstore, straight into the buffers, which takes half of the processor time."""
        self.name = f"obstore {kind}"
        self.threads = threads
        self.creates_once = False
        self._directory = directory
        self._writes = False
        self._connect = connect
        self._lock = threading.Lock()  # of what follows
        self._limit_s = FIRST_LIMIT_S
        self._store = connect(FIRST_LIMIT_S)
        self._longest_s = 0.0
        self._probing = ThreadPoolExecutor(PROBES_AT_A_TIME, thread_name_prefix="kvbm-shared-probe")

    @classmethod
    def open(cls, url: str, *, threads: int, facts_key: str, facts: bytes, writes: bool) -> ObstoreEngine:
        """Connect to a store and check it. Raises EnvironmentProblem if it does not exist or is not accessible."""
        kind = urlsplit(url).scheme
        engine = cls(connection(url), kind=kind, threads=threads, directory=directory_of(url))
        try:
            engine._require_access(url, facts_key, facts, writes=writes)
            engine._writes = writes
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def limit_s(self) -> float:
        return self._limit_s

    def use_memory(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Nothing to do: the library has buffers of its own."""

    def get(self, objects: Sequence[Incoming]) -> list[StoreAnswer]:
        return [self._get(one) for one in objects]

    def put(self, objects: Sequence[Outgoing]) -> list[StoreAnswer]:
        return [self._put(one) for one in objects]

    def are_present(self, keys: Sequence[str]) -> list[bool | None]:
        if len(keys) == 1:
            return [self._is_present(keys[0])]
        return list(self._probing.map(self._is_present, keys))

    def keys(self, prefix: str) -> Iterator[list[str]]:
        import obstore
        from obstore.exceptions import BaseError

        if self._directory is not None:
            yield from list_files(self._directory, prefix, deletes=self._writes)
            return
        try:
            for page in obstore.list(self._store, prefix, chunk_size=LIST_PAGE):
                yield [str(entry["path"]) for entry in page]
        except (BaseError, OSError) as error:
            raise OSError(_reason(error)) from error

    def check(self) -> str | None:
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.head(self._store, "kvbm-check")
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            return _reason(error)
        return None

    def close(self) -> None:
        self._probing.shutdown(wait=False, cancel_futures=True)

    def _get(self, one: Incoming) -> StoreAnswer:
        began_s, limit_s = time.monotonic(), self._limit_s
        try:
            answer = self._request(one) if self._directory is None else read_file(self._directory / one.key, one)
        except FileNotFoundError:
            return StoreAnswer(Outcome.ABSENT)
        except OSError as error:
            if self._directory is not None and error.errno in OF_ONE_FILE:  # says nothing about the others
                return StoreAnswer(Outcome.BAD, str(error))
            self._note_failure(time.monotonic() - began_s, limit_s)
            return StoreAnswer(Outcome.FAILED, _reason(error))
        if answer.outcome is Outcome.GOOD:
            self._note(time.monotonic() - began_s)
        return answer

    def _request(self, one: Incoming) -> StoreAnswer:
        """Receive an object. Raises FileNotFoundError and OSError."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            found = obstore.get(self._store, one.key)
            if (wrong := _wrong_length(int(found.meta["size"]), one)) is not None:
                return wrong
            received = scatter(found.stream(min_chunk_size=CHUNK_BYTES), one.buffers)
        except BaseError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise OSError(_reason(error)) from error
        if (wrong := _wrong_length(received, one)) is not None:
            return wrong
        age_s = (datetime.now(UTC) - found.meta["last_modified"]).total_seconds()
        return StoreAnswer(Outcome.GOOD, age_s=max(0.0, age_s))

    def _put(self, one: Outgoing) -> StoreAnswer:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        mode: Literal["create", "overwrite"] = "create" if self.creates_once and not one.replaces else "overwrite"
        began_s, limit_s = time.monotonic(), self._limit_s
        try:
            obstore.put(self._store, one.key, iter(one.buffers), mode=mode, use_multipart=False)
        except AlreadyExistsError:
            return StoreAnswer(Outcome.EXISTS)
        except (BaseError, OSError) as error:
            self._note_failure(time.monotonic() - began_s, limit_s)
            return StoreAnswer(Outcome.FAILED, _reason(error))
        self._note(time.monotonic() - began_s)
        return StoreAnswer(Outcome.GOOD)

    def _is_present(self, key: str) -> bool | None:
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        except (BaseError, OSError):
            return None
        return True

    def _note(self, seconds: float) -> None:
        """Note the duration of a request, and adapt the time limit of the next ones."""
        with self._lock:
            self._longest_s = max(seconds, KEPT * self._longest_s + (1 - KEPT) * seconds)
            limit_s = min(MOST_LIMIT_S, max(LEAST_LIMIT_S, PATIENCE * self._longest_s))
            if max(limit_s, self._limit_s) < CHANGE * min(limit_s, self._limit_s):
                return
            self._limit_s = limit_s
        self._store = self._connect(limit_s)

    def _note_failure(self, seconds: float, limit_s: float) -> None:
        """Double the time limit if a request failed because of it: the store may have become slower for good."""
        if seconds >= limit_s and self._limit_s == limit_s:
            self._note(2 * limit_s / PATIENCE)

    def _require_access(self, url: str, facts_key: str, facts: bytes, *, writes: bool) -> None:
        """Read or write the description of the namespace, and find out whether a second creation fails."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            for _ in obstore.list(self._store, chunk_size=1):  # a missing bucket is an error here
                break
            if not writes:
                return
            for _ in range(2):
                try:
                    obstore.put(self._store, facts_key, facts, mode="create", use_multipart=False)
                except AlreadyExistsError:
                    self.creates_once = True
                except BaseError as error:
                    if not _is_unsupported(error):
                        raise
                    obstore.put(self._store, facts_key, facts, use_multipart=False)
        except (BaseError, OSError) as error:
            raise EnvironmentProblem(
                f"cannot use `tiers.shared.url` {url}: {_reason(error)}", hint=f"kvbm doctor --url {url}"
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
            "`tiers.shared` requires the package `obstore`", hint="pip install 'kvbm-cli[shared]'"
        ) from error
    parts = urlsplit(url)
    if parts.password is not None:
        raise EnvironmentProblem(
            "`tiers.shared.url` must not contain credentials, which other users could see",
            hint="set the variables of the store, for example `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`",
        )
    options: dict[str, Any] = {}
    if (directory := directory_of(url)) is not None:
        _require_directory(directory)
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
        raise EnvironmentProblem(f"cannot use `tiers.shared.url` {url}: {_reason(error)}") from None
    return connect


def _require_directory(directory: Path) -> None:
    """Create the directory, in an existing one: a missing mount point must not become a directory."""
    try:
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot use the directory {directory} of `tiers.shared.url`: {error.strerror}",
            hint=f"mkdir -p {directory}",
        ) from error


def _wrong_length(size: int, one: Incoming) -> StoreAnswer | None:
    return None if size == one.length else StoreAnswer(Outcome.BAD, f"{size} bytes, not {one.length}")


def read_file(path: Path, one: Incoming) -> StoreAnswer:
    """Read a file straight into the buffers. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(descriptor)
        if (wrong := _wrong_length(about.st_size, one)) is not None:
            return wrong
        at = 0
        for buffer in one.buffers:
            if isinstance(buffer, int):
                at += buffer
                continue
            left = buffer
            while left:
                size = os.preadv(descriptor, [left], at)
                if size == 0:
                    return StoreAnswer(Outcome.BAD, f"{at} bytes, not {one.length}")
                left, at = left[size:], at + size
        return StoreAnswer(Outcome.GOOD, age_s=max(0.0, time.time() - about.st_mtime))
    finally:
        os.close(descriptor)


def list_files(root: Path, prefix: str, *, deletes: bool) -> Iterator[list[str]]:
    """Yield the names of files in the directories of a namespace. Links, and directories that cannot be read, are left
    out. `deletes`: delete what killed engines have left of a write. Raises OSError."""
    try:
        with os.scandir(root / prefix) as entries:
            directories = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for directory in directories:
        with suppress(OSError), os.scandir(root / prefix / directory) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            yield [f"{prefix}/{directory}/{entry.name}" for entry in files if not REMAINS.fullmatch(entry.name)]
            for entry in files if deletes else []:
                if REMAINS.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > REMAINS_S:
                    os.unlink(entry.path)


def scatter(chunks: Iterable[Buffer], buffers: Sequence[memoryview | int]) -> int:
    """Copy what arrives into the buffers. Return its length, which the caller compares."""
    received = 0
    left = deque(buffers)
    for chunk in chunks:
        content = memoryview(chunk)
        received += len(content)
        while content and left:
            first = left.popleft()
            size = min(len(content), first if isinstance(first, int) else len(first))
            if isinstance(first, int):
                rest: memoryview | int = first - size
            else:
                # numpy lets other threads run meanwhile
                np.copyto(np.frombuffer(first[:size], np.uint8), np.frombuffer(content[:size], np.uint8))
                rest = first[size:]
            if rest:
                left.appendleft(rest)
            content = content[size:]
    return received


def _is_unsupported(error: BaseException) -> bool:
    from obstore.exceptions import NotSupportedError

    reason = _reason(error)
    has_no_links = any(f"(os error {number})" in reason for number in WITHOUT_LINKS)
    return isinstance(error, NotSupportedError) or "status code: 501" in reason or has_no_links


def _reason(error: BaseException) -> str:
    """Return the first line of a message. obstore appends a dump of its own values, which may hold credentials."""
    return str(error).partition("\n")[0] or type(error).__name__
