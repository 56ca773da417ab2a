"""Description of an engine: facts as JSON values, some of which are known only when files have been digested.

FileContent      in facts: the content of files, replaced by its digest
Hashed       in facts: a value with contents inside, replaced by its digest
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from kvbm.identity.digests import Unidentified
from kvbm.identity.loading import FileContent

Description = tuple[Mapping[str, object], str]  # facts and a doubt, empty if there is none


@dataclass(frozen=True, slots=True)
class Hashed:
    """A value of which only the digest counts."""

    value: object


def describe(facts: Mapping[str, object], doubt: str) -> Future[Description]:
    """Return facts as JSON values and a doubt, when all contents are known. With a doubt, contents are left out."""
    described: Future[Description] = Future()
    if doubt:
        described.set_result((_without_contents(facts), doubt))
    elif all(content.is_known for content in _contents(facts)):
        described.set_result(_described(facts))
    else:
        thread = threading.Thread(
            target=lambda: described.set_result(_described(facts)), name="kvbm-identity", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            described.set_result((_without_contents(facts), f"no thread can be started: {error}"))
    return described


def digest(value: object) -> str | Hashed:
    """Return a digest of a value, or the value to be hashed when its contents are known."""
    if any(not content.is_known for content in _contents(value)):
        return Hashed(value)
    return _digest(settled(value))


def settled(value: object) -> object:
    """Return a value with all contents replaced. Waits for them. Raises Unidentified."""
    match value:
        case FileContent():
            return f"content {value.text()}"
        case Hashed():
            return _digest(settled(value.value))
        case Mapping():
            return {name: settled(one) for name, one in value.items()}
        case list() | tuple():
            return [settled(one) for one in value]
    return value


def _described(facts: Mapping[str, object]) -> Description:
    try:
        return {name: settled(value) for name, value in facts.items()}, ""
    except Unidentified as error:
        return _without_contents(facts), f"the model cannot be identified: {error}"


def _without_contents(facts: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in facts.items() if not any(True for _ in _contents(value))}


def _contents(value: object) -> Iterator[FileContent]:
    match value:
        case FileContent():
            yield value
        case Hashed():
            yield from _contents(value.value)
        case Mapping():
            for one in value.values():
                yield from _contents(one)
        case list() | tuple():
            for one in value:
                yield from _contents(one)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
