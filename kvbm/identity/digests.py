"""Digests of the files of a model, without a wait of the engine: a process of its own reads them (digester.py).

known      unchanged files that an earlier start has read: from the cache of digests
small      up to INLINE_BYTES altogether: read at once, which takes milliseconds
the rest   read by the process; a thread waits for it
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from kvbm.child import deadlines
from kvbm.child.channel import ChannelClosed
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
    try:
        cached = ((file, cache.get(Path(file[0]), file[1])) for file in files)
        known = {file: digest for file, digest in cached if digest is not None}
        unread = [file for file in files if file not in known]
        is_small = sum(signature.size for _, signature in unread) <= INLINE_BYTES

        def run() -> None:
            try:
                began_ns = time.time_ns()
                read = digest_files(unread, 1) if is_small else _by_process(unread)
                for (path, signature), digest in zip(unread, read, strict=True):
                    cache.put(Path(path), signature, digest, began_ns)
                    known[path, signature] = digest
                cache.save()
                found.set_result([known[file] for file in files])
            except (OSError, Unidentified) as error:
                found.set_exception(Unidentified(str(error)))

        if is_small:
            run()
        else:
            threading.Thread(target=run, name="kvbm-digests", daemon=True).start()
    except OSError as error:
        found.set_exception(Unidentified(str(error)))
    except RuntimeError as error:
        found.set_exception(Unidentified(f"no thread can be started: {error}"))
    return found


def _by_process(files: Files) -> list[str]:
    """Let a process digest files, and wait for it. Raises Unidentified."""
    total_gb, began_s = sum(signature.size for _, signature in files) / 1e9, time.monotonic()
    try:
        child, channel = start_child(MODULE, "the process that reads the files of the model")
    except EnvironmentProblem as error:
        raise Unidentified(error.message) from error
    try:
        channel.send(DigestOrder(tuple(files), frozenset(allowed_cores())))
        answer = channel.receive_one(object)
    except ChannelClosed as error:
        raise Unidentified("the process that reads the files of the model has ended") from error
    finally:
        channel.close()
        end(child, deadlines.EXIT_S)
    if isinstance(answer, Problem):
        raise Unidentified(answer.message)
    assert isinstance(answer, Digests), answer
    log.info("kvbm: identified %.1f GB of model files in %.1f s", total_gb, time.monotonic() - began_s)
    return list(answer.digests)
