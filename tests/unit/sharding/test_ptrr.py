"""The layout ``ptrr`` on small chunks whose answer is known, and its errors."""

import numpy as np
import pytest

from ringfeed.sharding.layouts import LAYOUT_NAMES, make_layout
from ringfeed.sharding.ptrr import block_times, deal_blocks


def times(padded, real=None, *, block=4):
    offsets = np.array(padded)
    return block_times(offsets, offsets if real is None else np.array(real), block).tolist()


def blocks_of(layout, padded, *, cp_size, real=None):
    maps = layout.index_maps(padded, cp_size=cp_size, cu_seqlens=real)
    return [(index_map.positions[:: layout.block] // layout.block).tolist() for index_map in maps]


def test_a_block_sees_back_to_the_block_where_its_first_document_begins():
    # Documents [0, 8), [8, 18), [18, 24): block 4 has the end of the second and the third's begin.
    assert times([0, 8, 18, 24]) == [1, 2, 1, 2, 3, 2]


def test_a_slot_without_a_real_token_sees_nothing():
    # Block 1 still has a token of document 0, block 2 has none, and a document begins in block 3.
    assert times([0, 5, 14, 16], [0, 3, 3, 4]) == [1, 2, 0, 1]
    assert times([0, 8], [0, 0]) == [0, 0]
    assert times([0, 4, 12], [0, 4, 4]) == [1, 0, 0]


def test_slots_of_length_zero_change_nothing():
    assert times([0, 0, 8, 8, 8, 16, 16]) == times([0, 8, 16])


def test_torchs_published_example():
    # From torch's own documentation: documents of 4, 8 and 4 blocks on two ranks.
    layout = make_layout("ptrr", block=2)

    assert blocks_of(layout, [0, 8, 24, 32], cp_size=2) == [
        [2, 3, 5, 6, 8, 11, 12, 13],
        [0, 1, 4, 7, 9, 10, 14, 15],
    ]


def test_rounds_turn_at_each_end():
    dealt = deal_blocks(np.array([4, 6, 5, 1, 3, 2]), 3)

    # Longest first 6 5 4 | 3 2 1: the second round goes backwards.
    assert dealt.tolist() == [[1, 3], [2, 5], [0, 4]]


def test_one_rank_holds_the_chunk_in_order():
    (everything,) = make_layout("ptrr").index_maps([0, 100, 256], cp_size=1)

    assert everything.runs.tolist() == [[0, 256]]


def test_neighbouring_blocks_are_one_run():
    first, second = make_layout("ptrr", block=4).index_maps([0, 4, 8, 12, 16], cp_size=2)

    # All times are equal, so the rounds are 0 1 | 3 2.
    assert first.runs.tolist() == [[0, 4], [12, 4]]
    assert second.runs.tolist() == [[4, 8]]


def test_an_empty_chunk_gives_empty_maps():
    assert [len(index_map) for index_map in make_layout("ptrr").index_maps([0, 0], cp_size=4)] == [0] * 4


def test_multiples_and_options():
    layout = make_layout("ptrr", block=64)

    assert layout.length_multiple(4) == 1
    assert layout.chunk_multiple(cp_size=4) == 256
    assert layout.chunk_multiple(cp_size=4, tp_size=3, unit=16) == 768
    assert make_layout(layout.name, **layout.options) == layout
    assert make_layout("ptrr").options == {"block": 128}
    assert "ptrr" in LAYOUT_NAMES


def test_a_chunk_that_breaks_the_multiple_is_refused_with_its_neighbours():
    with pytest.raises(
        ValueError, match=r"300 tokens, but layout 'ptrr' .* multiple of 256; nearest valid: \[256, 512\]"
    ):
        make_layout("ptrr").index_map([0, 300], cp_size=2, cp_rank=0)


@pytest.mark.parametrize("block", [0, -1, 1.5, True, "128"])
def test_a_wrong_block_is_refused(block):
    with pytest.raises(ValueError, match="block must be an integer of at least 1, got"):
        make_layout("ptrr", block=block)


def test_wrong_ranks_are_refused():
    with pytest.raises(ValueError, match="cp_rank=2 must be at least 0 and below cp_size=2"):
        make_layout("ptrr", block=4).index_map([0, 8], cp_size=2, cp_rank=2)
