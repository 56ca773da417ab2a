"""Digests of the files of a model, without a wait of the engine: a process of its own reads them (digester.py).

known      unchanged files that an earlier start has read: from the cache of digests
small      up to INLINE_BYTES altogether: read at once, which takes milliseconds
the rest   read by the process; a thread waits for it
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from kvbm.child import deadlines
from kvbm.child.channel import Channel, ChannelClosed
from kvbm.child.child import Problem
from kvbm.child.parent import end, start_child
from kvbm.errors import EnvironmentProblem
from kvbm.host.threads import allowed_cores
from kvbm.identity.content import DigestOrder, Digests, Signature, digest_files
from kvbm.identity.digest_cache import DigestCache, default_path

MODULE = "kvbm.identity.digester"
INLINE_BYTES = 64 << 20

Files = Sequence[tuple[str, Signature]]

log = logging.getLogger(__name__)


class Unidentified(Exception):
    """Why the weights or the options of an engine cannot be identified."""


def begin(files: Files, cache: DigestCache | None = None) -> Future[list[str]]:
    """Start to digest files; the future has their digests in order, or an Unidentified.

    `cache` has the digests of earlier starts, by default those in the user's state directory.
    """
    cache = DigestCache(default_path()) if cache is None else cache
    found: Future[list[str]] = Future()
    known: list[str | None] = []

    def run(digest: Callable[[Files], list[str]]) -> None:
        try:
            found.set_result(_complete(cache, files, known, unread, digest))
        except (OSError, Unidentified) as error:
            found.set_exception(Unidentified(str(error)))

    try:
        known += [cache.get(Path(path), signature) for path, signature in files]
        unread = [one for one, digest in zip(files, known, strict=True) if digest is None]
        if sum(signature.size for _, signature in unread) <= INLINE_BYTES:
            run(lambda some: digest_files(some, 1))
        else:
            threading.Thread(target=run, args=(_by_process,), name="kvbm-digests", daemon=True).start()
    except OSError as error:
        found.set_exception(Unidentified(str(error)))
    except RuntimeError as error:
        found.set_exception(Unidentified(f"no thread can be started: {error}"))
    return found


def _complete(
    cache: DigestCache,
    files: Files,
    known: Sequence[str | None],
    unread: Files,
    digest: Callable[[Files], list[str]],
) -> list[str]:
    """Return all digests in order, and keep those that were not known. Raises OSError or Unidentified."""
    if not unread:
        return [one for one in known if one is not None]
    began_ns = time.time_ns()
    read = dict(zip(unread, digest(unread), strict=True))
    for (path, signature), one in read.items():
        cache.put(Path(path), signature, one, began_ns)
    cache.save()
    return [read[file] if one is None else one for file, one in zip(files, known, strict=True)]


def _by_process(files: Files) -> list[str]:
    """Let a process digest files, and wait for it. Raises Unidentified."""
    total_gb, began_s = sum(signature.size for _, signature in files) / 1e9, time.monotonic()
    try:
        child, channel = start_child(MODULE, "the process that reads the files of the model")
    except EnvironmentProblem as error:
        raise Unidentified(error.message) from error
    try:
        channel.send(DigestOrder(tuple(files), frozenset(allowed_cores())))
        digests = _answer(channel)
    except ChannelClosed as error:
        raise Unidentified("the process that reads the files of the model has ended") from error
    finally:
        channel.close()
        end(child, deadlines.EXIT_S)
    log.info("kvbm: identified %.1f GB of model files in %.1f s", total_gb, time.monotonic() - began_s)
    return digests


def _answer(channel: Channel) -> list[str]:
    """May raise Unidentified or ChannelClosed."""
    answer = channel.receive_one(object)
    if isinstance(answer, Problem):
        raise Unidentified(answer.message)
    assert isinstance(answer, Digests), answer
    return list(answer.digests)
