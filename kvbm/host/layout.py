"""BlockLayout: where the bytes of a block are, in G1 and inside a G2 slot.

A block's KV is a list of pieces. In G1 piece p of block b is the run of `length` bytes at `offset + b * block_stride`
of one storage; in G2 the pieces of a block follow each other without gaps from the start of its slot:

    G1, layer-separate      storage: | L0: b0 b1 b2 ... | L1: b0 b1 b2 ... | ...      one piece per layer (and per K, V)
    G1, block-contiguous    storage: | b0: L0 L1 ... | b1: L0 L1 ... | ...            one piece
    G2                      slot s:  | L0 L1 ... | padding up to `slot_stride` |

A layout does not know tokens, heads or dtypes: it only describes bytes. It is created once, when the engine passes its
KV cache, and it is refused if two pieces of any blocks share a byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import EnvironmentProblem, InvariantError

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096  # on every machine, whatever its pages: a shared store and a moved disk hold these slots

Numbers = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of bytes of every block: for block b, `storages[storage][offset + b * block_stride :][:length]`."""

    storage: int
    offset: int
    block_stride: int
    length: int


@dataclass(frozen=True, slots=True)
class Sheet:
    """Pieces that one strided view covers: `count` pieces, `piece_stride` bytes apart in G1, contiguous in the slot."""

    first: Piece
    count: int
    piece_stride: int
    slot_offset: int

    @property
    def slot_bytes(self) -> int:
        return self.count * self.first.length


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The pieces of a block, in slot order, for all blocks of G1. Raises EnvironmentProblem if any overlap."""

    pieces: tuple[Piece, ...]
    block_count: int

    def __post_init__(self) -> None:
        if not self.pieces or self.block_count < 1:
            raise InvariantError(f"layout of {len(self.pieces)} pieces and {self.block_count} blocks")
        for piece in self.pieces:
            if piece.storage < 0 or piece.offset < 0 or piece.block_stride < 0 or piece.length < 1:
                raise InvariantError(f"layout has {piece}")
        _refuse_overlap(self)

    @classmethod
    def block_contiguous(cls, *, block_count: int, block_bytes: int) -> BlockLayout:
        """One storage in which block follows block."""
        return cls((Piece(0, 0, block_bytes, block_bytes),), block_count)

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[torch.Tensor], *, block_count: int, block_dim: int, shared: bool = False
    ) -> BlockLayout:
        """Return the layout of an engine's KV tensors: views of any strides into the storages of `storages_of`.

        `block_dim` is the dimension that counts blocks. Its size may be a multiple of `block_count` if the engine's
        kernels use smaller blocks. With `shared`, tensors may overlap block by block, as tensors of KV cache groups do;
        their common bytes become one piece. Raises EnvironmentProblem for a tensor whose blocks are not runs of bytes.
        """
        indexes: dict[int, int] = {}
        pieces: list[Piece] = []
        for tensor in tensors:
            storage = indexes.setdefault(tensor.untyped_storage().data_ptr(), len(indexes))
            pieces += _pieces_of(tensor, storage, block_count, block_dim)
        return cls(tuple(_join(pieces, overlaid=shared)), block_count)

    @property
    def block_bytes(self) -> int:
        """Payload of one block on this rank."""
        return sum(piece.length for piece in self.pieces)

    @property
    def slot_stride(self) -> int:
        """Distance of two slots: `block_bytes` rounded up to whole pages, as direct I/O requires."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def slot_offsets(self) -> tuple[int, ...]:
        """Where each piece begins inside a slot."""
        return tuple(accumulate((piece.length for piece in self.pieces[:-1]), initial=0))

    @property
    def storage_count(self) -> int:
        return 1 + max(piece.storage for piece in self.pieces)

    def storage_bytes(self, storage: int) -> int:
        """Return the minimum length of a storage."""
        ends = (
            p.offset + (self.block_count - 1) * p.block_stride + p.length for p in self.pieces if p.storage == storage
        )
        return max(ends, default=0)

    def sheets(self) -> tuple[Sheet, ...]:
        """Return the pieces, in slot order, as few strided views: one for a regular cache."""
        sheets: list[Sheet] = []
        for piece, slot_offset in zip(self.pieces, self.slot_offsets, strict=True):
            if sheets and (grown := _grow(sheets[-1], piece)) is not None:
                sheets[-1] = grown
            else:
                sheets.append(Sheet(piece, 1, piece.length, slot_offset))
        return tuple(sheets)

    def digest(self) -> str:
        """Return a name of the order of bytes in a slot. It is independent of the blocks' number and position in G1."""
        lengths = ",".join(str(piece.length) for piece in self.pieces)
        return hashlib.blake2b(lengths.encode(), digest_size=16).hexdigest()


