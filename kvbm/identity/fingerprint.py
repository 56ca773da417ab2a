"""Fingerprint of a model directory: the content of every file that can determine its KV cache.

    weights                .safetensors .bin .pt .pth .gguf ... and every file that an index names; large ones sampled
    code and settings      .json .py .model .txt ...: configuration, index, tokenizer, remote code; complete
    adapters               adapter_*: complete
    ignored                everything else, and hidden files and directories

Subdirectories count, symbolic links are followed. The content has no path of the directory and no time: an equal copy
elsewhere has the same content. More files than the engine loads cost hits, never answers.

Loading takes minutes, and files can be exchanged meanwhile. An engine that loads the files itself takes a fingerprint
before and after, and compares them. If it cannot take one before, `changed_since` returns what was changed, linked or
renamed since the process started. A rename or a mount of a parent directory does not show.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import xxhash

from kvbm.host.processes import stat_of
from kvbm.identity.content import FULL_BYTES, METHOD, Signature, digest_file, shows_changes, signature_of
from kvbm.identity.digest_cache import DigestCache, default_path

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors"})
WHOLE_SUFFIXES = frozenset({".json", ".py", ".model", ".txt", ".tiktoken", ".jinja", ".yaml", ".yml"})
ADAPTER = "adapter_"
INDEX_SUFFIX = ".index.json"
MAX_FILES = 50_000
MAX_DEPTH = 16
MAX_LINKS = 40
THREADS = 8
CLOCK_SLACK_NS = 2_000_000_000  # the file system's clock may lag behind, or be another machine's


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`files`: metadata and digest by relative name. `places`: metadata of directories, whose names end with a
    slash, and of links. `weights`: names of weight files."""

    files: Mapping[str, tuple[Signature, str]]
    places: Mapping[str, Signature]
    weights: frozenset[str]

    @property
    def content(self) -> str:
        """Digest of names and contents, equal for equal copies."""
        listing = [METHOD, *([name, digest] for name, (_, digest) in sorted(self.files.items()))]
        return xxhash.xxh3_128_hexdigest(json.dumps(listing).encode())

    def changed_since(self, start_ns: int) -> str | None:
        """Return the name of a file, link or directory that changed after `start_ns` (since 1970), None if none did."""
        named = {name: signature for name, (signature, _) in self.files.items()}
        late = [
            name for name, found in (*named.items(), *self.places.items()) if found.ctime_ns > start_ns - CLOCK_SLACK_NS
        ]
        return min(late, default=None)


def fingerprint(directory: Path, cache: DigestCache | None = None) -> Fingerprint:
    """Return the fingerprint of a model directory. Raises OSError if a file cannot be read or changes meanwhile.

    `cache` has digests of earlier runs, by default those in the user's state directory.
    """
    cache = DigestCache(default_path()) if cache is None else cache
    directory = Path(os.path.abspath(directory))
    places = _links_to(str(directory))
    names = list(islice(_walk(directory, "", places, set()), MAX_FILES + 1))
    if len(names) > MAX_FILES:
        raise OSError(f"{directory} has too many files for a model")
    named = {name for index in names if index.endswith(INDEX_SUFFIX) for name in _named(directory / index)}
    wanted = [*names, *sorted(name for name in named.difference(names) if (directory / name).is_file())]
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(partial(_digest, directory, cache), wanted))
    cache.save()
    weights = frozenset(name for name in wanted if name in named or _is_weights(name))
    return Fingerprint(dict(zip(wanted, found, strict=True)), places, weights)


def process_start_ns() -> int:
    """Return when this process started, in nanoseconds since 1970."""
    process = stat_of(os.getpid())
    assert process is not None, "this process is alive"
    since_boot_ns = process.started * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)


def _walk(root: Path, name: str, places: dict[str, Signature], seen: set[tuple[int, int]]) -> Iterator[str]:
    """Yield the relative names of the files that count. Records directories and links in `places`."""
    directory = root / name
    facts = directory.stat()
    if (facts.st_dev, facts.st_ino) in seen:
        return
    seen.add((facts.st_dev, facts.st_ino))
    places[f"{directory}{os.sep}"] = Signature.of(facts)
    if name.count(os.sep) > MAX_DEPTH or len(seen) > MAX_FILES:
        raise OSError(f"{root} has too many directories for a model")
    with os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.name.startswith(".") or not os.path.exists(entry.path):  # a broken link cannot be loaded
            continue
        if entry.is_symlink():
            places.update(_links_to(entry.path))
        inner = os.path.join(name, entry.name)
        if entry.is_dir():
            yield from _walk(root, inner, places, seen)
        elif _is_weights(inner) or _is_whole(inner):
            yield inner


def _links_to(path: str) -> dict[str, Signature]:
    """Return the symbolic links that are followed to open a path."""
    links: dict[str, Signature] = {}
    done, rest = "/", deque(os.path.abspath(path).split(os.sep))
    while rest and len(links) < MAX_LINKS:
        done = os.path.normpath(os.path.join(done, rest.popleft()))
        facts = os.lstat(done)
        if stat.S_ISLNK(facts.st_mode):
            links[done] = Signature.of(facts)
            target = os.readlink(done)
            rest.extendleft(reversed(target.split(os.sep)))
            done = "/" if target.startswith(os.sep) else os.path.dirname(done)
    return links


def _is_weights(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in WEIGHT_SUFFIXES


def _is_whole(name: str) -> bool:
    return os.path.basename(name).startswith(ADAPTER) or os.path.splitext(name)[1].lower() in WHOLE_SUFFIXES


def _named(index: Path) -> set[str]:
    """Return the files that an index of shards names. An unreadable index names none."""
    try:
        if index.stat().st_size > FULL_BYTES:
            return set()
        names = json.loads(index.read_bytes())["weight_map"].values()
        return {os.path.normpath(name) for name in names if isinstance(name, str)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _digest(directory: Path, cache: DigestCache, name: str) -> tuple[Signature, str]:
    path = directory / name
    signature, key = signature_of(path), str(path)
    if (known := cache.get(key, signature)) is not None:
        return signature, known
    signature, digest = digest_file(path, is_sampled=not _is_whole(name))
    if shows_changes(path):
        cache.put(key, signature, digest)
    return signature, digest
