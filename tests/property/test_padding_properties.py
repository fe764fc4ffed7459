"""The one pad rule (L8), for any lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.padding import concat_offsets, footprint, slot_lengths, slot_offsets

lengths_lists = st.lists(st.integers(0, 200), max_size=20)
multiples = st.integers(1, 64)


@given(lengths=lengths_lists, multiple=multiples)
def test_slot_is_the_smallest_multiple_that_holds_the_piece(lengths, multiple):
    for length, slot in zip(lengths, slot_lengths(lengths, multiple=multiple).tolist(), strict=True):
        assert slot % multiple == 0
        assert length <= slot < length + multiple


@given(lengths=lengths_lists, multiple=multiples, spare=st.integers(0, 3))
def test_pack_has_exactly_one_tail_slot_when_there_is_room_and_none_when_full(lengths, multiple, spare):
    needed = footprint(lengths, multiple=multiple)
    total = max(1, needed + spare)

    offsets = slot_offsets(lengths, multiple=multiple, total=total)

    tail = [total - needed] if total > needed else []
    assert np.diff(offsets.cu_seqlens_padded).tolist() == [*slot_lengths(lengths, multiple=multiple), *tail]
    assert np.diff(offsets.cu_seqlens).tolist() == [*lengths, *(0 for _ in tail)]


@given(packs=st.lists(lengths_lists, min_size=1, max_size=4), multiple=multiples)
def test_chunk_is_its_packs_slots_in_a_row(packs, multiple):
    parts = [
        slot_offsets(lengths, multiple=multiple, total=1 + footprint(lengths, multiple=multiple))
        for lengths in packs
    ]

    chunk = concat_offsets(parts)

    for name in ("cu_seqlens", "cu_seqlens_padded"):
        widths = [np.diff(getattr(part, name)) for part in parts]
        assert np.array_equal(np.diff(getattr(chunk, name)), np.concatenate(widths))
