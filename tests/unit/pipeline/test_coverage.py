"""Exactly once over an epoch (L3), with each way to break it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.pipeline.coverage import Expected, coverage_faults
from ringfeed.pipeline.step_packs import Pieces


def pieces(*rows):
    """Pieces from (document, start, length, epoch) rows."""
    documents, starts, lengths, epochs = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return Pieces(documents, starts, lengths, epochs.astype(np.int32))


def expected(lengths, *, num_epochs=1, lost=None, first_document=0):
    lengths = np.array(lengths, dtype=np.int64)
    lost = np.zeros((num_epochs, len(lengths)), np.int64) if lost is None else np.array(lost)
    return Expected(first_document=first_document, lengths=lengths, num_epochs=num_epochs, lost=lost)


def test_whole_and_split_documents_in_any_order_are_covered():
    assert coverage_faults(pieces((1, 4, 3, 0), (0, 0, 5, 0), (1, 0, 4, 0)), expected([5, 7])) == []


def test_a_missing_document_is_named():
    [fault] = coverage_faults(pieces((7, 0, 5, 0)), expected([5, 7], first_document=7))
    assert fault.startswith("document 8 in epoch 0: its pieces reach token 0, they must reach 7")


def test_a_hole_is_named():
    [fault] = coverage_faults(pieces((0, 0, 2, 0), (0, 3, 4, 0)), expected([7]))
    assert fault == "document 0 in epoch 0: tokens 2 to 2 are missing"


def test_a_doubled_document_is_named():
    faults = coverage_faults(pieces((0, 0, 7, 0), (0, 0, 7, 0)), expected([7]))
    assert faults == ["document 0 in epoch 0: tokens 0 to 6 are there twice"]


def test_an_overlap_is_named():
    assert coverage_faults(pieces((0, 0, 4, 0), (0, 3, 4, 0)), expected([7])) == [
        "document 0 in epoch 0: tokens 3 to 3 are there twice"
    ]


def test_epochs_count_apart():
    once = pieces((0, 0, 7, 0))
    assert len(coverage_faults(once, expected([7], num_epochs=2))) == 1
    assert coverage_faults(pieces((0, 0, 7, 0), (0, 0, 7, 1)), expected([7], num_epochs=2)) == []


def test_what_was_given_up_must_be_missing_and_no_more():
    assert coverage_faults(pieces((0, 0, 4, 0)), expected([7, 9], lost=[[3, 9]])) == []
    assert len(coverage_faults(pieces((0, 0, 3, 0)), expected([7], lost=[[3]]))) == 1
    assert len(coverage_faults(pieces((0, 0, 7, 0)), expected([7], lost=[[3]]))) == 1


def test_a_piece_of_no_document_is_named():
    [fault] = coverage_faults(pieces((3, 0, 1, 0)), expected([1]))
    assert fault == "document 3 in epoch 0 does not exist"


def test_empty_documents_need_no_piece():
    assert coverage_faults(pieces((1, 0, 1, 0)), expected([0, 1])) == []


@given(
    cuts=st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=6),
    data=st.data(),
)
def test_any_cut_is_accepted_and_any_loss_of_a_piece_is_found(cuts, data):
    rows = [
        (document, sum(lengths[:i]), length, 0)
        for document, lengths in enumerate(cuts)
        for i, length in enumerate(lengths)
    ]
    rows = data.draw(st.permutations(rows))
    wanted = expected([sum(lengths) for lengths in cuts])
    assert coverage_faults(pieces(*rows), wanted) == []
    if rows:
        assert coverage_faults(pieces(*rows[1:]), wanted)
        assert coverage_faults(pieces(*rows, rows[0]), wanted)
