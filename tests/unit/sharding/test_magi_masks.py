import pytest
import torch

from ringfeed.sharding.magi.masks import (
    CausalMask,
    FullMask,
    WindowMask,
    document_mask,
    prefix_tree_slices,
    varlen_slices,
)


def test_a_document_is_one_slice():
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)

    causal = varlen_slices(offsets, mask=CausalMask()).to_tuples()

    assert causal == [(0, 3, 0, 3, "causal"), (3, 3, 3, 3, "causal"), (3, 8, 3, 8, "causal")]
    full = varlen_slices([0, 3], mask=FullMask(), cu_seqlens_k=[0, 5]).to_tuples()
    assert full == [(0, 3, 0, 5, "full")]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        # Ten tokens, two keys back: a first one's keys are cut off at the document's start.
        pytest.param((2, 0), [(0, 2, 0, 2, "causal"), (2, 10, 0, 10, "bi_causal")], id="causal-window"),
        # Wider on both sides than half the document: some tokens in the middle see all of it.
        pytest.param(
            (6, 6),
            [(0, 4, 0, 10, "causal"), (4, 6, 0, 10, "full"), (6, 10, 0, 10, "inv_causal")],
            id="wide",
        ),
        pytest.param((0, -1), [(0, 10, 0, 10, "inv_causal")], id="nothing-back"),
        pytest.param((-1, 0), [(0, 10, 0, 10, "causal")], id="nothing-ahead"),
        pytest.param((99, 99), [(0, 10, 0, 10, "full")], id="wider-than-the-document"),
        pytest.param((9, 9), [(0, 10, 0, 10, "full")], id="as-wide-as-it-matters"),
    ],
)
def test_windows(window, expected):
    slices = varlen_slices([0, 10], mask=WindowMask(*window)).to_tuples()

    left, right = (size if size >= 0 else 99 for size in window)
    pairs = [(q, k) for q in range(10) for k in range(10) if -left <= k - q <= right]
    assert slices == expected
    assert allowed(slices) == pairs


def allowed(slices):
    """Return the pairs of slices by the definition, sorted, each as often as it is allowed."""
    pairs = []
    for q0, q1, k0, k1, kind in slices:
        for q in range(q0, q1):
            for k in range(k0, k1):
                late = kind in ("causal", "bi_causal") and k - k0 > q - q0 + (k1 - k0) - (q1 - q0)
                early = kind in ("inv_causal", "bi_causal") and k - k0 < q - q0
                pairs += [] if late or early else [(q, k)]
    return sorted(pairs)


@pytest.mark.parametrize(
    ("causal", "window", "mask"),
    [
        (True, (-1, -1), CausalMask()),
        (False, (-1, -1), FullMask()),
        (False, (7, 0), WindowMask(7, 0)),
        (False, (-1, 3), WindowMask(-1, 3)),
    ],
)
def test_document_mask_reads_magis_words(causal, window, mask):
    assert document_mask(causal=causal, window=window) == mask


@pytest.mark.parametrize(
    ("causal", "window", "message"),
    [
        (True, (7, 0), r"window=\(7, 0\) needs causal=False"),
        (False, (-2, 0), r"window=\(-2, 0\) must have sides of at least -1"),
    ],
)
def test_windows_that_make_no_sense_are_refused(causal, window, message):
    with pytest.raises(ValueError, match=message):
        document_mask(causal=causal, window=window)


def test_key_offsets_must_have_as_many_documents():
    with pytest.raises(ValueError, match="cu_seqlens_k has 2 offsets, but cu_seqlens 3"):
        varlen_slices([0, 3, 5], mask=CausalMask(), cu_seqlens_k=[0, 5])
    with pytest.raises(ValueError, match="cu_seqlens_k must not fall"):
        varlen_slices([0, 3, 5], mask=CausalMask(), cu_seqlens_k=[0, 5, 4])


def test_a_shared_prefix_is_one_node_that_its_samples_see_in_full():
    # A root of 4 tokens; two samples go on from it, one of them with a leaf of its own.
    slices = prefix_tree_slices([4, 2, 3, 5], [[0, 1], [0, 2, 3]]).to_tuples()

    assert slices == [
        (0, 4, 0, 4, "causal"),
        (4, 6, 4, 6, "causal"),
        (4, 6, 0, 4, "full"),
        (6, 9, 6, 9, "causal"),
        (6, 9, 0, 4, "full"),
        (9, 14, 9, 14, "causal"),
        (9, 14, 0, 4, "full"),
        (9, 14, 6, 9, "full"),
    ]


@pytest.mark.parametrize(
    ("lengths", "paths", "message"),
    [
        ([4, 2], [[0, 2]], r"sample_paths\[0\] names node 2; nodes are 0 to 1"),
        ([4, 2], [[0], [1, 1]], r"sample_paths\[1\] names node 1; .* at most once"),
        ([4, 2, 1], [[0, 2], [1, 2]], r"node 2 has prefix \[1\] in sample 1, but \[0\] before"),
        ([4, -2], [[0]], "node_lengths must be at least 0, got -2"),
    ],
)
def test_what_is_no_tree_is_refused(lengths, paths, message):
    with pytest.raises(ValueError, match=message):
        prefix_tree_slices(lengths, paths)
