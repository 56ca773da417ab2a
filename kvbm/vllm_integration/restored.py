"""RestoredBlocks: blocks that an earlier process has left on disk, on their way to the routers.

They come in the order in which they were written, in which a block may come before its parent: the disk may have lost
the parent and written it again. llm-d ignores a block whose parent it does not know. So none is announced before all
are known, and then each comes after its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvbm.vllm_integration.descriptions import Descriptions


class RestoredBlocks:
    """See the module's text. `form_of(sequence_hash)` returns the form of its group. The announcer owns it."""

    def __init__(self, form_of: Callable[[bytes], Descriptions | None]) -> None:
        self._form_of = form_of
        self._found: dict[bytes, bytes] = {}  # descriptions of what is on disk
        self._present: dict[bytes, bytes] = {}  # of those, what is registered, by short names

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        return len(self._present)

    def find(self, hashes: Sequence[bytes], notes: Sequence[bytes]) -> None:
        """Note what is on disk, with what is written next to it. A note of another form is ignored."""
        for sequence_hash, note in zip(hashes, notes, strict=True):
            form = self._form_of(sequence_hash)
            if form is not None and (description := form.restored(note)) is not None:
                self._found[sequence_hash] = description

    def description(self, sequence_hash: bytes) -> bytes | None:
        return self._found.get(sequence_hash)

    def hold(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Keep those of the registered blocks that were found until `parents_first`; return the others."""
        others = []
        for sequence_hash in hashes:
            form = self._form_of(sequence_hash)
            if form is not None and sequence_hash in self._found:
                self._present[form.short_name(sequence_hash)] = sequence_hash
            else:
                others.append(sequence_hash)
        return others

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Forget blocks that have left the disk."""
        for sequence_hash in hashes:
            form = self._form_of(sequence_hash)
            if self._found.pop(sequence_hash, None) is not None and form is not None:
                self._present.pop(form.short_name(sequence_hash), None)

    def clear(self) -> None:
        self._found, self._present = {}, {}

    def parents_first(self, part_blocks: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Forget all blocks, and yield those that are registered, with their descriptions: each after its parent, if
        that is here too. A part is empty while the beginning of a long chain is searched."""
        part: list[tuple[bytes, bytes]] = []
        while self._present:
            chain: list[bytes] = []
            name: bytes | None = next(iter(self._present))
            while name is not None and (sequence_hash := self._present.pop(name, None)) is not None:
                chain.append(sequence_hash)
                form = self._form_of(sequence_hash)
                name = None if form is None else form.short_parent(sequence_hash, self._found[sequence_hash])
                if len(chain) % part_blocks == 0:
                    yield []
            while chain:
                part.append((chain[-1], self._found.pop(chain.pop())))
                if len(part) == part_blocks:
                    yield part
                    part = []
        if part:
            yield part
        self._found = {}  # on disk, and not registered
