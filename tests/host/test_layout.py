import pytest
import torch
from copies import layer_separate

from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.layout import PAGE_BYTES, BlockLayout, Piece, Sheet, storages_of

BLOCKS = 6


def layout_of(*tensors, block_dim=0, block_count=BLOCKS):
    return BlockLayout.from_tensors(tensors, block_count=block_count, block_dim=block_dim)


def test_block_contiguous_cache_is_one_piece():
    layout = BlockLayout.block_contiguous(block_count=BLOCKS, block_bytes=5000)
    assert layout.pieces == (Piece(0, 0, 5000, 5000),)
    assert (layout.block_bytes, layout.slot_stride, layout.slot_offsets) == (5000, 2 * PAGE_BYTES, (0,))


def test_layer_separate_cache_is_one_piece_per_layer_side_by_side_in_the_slot():
    layout = layer_separate(layer_count=3, block_count=BLOCKS, piece_bytes=100)
    assert layout.pieces == tuple(Piece(0, layer * 600, 100, 100) for layer in range(3))
    assert layout.slot_offsets == (0, 100, 200)
    assert layout.storage_bytes(0) == 1800


def test_slot_of_a_whole_page_has_no_padding():
    assert BlockLayout.block_contiguous(block_count=1, block_bytes=PAGE_BYTES).slot_stride == PAGE_BYTES


PIECES = {  # of a tensor with this dimension of blocks
    "blocks first": (torch.zeros((BLOCKS, 4, 2, 16, 2, 8)), 0, [Piece(0, 0, 8192, 8192)]),
    "layers first": (
        torch.zeros((4, BLOCKS, 2, 16, 2, 8), dtype=torch.bfloat16),
        1,
        [Piece(0, layer * BLOCKS * 1024, 1024, 1024) for layer in range(4)],
    ),
    "keys and values ahead of the block": (
        torch.zeros((2, BLOCKS, 16, 2, 8), dtype=torch.float16),
        1,
        [Piece(0, 0, 512, 512), Piece(0, BLOCKS * 512, 512, 512)],
    ),
    "a view that begins inside its storage": (torch.zeros((BLOCKS + 2, 32))[2:], 0, [Piece(0, 256, 128, 128)]),
    "gaps between blocks": (torch.zeros((BLOCKS, 64))[:, :48], 0, [Piece(0, 0, 256, 192)]),
    "kernel blocks smaller than a block": (torch.zeros((BLOCKS * 4, 8)), 0, [Piece(0, 0, 128, 128)]),
    "kernel blocks with gaps": (torch.zeros((BLOCKS * 2, 16))[:, :8], 0, [Piece(0, 0, 128, 32), Piece(0, 64, 128, 32)]),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_tensor_has_as_few_pieces_per_block_as_it_can(name):
    tensor, block_dim, pieces = PIECES[name]
    assert layout_of(tensor, block_dim=block_dim).pieces == tuple(pieces)


def test_views_of_layers_into_a_block_first_tensor_join_into_one_run():
    cache = torch.zeros((BLOCKS, 4, 2, 16, 2, 8))
    assert layout_of(*(cache[:, layer] for layer in range(4))) == layout_of(cache)


def test_heads_outside_of_the_block_are_a_piece_each():
    tensor = torch.zeros((3, BLOCKS, 16, 8)).permute(1, 2, 0, 3)  # seen as [blocks, tokens, heads, size]
    layout = layout_of(tensor)
    assert [piece.length for piece in layout.pieces] == [512, 512, 512]
    assert layout.sheets() == (Sheet(layout.pieces[0], 3, BLOCKS * 512, 0),)


def test_tensors_of_one_storage_share_it_and_others_do_not():
    cache, other = torch.zeros((2, BLOCKS, 8)), torch.zeros((BLOCKS, 8))
    layout = layout_of(cache[0], other, cache[1])
    assert [piece.storage for piece in layout.pieces] == [0, 0, 1]
    storages = storages_of([cache[0], other, cache[1]])
    assert [(storage.dtype, storage.numel()) for storage in storages] == [(torch.uint8, 384), (torch.uint8, 192)]
    storages[1].fill_(1)
    assert other.view(torch.uint8).eq(1).all()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((torch.zeros((BLOCKS, 8, 2))[:, :, 0],), "no contiguous run"),
        ((torch.zeros((7, 8)),), "6 whole blocks"),
        ((torch.zeros((1, 8)).expand(BLOCKS, 8),), "overlap at byte"),  # every block the same bytes
        ((torch.zeros(64).as_strided((BLOCKS, 8), (4, 1)),), "overlap at byte"),  # blocks that reach into the next
        ((torch.zeros((BLOCKS, 8)),) * 2, "overlap at byte"),  # two layers in the same bytes
    ],
    ids=["no run", "no whole blocks", "the same bytes", "into the next", "two layers"],
)
def test_tensors_without_blocks_of_their_own_are_refused(tensors, words):
    with pytest.raises(EnvironmentProblem, match=words):
        layout_of(*tensors)


def test_overlap_between_pieces_of_different_stride_is_found():
    with pytest.raises(EnvironmentProblem, match="overlap at byte 350"):
        BlockLayout((Piece(0, 0, 100, 100), Piece(0, 700, 10, 4), Piece(0, 350, 350, 1)), 8)


@pytest.mark.parametrize(
    ("pieces", "block_count"),
    [((), 1), ((Piece(0, 0, 8, 8),), 0), ((Piece(0, -1, 8, 8),), 1), ((Piece(0, 0, 8, 0),), 1)],
)
def test_a_layout_of_nothing_is_refused(pieces, block_count):
    with pytest.raises(InvariantError):
        BlockLayout(pieces, block_count)


def test_regular_layers_are_one_sheet_and_irregular_ones_several():
    regular = layer_separate(layer_count=4, block_count=BLOCKS, piece_bytes=100)
    assert [(sheet.count, sheet.piece_stride, sheet.slot_bytes) for sheet in regular.sheets()] == [(4, 600, 400)]
    irregular = BlockLayout((Piece(0, 0, 8, 8), Piece(0, 100, 8, 8), Piece(0, 300, 8, 8), Piece(1, 0, 8, 8)), 2)
    assert [(sheet.count, sheet.slot_offset) for sheet in irregular.sheets()] == [(2, 0), (1, 16), (1, 24)]


def test_digest_names_the_division_of_a_slot_and_not_the_number_of_blocks():
    def digest(layers, blocks, size):
        return layer_separate(layer_count=layers, block_count=blocks, piece_bytes=size).digest()

    assert digest(3, 5, 100) == digest(3, 50, 100)
    assert len({digest(3, 5, 100), digest(3, 5, 200), digest(6, 5, 50)}) == 3
