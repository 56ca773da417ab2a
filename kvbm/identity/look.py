"""Look: metadata of every file that can determine the KV cache of a model, and of all places on the way to them.

    weights                .safetensors .bin .pt .pth .gguf ... and every file that an index names
    code and settings      .json .py .model .txt ...: configuration, index, tokenizer, remote code
    adapters               adapter_*
    ignored                everything else, and hidden files and directories

Code can read any file. So with `every`, all files count, except those in `.git`, `.cache` and `__pycache__`.

Subdirectories count, symbolic links are followed. More files than the engine loads cost hits, never answers.

Loading takes minutes, and files can be exchanged meanwhile. `changed_since` compares with a look before loading.
Without one, `changed_after` finds what changed after the process of the engine started. A directory on the way to the
model counts as changed if it may be another one or have been renamed; not if entries were made in it, as in /tmp.

    place                          must have kept
    files                          device, inode, size, mtime, ctime
    directories of the model       the same
    links on the way               the same
    directories on the way         device and inode, and their name all the time (`ChangeWatch`, or their times)
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import xxhash

from kvbm.host.processes import stat_of
from kvbm.identity.content import METHOD, QUIET_NS, Signature, hides_changes, signature_of, writes_back

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors"})
OTHER_SUFFIXES = frozenset({".json", ".py", ".model", ".txt", ".tiktoken", ".jinja", ".yaml", ".yml"})
NEVER_LOADED = frozenset({".git", ".cache", "__pycache__"})
ADAPTER = "adapter_"
INDEX_SUFFIX = ".index.json"
MAX_INDEX_BYTES = 128 << 20
MAX_FILES = 50_000
MAX_DEPTH = 16
MAX_LINKS = 40
CLOCK_SLACK_NS = 2_000_000_000  # the file system's clock may lag behind, or be another machine's


@dataclass(frozen=True, slots=True)
class Look:
    """`root` is a directory, or a file. `files`: metadata by name relative to it. `places`: of directories of the
    model, whose names end with a slash, and of links. `way`: of the other directories on the way. `weights`: names of
    weight files. `silent`: a file that can change without a trace, if there is one. `quiet_ns`: how long files must
    have been unchanged before the look, so that a later change leaves one."""

    root: str
    taken_ns: int
    files: Mapping[str, Signature]
    places: Mapping[str, Signature]
    way: Mapping[str, Signature]
    weights: frozenset[str]
    silent: str | None
    quiet_ns: int

    def changed_since(self, before: Look, noticed: str | None, *, knows_moves: bool) -> str | None:
        """Return the name of what may have changed after an earlier look, or just before it; None if nothing did.

        `noticed` was renamed or written meanwhile. Without `knows_moves`, the times of directories tell.
        """
        for ours, theirs in ((self.files, before.files), (self.places, before.places)):
            changed = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
            if changed:
                return min(changed)
        recent = [name for name, found in self.files.items() if found.ctime_ns > before.taken_ns - before.quiet_ns]
        recent += [name for name, found in self.places.items() if found.ctime_ns > before.taken_ns - CLOCK_SLACK_NS]
        if recent:
            return min(recent)
        for path in self.way.keys() | before.way.keys():
            was, found = before.way.get(path), self.way.get(path)
            if was is None or found is None or was[:2] != found[:2]:
                return path
        return noticed if knows_moves else self._renamed(lambda path: before.way[path].ctime_ns)

    def changed_after(self, start_ns: int) -> str | None:
        """Return the name of what may have changed after `start_ns` (since 1970), None if nothing did.

        Files must have been quiet for a minute before. A file that was changed shortly before may change again without
        a trace, through a mapping whose pages have not been written back.
        """
        late = [name for name, found in self.files.items() if found.ctime_ns > start_ns - QUIET_NS]
        late += [name for name, found in self.places.items() if found.ctime_ns > start_ns - CLOCK_SLACK_NS]
        return min(late) if late else self._renamed(lambda path: start_ns - CLOCK_SLACK_NS)

    def content(self, digests: Mapping[str, str]) -> str:
        """Return a digest of names and contents, equal for equal copies. `digests`: of each file."""
        listing = [METHOD, *([name, digests[name]] for name in sorted(self.files))]
        return xxhash.xxh3_128_hexdigest(json.dumps(listing).encode())

    def paths(self) -> list[tuple[str, Signature]]:
        """Return path and metadata of each file, in order of their names."""
        return [(os.path.join(self.root, name) if name else self.root, self.files[name]) for name in sorted(self.files)]

    def _renamed(self, since_ns: Callable[[str], int]) -> str | None:
        """Return a directory that may have been renamed after a time, judged by times alone.

        A rename sets ctime of the directory, and ctime and mtime of the one that it is in. A new entry sets both times
        of the directory itself.
        """
        for path, found in self.way.items():
            if found.ctime_ns <= since_ns(path) or path == os.sep:
                continue
            parent = self.way.get(os.path.dirname(path))
            is_quiet_around = parent is not None and parent.mtime_ns <= since_ns(os.path.dirname(path))
            if found.ctime_ns != found.mtime_ns or not is_quiet_around:
                return path
        return None


def look(path: Path, *, every: bool = False) -> Look:
    """Look at a directory, or at one file. `every`: at all files. Raises OSError if something cannot be read."""
    root = Path(os.path.abspath(path))
    taken_ns = time.time_ns()
    walk = _Walk(root, every)
    names = list(islice(walk.files(), MAX_FILES + 1))
    if len(names) > MAX_FILES:
        raise OSError(f"{root} has too many files for a model")
    named = {name for index in names if index.endswith(INDEX_SUFFIX) for name in _named(root / index)}
    further = sorted(name for name in named.difference(names) if (root / name).is_file())
    for name in further:
        walk.note_way(str(root / name))
    files = {name: signature_of(root / name if name else root) for name in (*names, *further)}
    weights = frozenset(name for name in files if name in named or _is_weights(name))
    paths = {name: root / name if name else root for name in sorted(files)}
    silent = next((name for name, path in paths.items() if hides_changes(path)), None)
    quiet_ns = CLOCK_SLACK_NS if all(map(writes_back, paths.values())) else QUIET_NS
    way = {path: found for path, found in walk.way.items() if f"{path}{os.sep}" not in walk.places}
    return Look(str(root), taken_ns, files, walk.places, way, weights, silent, quiet_ns)


def process_start_ns(pid: int | None = None) -> int:
    """Return when a process, by default this one, started, in nanoseconds since 1970; 0 if it has ended."""
    process = stat_of(os.getpid() if pid is None else pid)
    if process is None:
        return 0
    since_boot_ns = process.started * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)


class _Walk:
    """Finds the files that count, and notes directories and links on the way."""

    def __init__(self, root: Path, every: bool) -> None:
        self._root = root
        self._every = every
        self.places: dict[str, Signature] = {}
        self.way: dict[str, Signature] = {}
        self._seen: set[tuple[int, int]] = set()
        self.note_way(str(root))

    def files(self, name: str = "") -> Iterator[str]:
        """Yield the relative names of the files that count; only an empty name if the root is a file."""
        directory = self._root / name
        facts = directory.stat()
        if not name and stat.S_ISREG(facts.st_mode):
            yield ""
            return
        if (facts.st_dev, facts.st_ino) in self._seen:
            return
        self._seen.add((facts.st_dev, facts.st_ino))
        self.places[f"{directory}{os.sep}"] = Signature.of(facts)
        if name.count(os.sep) > MAX_DEPTH or len(self._seen) > MAX_FILES:
            raise OSError(f"{self._root} has too many directories for a model")
        with os.scandir(directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            is_left_out = entry.name in NEVER_LOADED if self._every else entry.name.startswith(".")
            if is_left_out or not os.path.exists(entry.path):  # a broken link cannot be loaded
                continue
            if entry.is_symlink():
                self.note_way(entry.path)
            inner = os.path.join(name, entry.name)
            if entry.is_dir():
                yield from self.files(inner)
            elif self._every or _is_weights(inner) or _is_other(inner):
                yield inner

    def note_way(self, path: str) -> None:
        """Note the links and the directories that are passed to open a path. Raises OSError."""
        done, rest, links = "/", deque(os.path.abspath(path).split(os.sep)), 0
        while rest and links < MAX_LINKS:
            done = os.path.normpath(os.path.join(done, rest.popleft()))
            if done in self.way:
                continue
            facts = os.lstat(done)
            if stat.S_ISLNK(facts.st_mode):
                links += 1
                self.places[done] = Signature.of(facts)
                target = os.readlink(done)
                rest.extendleft(reversed(target.split(os.sep)))
                done = "/" if target.startswith(os.sep) else os.path.dirname(done)
            elif stat.S_ISDIR(facts.st_mode):
                self.way[done] = Signature.of(facts)


def _is_weights(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in WEIGHT_SUFFIXES


def _is_other(name: str) -> bool:
    return os.path.basename(name).startswith(ADAPTER) or os.path.splitext(name)[1].lower() in OTHER_SUFFIXES


def _named(index: Path) -> set[str]:
    """Return the files that an index of shards names. An unreadable index names none."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            return set()
        names = json.loads(index.read_bytes())["weight_map"].values()
        return {os.path.normpath(name) for name in names if isinstance(name, str)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