def storages_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the distinct storages of `tensors` as 1-D uint8 tensors, in the order in which `from_tensors` counts."""
    import torch

    distinct = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return [
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        for tensor in distinct.values()
    ]


def consecutive(*columns: Numbers, border: int | None = None) -> list[tuple[int, int]]:
    """Return index ranges (begin, end) in which the numbers of each column increase by one. With `border`, no range
    goes beyond a multiple of it in the first column."""
    count = len(columns[0])
    if not count:
        return []
    is_break, *others = (_is_break(np.asarray(column, np.int64)) for column in columns)
    for other in others:
        is_break |= other
    if border is not None:
        is_break |= np.asarray(columns[0])[1:] % border == 0
    return list(pairwise([0, *(is_break.nonzero()[0] + 1).tolist(), count]))


def _is_break(numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each number but the first is not the one before it plus one."""
    is_break: NDArray[np.bool_] = numbers[1:] - numbers[:-1] != 1
    return is_break


def _pieces_of(tensor: torch.Tensor, storage: int, block_count: int, block_dim: int) -> Iterator[Piece]:
    """Yield one piece per run of bytes of a block, outermost dimension first."""
    dimensions = list(zip(tensor.shape, tensor.stride(), strict=True))
    rows, stride = dimensions.pop(block_dim)
    if rows % block_count:
        raise EnvironmentProblem(f"KV tensor of shape {tuple(tensor.shape)} does not hold {block_count} whole blocks")
    rows_per_block = rows // block_count
    outer, run = _split_run([*dimensions, (rows_per_block, stride)], tensor)
    item = tensor.element_size()
    for start in _starts(outer):
        offset = (tensor.storage_offset() + start) * item
        yield Piece(storage, offset, rows_per_block * stride * item, run * item)


def _split_run(dimensions: list[tuple[int, int]], tensor: torch.Tensor) -> tuple[list[tuple[int, int]], int]:
    """Return (dimensions outside the innermost contiguous run, length of that run in elements)."""
    run = 1
    left = sorted(((size, stride) for size, stride in dimensions if size != 1), key=lambda dimension: dimension[1])
    while left and left[0][1] == run:
        run *= left.pop(0)[0]
    if run == 1 and left:
        raise EnvironmentProblem(
            f"KV tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has no contiguous run of bytes"
        )
    return left[::-1], run


def _starts(outer: list[tuple[int, int]]) -> Iterator[int]:
    if not outer:
        yield 0
        return
    (size, stride), *inner = outer
    for index in range(size):
        for start in _starts(inner):
            yield index * stride + start


def _join(pieces: list[Piece], *, overlaid: bool) -> Iterator[Piece]:
    """Join pieces that are adjacent in G1, or `overlaid`. A block-first cache becomes one run per block."""
    ordered = sorted(pieces, key=lambda piece: (piece.storage, piece.offset))
    joined = ordered[0]
    for piece in ordered[1:]:
        end = joined.offset + joined.length
        is_near = piece.offset == end or (overlaid and piece.offset < end)
        whole = max(end, piece.offset + piece.length) - joined.offset
        alike = (piece.storage, piece.block_stride) == (joined.storage, joined.block_stride)
        if alike and is_near and whole <= joined.block_stride:
            joined = Piece(joined.storage, joined.offset, joined.block_stride, whole)
        else:
            yield joined
            joined = piece
    yield joined


def _grow(sheet: Sheet, piece: Piece) -> Sheet | None:
    """Return the sheet extended by one piece, if that piece continues its pattern."""
    first = sheet.first
    if (piece.storage, piece.block_stride, piece.length) != (first.storage, first.block_stride, first.length):
        return None
    stride = piece.offset - first.offset if sheet.count == 1 else sheet.piece_stride
    if stride <= 0 or piece.offset != first.offset + sheet.count * stride:
        return None
    return Sheet(first, sheet.count + 1, stride, sheet.slot_offset)


def _refuse_overlap(layout: BlockLayout) -> None:
    for storage, group in groupby(sorted(layout.pieces, key=lambda p: p.storage), key=lambda p: p.storage):
        starts, lengths = zip(*(_intervals(piece, layout.block_count) for piece in group), strict=True)
        start = np.concatenate(starts)
        order = np.argsort(start, kind="stable")
        start, end = start[order], (start + np.concatenate(lengths))[order]
        bad = np.flatnonzero(start[1:] < end[:-1])
        if bad.size:
            at = int(start[bad[0] + 1])
            raise EnvironmentProblem(f"KV cache: blocks overlap at byte {at} of storage {storage}: {layout.pieces[:4]}")


def _intervals(piece: Piece, block_count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of the bytes of one piece of all blocks; one interval if they are contiguous."""
    if piece.block_stride == piece.length:
        return np.array([piece.offset], np.int64), np.array([block_count * piece.length], np.int64)
    starts = piece.offset + piece.block_stride * np.arange(block_count, dtype=np.int64)
    return starts, np.full(block_count, piece.length, np.int64)
