"""HostPool: SGLang's host memory, seen as blocks. A block is one of its pages, with all layers.

SGLang itself says where the pieces of a page are (`get_page_buffer_meta`). A slot of G2 has them one after the other:

    page_first, page_first_direct, page_head     one piece of K and one of V; with MLA one piece
    layer_first                                  for each layer one piece of K and one of V; with MLA one piece

Equal lengths say nothing about the order of the bytes inside a piece. So `facts` names the layout and all sizes.

Any thread may call it. It writes only where SGLang said a page of the request is, and only inside the pool's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvbm.engines.sglang.options import LAYOUTS
from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.layout import BlockLayout, Piece

if TYPE_CHECKING:
    import torch

# What determines the order of the bytes in a page, where a pool has it.
_SHAPE = ("page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_cache_dim")
_MLA_SHAPE = ("kv_lora_rank", "qk_rope_head_dim")

Addresses = Sequence[tuple[int, int]]  # (address, length) of the pieces of one page


class HostPool:
    """See the module's text. Raises EnvironmentProblem for a pool whose pages kvbm cannot store."""

    def __init__(self, pool: Any) -> None:
        import torch

        layout = str(getattr(pool, "layout", ""))
        if layout not in LAYOUTS:
            raise EnvironmentProblem(
                f"kvbm cannot store pages of SGLang's host layout `{layout}`",
                hint=f"set `--hicache-mem-layout` to {', '.join(LAYOUTS)}",
            )
        if getattr(pool, "stores_page_envelope", False):
            raise EnvironmentProblem("kvbm cannot store pages of SGLang's host pool with page envelopes")
        self._pool = pool
        self.page_tokens = int(pool.page_size)  # positions of `indices` per page; 1 for the states of Mamba
        self._ranges = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in _buffers(pool)]
        first_page = torch.arange(self.page_tokens, dtype=torch.int64)
        try:
            self._lengths = tuple(pool.get_page_buffer_meta(first_page)[1])
        except (NotImplementedError, ValueError) as error:
            raise EnvironmentProblem(
                f"SGLang cannot tell where the pages of `{type(pool).__name__}` are: {error}"
            ) from None
        self.page_bytes = sum(self._lengths)

    def layout(self) -> BlockLayout:
        """Return the order of the pieces in a slot of G2."""
        offsets = [sum(self._lengths[:index]) for index in range(len(self._lengths))]
        pieces = zip(offsets, self._lengths, strict=True)
        return BlockLayout(tuple(Piece(0, offset, self.page_bytes, length) for offset, length in pieces), 1)

    def facts(self) -> dict[str, object]:
        """Return what else determines the bytes of a page: JSON values."""
        pool = self._pool
        shape = {
            name: int(value) for name in (*_SHAPE, *_MLA_SHAPE) if isinstance(value := getattr(pool, name, None), int)
        }
        return {
            "pool": type(pool).__name__,
            "layout": pool.layout,
            "dtype": str(getattr(pool, "dtype", "")),
            "format": str(getattr(pool, "storage_format_tag", None) or ""),
            "shape": shape,
        }

    def pages(self, indices: torch.Tensor, count: int) -> list[Addresses]:
        """Return where the pieces of `count` pages are. `indices` are SGLang's token positions in the pool.

        Raises InvariantError if SGLang names anything else than whole pages of this pool.
        """
        if len(indices) != count * self.page_tokens:
            raise InvariantError(f"{len(indices)} token positions for {count} pages of {self.page_tokens} tokens")
        addresses, lengths = self._pool.get_page_buffer_meta(indices)
        size = len(self._lengths)
        if len(addresses) != count * size or tuple(lengths) != self._lengths * count:
            raise InvariantError(f"{count} pages have {len(addresses)} pieces instead of {count * size}")
        for address, length in zip(addresses, lengths, strict=True):
            if not any(begin <= address and address + length <= end for begin, end in self._ranges):
                raise InvariantError(f"a piece at {address:#x} is not in the memory of SGLang's host pool")
        pieces = list(zip(addresses, lengths, strict=True))
        return [pieces[at : at + size] for at in range(0, len(pieces), size)]


def copy_out(slot: int, pieces: Addresses) -> None:
    """Copy a block from the slot of G2 at this address into the pieces of a page. Other threads run meanwhile."""
    for address, length in pieces:
        ctypes.memmove(address, slot, length)
        slot += length


def copy_in(slot: int, pieces: Addresses) -> None:
    """Copy a block from the pieces of a page into the slot of G2 at this address. Other threads run meanwhile."""
    for address, length in pieces:
        ctypes.memmove(slot, address, length)
        slot += length


def _buffers(pool: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the pool's pages. Raises EnvironmentProblem if there are none in host memory."""
    found = getattr(pool, "kv_buffer", None)
    if found is None and hasattr(pool, "get_hybrid_pool_buffer"):  # states and indexes
        found = pool.get_hybrid_pool_buffer()
    tensors = list(found) if isinstance(found, list | tuple) else [found]
    if any(one is None or one.device.type != "cpu" for one in tensors):
        raise EnvironmentProblem(f"SGLang's host pool `{type(pool).__name__}` has no buffer in host memory")
    yield from tensors
