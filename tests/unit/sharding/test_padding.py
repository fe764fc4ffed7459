import numpy as np
import pytest

from ringfeed.sharding.padding import concat_offsets, footprint, slot_lengths, slot_offsets


def both(offsets):
    return offsets.cu_seqlens.tolist(), offsets.cu_seqlens_padded.tolist()


def test_lengths_are_rounded_up():
    assert slot_lengths([0, 1, 4, 5], multiple=4).tolist() == [0, 4, 4, 8]


def test_footprint_is_the_slots_together():
    assert footprint([0, 1, 4, 5], multiple=4) == 16


def test_pack_with_room_ends_in_a_tail_slot():
    assert both(slot_offsets([3, 5], multiple=4, total=20)) == ([0, 3, 8, 8], [0, 4, 12, 20])


def test_full_pack_has_no_tail_slot():
    assert both(slot_offsets([3, 5], multiple=4, total=12)) == ([0, 3, 8], [0, 4, 12])


def test_pack_without_pieces_is_all_padding():
    assert both(slot_offsets([], multiple=4, total=20)) == ([0, 0], [0, 20])


def test_skipped_piece_keeps_its_slot():
    skipped = slot_offsets([3, 5], multiple=4, total=12, real_lengths=[0, 5])

    assert both(skipped) == ([0, 0, 5], [0, 4, 12])


def test_offsets_are_int32_for_the_kernels():
    offsets = slot_offsets([3], multiple=4, total=8)

    assert {offsets.cu_seqlens.dtype, offsets.cu_seqlens_padded.dtype} == {np.dtype(np.int32)}


def test_packs_lie_end_to_end():
    first = slot_offsets([3], multiple=4, total=8)
    second = slot_offsets([2], multiple=2, total=2)

    assert both(concat_offsets([first, second])) == ([0, 3, 3, 5], [0, 4, 8, 10])


def test_concatenating_packs_leaves_them_as_they_were():
    pack = slot_offsets([3], multiple=4, total=8)

    concat_offsets([pack, pack])

    assert both(pack) == ([0, 3, 3], [0, 4, 8])


def test_overflowing_pack_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match="2 pieces padded to a multiple of 4 take 12 tokens, 4 more than"):
        slot_offsets([3, 5], multiple=4, total=8)


def test_negative_length_is_refused_by_piece():
    with pytest.raises(ValueError, match="piece 1 has length -5"):
        slot_lengths([3, -5], multiple=4)


def test_multiple_below_one_is_refused():
    with pytest.raises(ValueError, match="multiple must be at least 1, got 0"):
        slot_lengths([3], multiple=0)


@pytest.mark.parametrize("total", [0, 2**31])
def test_total_outside_int32_is_refused(total):
    with pytest.raises(ValueError, match=f"total={total} must be between 1 and 2147483647"):
        slot_offsets([], multiple=1, total=total)


def test_chunk_beyond_int32_is_refused():
    pack = slot_offsets([], multiple=1, total=2**30)

    with pytest.raises(ValueError, match="total=2147483648 must be between"):
        concat_offsets([pack, pack])


@pytest.mark.parametrize("real", [[3, 9], [3, -1]])
def test_real_length_outside_its_slot_is_refused_by_piece(real):
    with pytest.raises(ValueError, match=f"piece 1 has {real[1]} real tokens, but its slot holds 8"):
        slot_offsets([3, 5], multiple=4, total=12, real_lengths=real)


def test_real_lengths_must_be_as_many_as_pieces():
    with pytest.raises(ValueError, match="real_lengths has 1 entries for 2 pieces"):
        slot_offsets([3, 5], multiple=4, total=12, real_lengths=[3])


def test_chunk_without_packs_is_refused():
    with pytest.raises(ValueError, match="at least one pack"):
        concat_offsets([])
