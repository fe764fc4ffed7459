"""Labels of depth k against a walk over each piece, token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.mtp import mtp_labels, shift_within_pieces, supervised_by_depth
from ringfeed.sharding.padding import slot_offsets

IGNORE = -100


def chunk(lengths, *, multiple=4, tail=8, goes_on=(), masked=()):
    """Offsets and next-token labels of pieces of one document each, 1000 * piece + place."""
    footprint = sum(-(-n // multiple) * multiple for n in lengths)
    offsets = slot_offsets(lengths, multiple=multiple, total=footprint + tail)
    labels = np.full(footprint + tail, IGNORE)
    for piece, (start, n) in enumerate(zip(offsets.cu_seqlens_padded, lengths, strict=False)):
        # A piece that its document goes on after has a label for its last token, too.
        for place in range(n if piece in goes_on else n - 1):
            labels[start + place] = IGNORE if (piece, place) in masked else 1000 * piece + place + 1
    return offsets, labels


def slow(labels, offsets, depth):
    out = []
    real = np.diff(offsets.cu_seqlens)
    for slot, (start, stop) in enumerate(
        zip(offsets.cu_seqlens_padded[:-1], offsets.cu_seqlens_padded[1:], strict=True)
    ):
        of_piece = labels[start : start + real[slot]].tolist()
        shifted = of_piece[depth:] + [IGNORE] * min(depth, len(of_piece))
        out += shifted + [IGNORE] * (stop - start - len(shifted))
    return out


@given(
    lengths=st.lists(st.integers(1, 9), max_size=5),
    depth=st.integers(0, 10),
    tail=st.sampled_from([4, 8]),
    goes_on=st.sets(st.integers(0, 4)),
)
def test_labels_of_depth_k_are_k_further_on_in_the_piece(lengths, depth, tail, goes_on):
    offsets, labels = chunk(lengths, tail=tail, goes_on=goes_on)

    made = mtp_labels(labels, offsets.cu_seqlens, offsets.cu_seqlens_padded, depth=depth)

    assert made.tolist() == slow(labels, offsets, depth)
    tensor = torch.from_numpy(labels)
    by_torch = mtp_labels(tensor, offsets.cu_seqlens, offsets.cu_seqlens_padded, depth=depth)
    assert by_torch.dtype == torch.int64
    assert by_torch.tolist() == made.tolist()


def test_worked_on_paper():
    # Three tokens of a document that goes on, one whole document of two, padding after each.
    labels = np.array([11, 12, 13, IGNORE, 22, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE])
    real, slots = [0, 3, 5, 5], [0, 4, 8, 10]

    first, second, third = (mtp_labels(labels, real, slots, depth=depth).tolist() for depth in (1, 2, 3))

    assert first == [12, 13, *[IGNORE] * 8]
    assert second == [13, *[IGNORE] * 9]
    assert third == [IGNORE] * 10


def test_a_masked_label_stays_masked_for_whoever_looks_at_it():
    offsets, labels = chunk([6], masked=[(0, 2)])

    made = mtp_labels(labels, offsets.cu_seqlens, offsets.cu_seqlens_padded, depth=1)

    assert made[:6].tolist() == [2, IGNORE, 4, 5, IGNORE, IGNORE]


def test_no_label_comes_from_another_piece_or_from_padding():
    offsets, labels = chunk([3, 5, 1, 8], goes_on={0, 3})
    for depth in range(9):
        made = mtp_labels(labels, offsets.cu_seqlens, offsets.cu_seqlens_padded, depth=depth)
        for piece, (start, stop) in enumerate(
            zip(offsets.cu_seqlens_padded[:-1], offsets.cu_seqlens_padded[1:], strict=True)
        ):
            found = made[start:stop]
            assert set(found[found != IGNORE] // 1000) <= {piece}


def test_the_input_is_left_alone_and_other_dims_and_gradients_work():
    offsets, _ = chunk([3, 2], tail=0)
    x = torch.arange(16, dtype=torch.float32).reshape(2, 8).requires_grad_()

    out = shift_within_pieces(x, offsets.cu_seqlens, offsets.cu_seqlens_padded, by=1, fill=-1.0, dim=-1)
    out.sum().backward()

    assert out[1].tolist() == [9, 10, -1, -1, 13, -1, -1, -1]
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 1, 1, 0, 0, 1, 0, 0]] * 2
    array = x.detach().numpy()
    by_numpy = shift_within_pieces(
        array, offsets.cu_seqlens, offsets.cu_seqlens_padded, by=1, fill=-1, dim=-1
    )
    np.testing.assert_array_equal(by_numpy, out.detach().numpy())


def test_refuses_what_cannot_be():
    with pytest.raises(ValueError, match=r"by, or depth, must be at least 0, got -1"):
        mtp_labels(np.zeros(4, dtype=int), [0, 4], [0, 4], depth=-1)
    with pytest.raises(ValueError, match=r"x has shape \[3\], cu_seqlens_padded covers 4 tokens in dim 0"):
        mtp_labels(np.zeros(3, dtype=int), [0, 4], [0, 4], depth=1)


@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    goes_on=st.sets(st.integers(0, 4)),
    masked=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 8))),
    cut=st.integers(0, 48),
)
def test_counts_of_all_depths_are_those_of_the_labels_made(lengths, goes_on, masked, cut):
    offsets, labels = chunk(lengths, goes_on=goes_on, masked=masked)
    where = (offsets.cu_seqlens, offsets.cu_seqlens_padded)
    expected = [int((mtp_labels(labels, *where, depth=k) != IGNORE).sum()) for k in range(11)]

    counts = supervised_by_depth(labels, *where, num_depths=11)

    assert counts.dtype == np.int64
    assert counts.tolist() == expected
    assert supervised_by_depth(torch.from_numpy(labels), *where, num_depths=11).tolist() == expected
    # Each part of the chunk counts its own labels.
    shuffled = np.random.default_rng(0).permutation(len(labels))
    parts = [shuffled[:cut], shuffled[cut:]]
    found = [supervised_by_depth(labels[p], *where, num_depths=11, positions=p) for p in parts]
    assert sum(found).tolist() == expected


def test_counts_refuse_what_cannot_be():
    labels = np.zeros(4, dtype=int)
    with pytest.raises(ValueError, match=r"num_depths must be at least 1 .*, got 0"):
        supervised_by_depth(labels, [0, 4], [0, 4], num_depths=0)
    with pytest.raises(ValueError, match=r"labels have shape \[4\], but there are 3 positions"):
        supervised_by_depth(labels, [0, 4], [0, 4], num_depths=1, positions=[0, 1, 2])
