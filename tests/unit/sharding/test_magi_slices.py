import numpy as np
import pytest

from ringfeed.sharding.magi.slices import MaskSlices

TUPLES = [(4, 8, 0, 8, "causal"), (0, 4, 0, 4, "full"), (0, 2, 1, 3, "bi_causal"), (0, 4, 2, 3, "inv_causal")]


def test_tuples_are_read_and_given_back():
    slices = MaskSlices.read(TUPLES)

    assert len(slices) == 4
    assert slices.to_tuples() == TUPLES
    assert MaskSlices.read(slices) is slices


def test_numpy_integers_are_integers():
    row = (*np.array([0, 4, 0, 4], dtype=np.int32), "full")

    assert MaskSlices.read([row]).to_tuples() == [(0, 4, 0, 4, "full")]


def test_by_query_sorts_by_both_ends_and_keeps_the_order_of_equals():
    ordered = MaskSlices.read(TUPLES).by_query()

    assert ordered.to_tuples() == [TUPLES[2], TUPLES[1], TUPLES[3], TUPLES[0]]
    assert ordered.by_query() is ordered


@pytest.mark.parametrize(
    ("tuples", "expected"),
    [(TUPLES, 8), ([], 0), ([(0, 4, 0, 4, "full"), (4, 9, 3, 3, "full"), (9, 9, 0, 5, "full")], 4)],
)
def test_query_end_leaves_out_slices_without_a_pair(tuples, expected):
    assert MaskSlices.read(tuples).query_end == expected


def test_padding_sees_nothing():
    padded = MaskSlices.read(TUPLES[:1]).with_padding(8, 12)

    assert padded.to_tuples() == [TUPLES[0], (8, 12, 0, 0, "full")]
    assert padded.query_end == 8


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 4, 0, 4), "slice 1 is .* not four integers and a kind"),
        ((0, 4, 0, 4.0, "full"), "slice 1 is .* not four integers and a kind"),
        (7, "slice 1 is 7, not four integers and a kind"),
        ((0, 4, 0, 4, ["full"]), r"slice 1 has kind \['full'\]; it must be one of full, causal"),
        ((0, 4, 0, 4, "band"), "slice 1 has kind 'band'; it must be one of full, causal, inv_causal"),
    ],
)
def test_what_is_no_slice_is_refused_by_number(row, message):
    with pytest.raises(ValueError, match=message):
        MaskSlices.read([TUPLES[0], row])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((5, 4, 0, 4, "full"), r"slice 1 has queries \[5, 4\)"),
        ((0, 13, 0, 4, "full"), r"slice 1 has queries \[0, 13\); .* in the stream, \[0, 12\)"),
        ((0, 4, -1, 4, "full"), r"slice 1 has keys \[-1, 4\)"),
    ],
)
def test_ranges_outside_the_stream_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        MaskSlices.read([TUPLES[0], row]).check_inside(12)
