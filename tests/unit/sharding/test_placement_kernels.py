"""The sort of the placing loops, for lengths of one digit and of several."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.placement_kernels import longest_first

lengths = (
    st.integers(0, 3) | st.integers(2040, 2060) | st.integers(0, 2**23) | st.sampled_from([2**11, 2**22])
)


@given(lengths=st.lists(lengths, max_size=30), picked=st.integers(1, 3))
def test_slots_come_by_falling_length_and_equal_ones_in_their_order(lengths, picked):
    offsets = np.cumsum([0, *lengths])
    slots = np.arange(len(lengths))[::picked]

    order = longest_first(slots, offsets)

    assert order.tolist() == sorted(slots.tolist(), key=lambda slot: -lengths[slot])
    assert slots.tolist() == list(range(len(lengths)))[::picked]


@given(lengths=st.lists(lengths, min_size=1, max_size=12), cp_size=st.integers(1, 5))
def test_one_rank_s_share_is_the_same_alone(lengths, cp_size):
    padded = np.cumsum([0, *lengths, -sum(lengths) % cp_size])
    layout = make_layout("whole_document")

    maps = layout.index_maps(padded, cp_size=cp_size)

    for rank, index_map in enumerate(maps):
        alone = layout.index_map(padded, cp_size=cp_size, cp_rank=rank)
        assert alone.runs.tolist() == index_map.runs.tolist()
        assert len(alone) == len(index_map) == padded[-1] // cp_size
