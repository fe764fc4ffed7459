"""What a batch's offsets say about TransformerEngine's limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.attention.te_limits import boundary_warning, count_padding_pieces
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets


def test_the_warning_begins_past_the_limit():
    assert boundary_warning(12_288) is None
    assert "12289 boundaries" in (boundary_warning(12_289) or "")


@given(
    cp_size=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 30), max_size=8),
    rooms=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_the_count_is_that_of_pieces_looked_at_one_by_one(cp_size, lengths, rooms):
    layout = make_layout("te")
    multiple = layout.length_multiple(cp_size)
    # Some slots are wider than their document needs.
    slots = [
        -(-length // multiple) * multiple + room * multiple
        for length, room in zip(lengths, rooms, strict=False)
    ]
    total = sum(slots) + multiple
    offsets = slot_offsets(slots, multiple=multiple, total=total, real_lengths=lengths)

    expected = []
    for rank in range(cp_size):
        held = set(
            layout.index_map(offsets.cu_seqlens_padded, cp_size=cp_size, cp_rank=rank).positions.tolist()
        )
        count = 0
        for start, slot, length in zip(offsets.cu_seqlens_padded, slots, lengths, strict=False):
            mine = sorted(held & set(range(start, start + slot)))
            second = mine[len(mine) // 2 :]
            count += bool(length and cp_size > 1 and all(token >= start + length for token in second))
        expected.append(count)

    counted = count_padding_pieces(offsets.cu_seqlens, offsets.cu_seqlens_padded, cp_size=cp_size)
    assert counted.tolist() == expected


def test_one_token_in_four_pieces():
    # Only rank 0's first piece has a token: both second pieces are padding. The long document has none.
    assert count_padding_pieces([0, 1, 101], [0, 4, 104], cp_size=2).tolist() == [1, 1]
    assert count_padding_pieces([0, 3], [0, 4], cp_size=2).tolist() == [1, 0]
    assert count_padding_pieces([0, 0], [0, 4], cp_size=2).dtype == np.int64


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="cp_size must be at least 1"):
        count_padding_pieces([0, 1], [0, 4], cp_size=0)
    with pytest.raises(ValueError, match="puts 5 real tokens into it"):
        count_padding_pieces([0, 5], [0, 4], cp_size=2)
