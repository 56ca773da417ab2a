"""RestoredBlocks: blocks that an earlier process has left on disk, on their way to the routers.

They come in the order in which they were written, in which a block may come before its parent: the disk may have lost
the parent and written it again. llm-d ignores a block whose parent it does not know. So none is announced before all
are known, and then each comes after its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvbm.engines.vllm.descriptions import Descriptions


class RestoredBlocks:
    """See the module's text. `form_of(sequence_hash)` returns the form of its group. The announcer owns it."""

    def __init__(self, form_of: Callable[[bytes], Descriptions | None]) -> None:
        self._form_of = form_of
        self._found: dict[bytes, bytes] = {}  # descriptions by sequence hashes
        self._names: dict[bytes, bytes] = {}  # their sequence hashes by short names

    def __len__(self) -> int:
        return len(self._found)

    def description(self, sequence_hash: bytes) -> bytes | None:
        return self._found.get(sequence_hash)

    def hold(self, hashes: Sequence[bytes], notes: Sequence[bytes]) -> None:
        """Keep blocks, with what was written next to them, until `parents_first`. Those without a note of this form are
        not announced."""
        for sequence_hash, note in zip(hashes, notes, strict=True):
            form = self._form_of(sequence_hash)
            if form is not None and (description := form.restored(note)) is not None:
                self._found[sequence_hash] = description
                self._names[form.short_name(sequence_hash)] = sequence_hash

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Forget blocks that have left the disk."""
        for sequence_hash in hashes:
            self._found.pop(sequence_hash, None)

    def clear(self) -> None:
        self._found, self._names = {}, {}

    def parents_first(self, part_blocks: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Forget all blocks, and yield them with their descriptions: each after its parent, if that is here too. A part
        is empty while the beginning of a long chain is searched."""
        part: list[tuple[bytes, bytes]] = []
        while self._found:
            sequence_hash, description = self._found.popitem()
            chain = [(sequence_hash, description)]
            while (parent := self._parent_of(sequence_hash, description)) is not None:
                sequence_hash, description = parent, self._found.pop(parent)
                chain.append((sequence_hash, description))
                if len(chain) % part_blocks == 0:
                    yield []
            while chain:
                part.append(chain.pop())
                if len(part) == part_blocks:
                    yield part
                    part = []
        if part:
            yield part
        self._names = {}

    def _parent_of(self, sequence_hash: bytes, description: bytes) -> bytes | None:
        """Return the parent of a block; None if it has none, or if that is not here any more."""
        form = self._form_of(sequence_hash)
        name = None if form is None else form.short_parent(sequence_hash, description)
        parent = None if name is None else self._names.get(name)
        return parent if parent in self._found else None
