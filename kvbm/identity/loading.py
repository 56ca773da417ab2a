"""Loading: what a model's files were before an engine loaded them, what they were after, and their content.

    begin     before the engine loads: a look at the files, a watch on them and on the directories on the way
    end       after: another look. If both are equal, the digest of the files begins; if not, or in doubt, none does

An engine that gives no chance to look before it loads uses `loaded`: nothing may have changed since its process
started. What is digested is the file that was loaded: device, inode, size and times are compared when it is read, too.
Directories stay open until then. So a file system that is mounted meanwhile has another device, also an image whose
files have equal metadata.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvbm.identity import digests
from kvbm.identity.content import signature_of
from kvbm.identity.digests import Unidentified
from kvbm.identity.look import CLOCK_SLACK_NS, Look, look, process_start_ns
from kvbm.identity.watch import ChangeWatch

SILENT = "is on a file system where a change leaves no trace (tmpfs): copy the model to a disk"
AGAIN = "a start after that keeps blocks"


@dataclass(frozen=True, slots=True)
class FileContent:
    """The content of loaded files, whose digests may not be known yet."""

    look: Look
    digests: Future[list[str]]

    @property
    def is_known(self) -> bool:
        return self.digests.done()

    def text(self) -> str:
        """Return the digest of the content. Waits for it. Raises Unidentified."""
        return self.look.content(dict(zip(sorted(self.look.files), self.digests.result(), strict=True)))


class Loading:
    """One load of the files in a directory. *Owns* a watch until `end`."""

    def __init__(self, directory: Path, *, every: bool = False) -> None:
        """May raise OSError."""
        self._look = partial(look, every=every)
        first = self._look(directory)
        self._watch = ChangeWatch.watch(first.way, (path for path, _ in first.paths()))
        self._before = self._look(directory)
        self._pins = _pinned(self._before)
        names = [{path: found[:2] for path, found in one.way.items()} for one in (first, self._before)]
        self._knows_moves = self._watch is not None and names[0] == names[1]

    def end(self) -> FileContent:
        """Look again, and begin to digest. Raises Unidentified or OSError."""
        try:
            try:
                after = self._look(Path(self._before.root))
            finally:
                noticed = None if self._watch is None else self._watch.end()
            _require_traces(after)
            changed = after.changed_since(self._before, noticed, knows_moves=self._knows_moves)
            if changed is not None:
                raise Unidentified(f"`{changed}` changed while {after.root} was loaded, or just before; {AGAIN}")
            return _content(after, self._pins)
        except BaseException:
            self._pins.close()
            raise


def begun(directory: Path, *, every: bool = False) -> Loading | Unidentified:
    """Begin to watch a load. Raises nothing: the engine loads whatever happens here."""
    try:
        return Loading(directory, every=every)
    except OSError as error:
        return Unidentified(str(error))


def ended(loading: Loading | Unidentified) -> FileContent | Unidentified:
    """End the watch of a load that `begun` returned. Raises nothing."""
    if isinstance(loading, Unidentified):
        return loading
    try:
        return loading.end()
    except (Unidentified, OSError) as error:
        return Unidentified(str(error))


def content_of(directory: Path, found: FileContent | Unidentified | None, *, every: bool = False) -> FileContent:
    """Return what an engine has loaded. `found` is what `ended` returned, None if nothing watched the load. Raises
    Unidentified or OSError."""
    if isinstance(found, Unidentified):
        raise found
    return loaded(directory, every=every) if found is None else found


def require_format(load_format: str, known: Collection[str]) -> None:
    """Raise Unidentified unless this format of an engine reads files of the model's directory that `look` finds."""
    if load_format not in known:
        raise Unidentified(f"load format `{load_format}` does not read files that kvbm knows")


def with_weights(found: FileContent) -> FileContent:
    """Return the content of a model. Raises Unidentified if it has no weights."""
    if not found.look.weights:
        raise Unidentified(f"{found.look.root} has no weight files of a known format")
    return found


def loaded(path: Path, *, every: bool = False, start_ns: int | None = None) -> FileContent:
    """Return the content of files that were loaded after the process started. Raises Unidentified or OSError.

    `every`: of all files, whatever their suffixes. `start_ns`: they may have been loaded from then on.
    """
    found = look(path, every=every)
    _require_traces(found)
    if (changed := found.changed_after(process_start_ns() if start_ns is None else start_ns)) is not None:
        raise Unidentified(f"`{changed or path}` changed after the engine was started, or just before; {AGAIN}")
    return _content(found, _pinned(found))


def require_unchanged(path: Path) -> None:
    """Raise Unidentified if a file changed after the process started, or just before."""
    try:
        changed_ns = signature_of(path).ctime_ns
    except OSError as error:
        raise Unidentified(str(error)) from error
    if changed_ns > process_start_ns() - CLOCK_SLACK_NS:
        raise Unidentified(f"`{path}` changed after the engine was started, or just before; {AGAIN}")


def _require_traces(found: Look) -> None:
    """Raise Unidentified if a file can change without a trace."""
    if found.silent is not None:
        raise Unidentified(f"`{found.silent or found.root}` {SILENT}")


def _content(found: Look, pins: ExitStack) -> FileContent:
    """*Consumes* the pins."""
    try:
        begun = digests.begin(found.paths())
    except BaseException:
        pins.close()
        raise
    begun.add_done_callback(lambda _: pins.close())
    return FileContent(found, begun)


def _pinned(found: Look) -> ExitStack:
    """Open directories until the stack is closed, so that neither their inodes nor their devices can be given to
    others. May raise OSError."""
    with ExitStack() as pins:
        for path in (found.root, *found.way):
            pins.callback(os.close, os.open(path, os.O_PATH | os.O_CLOEXEC))
        return pins.pop_all()
