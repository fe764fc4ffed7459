import numpy as np
import pytest
import torch

from ringfeed.sharding.offsets import as_integers, as_offsets, as_real_offsets


@pytest.mark.parametrize(
    "values",
    [
        [0, 3, 3, 8],
        (0, 3, 3, 8),
        np.array([0, 3, 3, 8], dtype=np.int32),
        np.array([0, 3, 3, 8], dtype=np.uint16),
        np.array([0, 9, 3, 9, 3, 9, 8])[::2],
        torch.tensor([0, 3, 3, 8], dtype=torch.int32),
        torch.tensor([0, 3, 3, 8]),
    ],
    ids=["list", "tuple", "int32", "uint16", "strided", "tensor-int32", "tensor-int64"],
)
def test_offsets_come_in_any_form(values):
    offsets = as_offsets(values)

    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 3, 3, 8]


def test_offsets_do_not_change_with_the_callers_buffer():
    buffer = np.array([0, 4, 8])
    offsets = as_offsets(buffer)

    buffer[1] = 7

    assert offsets.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"at least 2 offsets .*got \[\]"),
        ([0], r"at least 2 offsets .*got \[0\]"),
        ([4, 8], "must begin at 0, but slot 0 begins at 4"),
        ([0, 8, 4, 12], "slot 1 begins at 8 and ends at 4"),
        ([0.0, 8.0], "must be integers, got float64"),
        ([False, True], "must be integers, got bool"),
        ([[0, 8]], r"must be 1-D, got shape \[1, 2\]"),
        (8, r"must be 1-D, got shape \[\]"),
    ],
)
def test_bad_offsets_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=f"^my_offsets.*{message}"):
        as_offsets(values, name="my_offsets")


def test_no_integers_are_integers_too():
    assert as_integers([], name="lengths").tolist() == []


def test_real_offsets_must_describe_as_many_slots():
    with pytest.raises(ValueError, match="cu_seqlens describes 1 slots, but cu_seqlens_padded 2"):
        as_real_offsets([0, 3], as_offsets([0, 4, 8]))


def test_real_offsets_must_fit_into_their_slots():
    with pytest.raises(ValueError, match="slot 1 has 4 tokens of room, but cu_seqlens puts 5 real tokens"):
        as_real_offsets([0, 3, 8], as_offsets([0, 4, 8]))
