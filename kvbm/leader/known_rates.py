"""KnownRates: what an engine has learnt of its speed and its disk's, in a small file beside the caches it is true of.

The next engine of the same namespace judges its first request by it. It is written by a thread of its own, so that a
disk that hangs holds up nobody, and in place: a file that was cut short, or cannot be read, says nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kvbm.disk.files import open_private
from kvbm.errors import EnvironmentProblem
from kvbm.leader.rates import Known

KEEP_INTERVAL_S = 10.0
CHANGE = 1.2  # smaller ones are not worth a write
MAX_BYTES = 4096

log = logging.getLogger(__name__)


class KnownRates:
    """See the module's text. One thread owns it. `clock` gives seconds."""

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._kept: Known | None = None
        self._due_s = clock()
        self._thread: threading.Thread | None = None

    def read(self) -> Known | None:
        try:
            with os.fdopen(open_private(self._path, os.O_RDONLY), "rb") as file:
                return _known(json.loads(file.read(MAX_BYTES)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EnvironmentProblem) as error:
            log.info("kvbm: %s is not read: %s", self._path, error)
            return None

    def keep(self, known: Known | None) -> None:
        """Called at every step; begins a write where there is news, now and then."""
        if known is None or self._clock() < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._due_s = self._clock() + KEEP_INTERVAL_S
        if self._kept is None or _differ(known, self._kept):
            self._kept = known
            self._thread = threading.Thread(target=self._write, args=(known,), name="kvbm-rates", daemon=True)
            self._thread.start()

    def _write(self, known: Known) -> None:
        try:
            with os.fdopen(open_private(self._path, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.write(json.dumps(asdict(known)).encode())
                file.truncate()
        except (OSError, EnvironmentProblem) as error:
            log.info("kvbm: %s is not written: %s", self._path, error)


def _known(content: object) -> Known | None:
    """ValueError where it is something else."""
    if not isinstance(content, dict):
        raise ValueError(f"{content!r} are no rates")
    tokens_per_s, blocks_per_s = content.get("tokens_per_s"), content.get("blocks_per_s")
    for rate in (tokens_per_s, 0.0 if blocks_per_s is None else blocks_per_s):
        if not isinstance(rate, float) or not math.isfinite(rate) or rate < 0:
            raise ValueError(f"{rate!r} is no rate")
    return Known(tokens_per_s, blocks_per_s) if tokens_per_s else None


def _differ(one: Known, other: Known) -> bool:
    return any(
        max(first, second) > CHANGE * min(first, second)
        for first, second in (
            (one.tokens_per_s, other.tokens_per_s),
            (one.blocks_per_s or 0.0, other.blocks_per_s or 0.0),
        )
    )
