"""Store probe: tests what a store allows and how fast it is, with objects below `kvbm-doctor/` that it removes again.

It works in the order of growing permissions: list, put, get, delete; it stops at the first that fails. A store may
hang, so callers run this module as a program (`python -m kvbm_cli.doctor.store_probe`) with a timeout. Each line on
stdout is JSON: `{"phase": ...}` while it runs, then `{"report": ...}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kvbm.errors import EnvironmentProblem
from kvbm.shared.settings import directory_of
from kvbm_cli.doctor.store_report import (
    IN_FLIGHT,
    OBJECT_BYTES,
    PREFIX,
    SMALL_GETS,
    PhaseCallback,
    StepFailed,
    StoreReport,
)

MAX_OBJECTS = 128  # in the store at a time
LIMIT_S = 10.0  # of one request
LEFT_AFTER = timedelta(hours=1)  # no doctor runs so long


def probe(url: str, *, seconds: float, writes: bool, on_phase: PhaseCallback = lambda text: None) -> StoreReport:
    """Probes the store of a URL; each rate is measured for `seconds`. Without `writes`, it only lists and reads."""
    if url.startswith("mooncake:"):
        from kvbm_cli.doctor import mooncake_probe

        return mooncake_probe.probe(url, seconds=seconds, writes=writes, on_phase=on_phase)
    from kvbm.shared.obstore_engine import connection

    directory = directory_of(url)
    is_new = directory is not None and not directory.exists()
    try:
        store = connection(url)(LIMIT_S)
    except EnvironmentProblem as error:
        return StoreReport("connect", error.message)
    try:
        return _StoreProbe(store, on_phase).report(seconds, writes=writes)
    finally:
        if directory is not None:
            _remove_directories(directory, is_new=is_new)


class _StoreProbe:
    def __init__(self, store: Any, on_phase: PhaseCallback) -> None:
        self._store = store
        self._on_phase = on_phase
        self._place = f"{PREFIX}/{secrets.token_hex(8)}"
        self._large = os.urandom(OBJECT_BYTES)
        self._written: list[str] = []
        self._found = StoreReport()

    def report(self, seconds: float, *, writes: bool) -> StoreReport:
        try:
            with self._step("list"):
                self._remove_left()
            if writes:
                self._write_and_read(seconds)
            else:
                self._found = replace(self._found, small_get_s=self._time_absent())
        except StepFailed as failed:
            step, reason = failed.args
            self._found = replace(self._found, failed=step, reason=reason)
        finally:
            self._remove()
        return self._found

    def _write_and_read(self, seconds: float) -> None:
        import obstore

        key, content = f"{self._place}/small", secrets.token_bytes(64)
        with self._step("put"):
            began = datetime.now(UTC)
            self._put(key, content)
            self._found = replace(self._found, clock_s=self._clock_s(key, began))
        with self._step("get"):
            if bytes(obstore.get(self._store, key).bytes()) != content:
                raise OSError("an object has other bytes than were written")
            self._on_phase("small reads")
            small_s = [self._time_get(key) for _ in range(SMALL_GETS)]
        with self._step("conditional put"):
            self._found = replace(self._found, creates_once=self._creates_once(key, content))
        self._found = replace(self._found, small_get_s=statistics.median(small_s))
        with self._step("put"):
            self._on_phase("writes")
            put_rate = self._rate(self._put_large, seconds)
        large = [one for one in self._written if one != key]
        with self._step("get"):
            self._on_phase("reads")
            object_s = statistics.median(self._time_get(one) for one in large[:SMALL_GETS])
            get_rate = self._rate(lambda number: self._time_get(large[number % len(large)]), seconds)
        self._found = replace(self._found, put_rate=put_rate, get_rate=get_rate, object_get_s=object_s)
        with self._step("delete"):
            self._delete()

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        self._on_phase(name)
        try:
            yield
        except (BaseError, OSError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__  # the rest may hold credentials
            raise StepFailed(name, reason) from None

    def _put(self, key: str, content: bytes, **how: Any) -> None:
        import obstore

        self._written.append(key)
        obstore.put(self._store, key, content, use_multipart=False, **how)

    def _creates_once(self, key: str, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError

        try:
            obstore.put(self._store, key, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return True
        except BaseError as error:
            if not (isinstance(error, NotSupportedError) or "501" in str(error)):
                raise
        return False

    def _clock_s(self, key: str, began: datetime) -> float | None:
        """Returns how far the store is ahead. A store that counts whole seconds may be behind by up to one."""
        import obstore

        written = obstore.head(self._store, key)["last_modified"]
        ended = datetime.now(UTC)
        if written > ended:
            return (written - ended).total_seconds()
        earliest = began - timedelta(seconds=1)
        return (written - earliest).total_seconds() if written < earliest else 0.0

    def _time_get(self, key: str) -> float:
        import obstore

        began_s = time.monotonic()
        obstore.get(self._store, key).bytes()
        return time.monotonic() - began_s

    def _time_absent(self) -> float:
        """Returns the median duration of looking for an object that is not there."""
        import obstore

        taken = []
        with self._step("get"):
            for _ in range(SMALL_GETS):
                began_s = time.monotonic()
                with contextlib.suppress(FileNotFoundError):
                    obstore.head(self._store, f"{self._place}/absent")
                taken.append(time.monotonic() - began_s)
        return statistics.median(taken)

    def _put_large(self, number: int) -> None:
        self._put(f"{self._place}/{number % MAX_OBJECTS}", self._large)

    def _rate(self, move: Callable[[int], object], seconds: float) -> float:
        """Returns the bytes per second of moving objects from IN_FLIGHT threads until the time is over."""
        began_s = time.monotonic()

        def run(first: int) -> int:
            count = 0
            while not count or time.monotonic() - began_s < seconds:
                move(first + count * IN_FLIGHT)
                count += 1
            return count

        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            count = sum(threads.map(run, range(IN_FLIGHT)))
        return count * OBJECT_BYTES / (time.monotonic() - began_s)

    def _delete(self) -> None:
        import obstore

        keys = sorted(set(self._written))
        obstore.delete(self._store, keys)
        self._written.clear()

    def _remove(self) -> None:
        """Removes what is left after a failure, as far as that is possible."""
        import obstore
        from obstore.exceptions import BaseError

        for key in sorted(set(self._written)):
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                pass
            except (BaseError, OSError):
                self._found = replace(self._found, left_objects=self._found.left_objects + 1)

    def _remove_left(self) -> None:
        """Lists the objects of earlier doctors, and removes those of one that was killed."""
        import obstore

        before = datetime.now(UTC) - LEFT_AFTER
        for page in obstore.list(self._store, PREFIX):
            old = [str(entry["path"]) for entry in page if entry["last_modified"] < before]
            if old:
                with contextlib.suppress(OSError):
                    obstore.delete(self._store, old)


def _remove_directories(root: Path, *, is_new: bool) -> None:
    """Removes the empty directories of the probe, and the store itself if it did not exist before."""
    place = root / PREFIX
    with contextlib.suppress(OSError):
        for directory in place.iterdir():
            directory.rmdir()
        place.rmdir()
    if is_new:
        with contextlib.suppress(OSError):
            root.rmdir()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Test what a store allows, and how fast it is.")
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each speed measurement")
    parser.add_argument("--read-only", action="store_true")
    given = parser.parse_args(arguments)

    def print_phase(text: str) -> None:
        print(json.dumps({"phase": text}), flush=True)

    found = probe(given.url, seconds=given.seconds, writes=not given.read_only, on_phase=print_phase)
    print(json.dumps({"report": asdict(found)}), flush=True)


if __name__ == "__main__":
    main()
