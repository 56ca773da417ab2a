"""Digests of media, computed in threads: the content of an image can be 100 MB, and an engine step must not wait.

The thread of vLLM's scheduler submits data and reads results. The threads write `digest` and then `is_known` of a
Content, and nothing else. Data is kept until it has been digested.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from typing import Any

from kvbm.vllm_integration.media_content import UnreadableContent, digest_of, size_of, stamp_of

THREADS = 2
MAX_WAITING_BYTES = 1 << 30  # of data that waits; more of it gets no digest

log = logging.getLogger(__name__)


class Content:
    """The content of one medium. `digest` is None until it `is_known`, and afterwards if the content has none."""

    __slots__ = ("digest", "is_known")

    def __init__(self, *, is_known: bool = False) -> None:
        self.digest: bytes | None = None
        self.is_known = is_known


Key = tuple[int, str]
Stamp = tuple[tuple[int, int], ...]
Task = tuple[Any, str, int, Content]  # data, modality, bytes, where the digest goes


class MediaDigests:
    """Digests the data of media once per object. vLLM's processor cache gives equal media the same object."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._known: dict[Key, tuple[weakref.ref[Any], Stamp, Content]] = {}
        self._submitted_bytes = 0
        self._digested_bytes = [0] * THREADS  # each thread writes its own entry

    def of(self, data: Any, modality: str) -> Content:
        """Return the content of `data`, whose digest comes later. Without threads or data it has none."""
        if data is None or not self._has_threads():
            return Content(is_known=True)
        key, stamp = (id(data), modality), stamp_of(data)
        known = self._known.get(key)
        if known is not None and known[0]() is data and stamp is not None and known[1] == stamp:
            return known[2]
        size = size_of(data)
        if self._submitted_bytes - sum(self._digested_bytes) > MAX_WAITING_BYTES:
            return Content(is_known=True)
        content = Content()
        self._submitted_bytes += size
        self._tasks.put((data, modality, size, content))
        if stamp is not None:
            self._remember(key, data, stamp, content)
        return content

    def close(self) -> None:
        """Let the threads end after their present task."""
        for _ in self._threads:
            self._tasks.put(None)

    def _remember(self, key: Key, data: Any, stamp: Stamp, content: Content) -> None:
        known = self._known

        def forget(reference: weakref.ref[Any]) -> None:
            if (entry := known.get(key)) is not None and entry[0] is reference:
                del known[key]

        try:
            known[key] = weakref.ref(data, forget), stamp, content
        except TypeError:  # a type without weak references
            known.pop(key, None)

    def _has_threads(self) -> bool:
        """Start the threads with the first medium. Return whether at least one runs."""
        if not self._threads:
            for index in range(THREADS):
                thread = threading.Thread(target=self._run, args=(index,), name=f"kvbm-media-{index}", daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:
                    log.warning("kvbm: cannot start a thread that digests media: %s", error)
                    break
                self._threads.append(thread)
        return bool(self._threads)

    def _run(self, index: int) -> None:
        while (task := self._tasks.get()) is not None:
            data, modality, size, content = task
            try:
                content.digest = digest_of(data, modality)
            except UnreadableContent as error:
                log.debug("kvbm: no digest of a medium (%s): %s", modality, error)
            except Exception:  # data has any form that a model's processor gives it
                log.exception("kvbm: a medium (%s) cannot be digested", modality)
            content.is_known = True
            self._digested_bytes[index] += size
            del task, data
