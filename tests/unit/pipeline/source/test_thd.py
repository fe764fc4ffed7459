"""One pack laid end to end: slots, labels, positions, padding."""

import numpy as np
import pytest

from ringfeed.pipeline.corpus_set import CorpusSet
from ringfeed.pipeline.opening import ViewSpec
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.thd import thd_from_pieces
from ringfeed.sharding.layouts import make_layout

SPEC = {"layout": make_layout("te"), "cp_size": 2, "pack_slots": 32, "multiple": 4, "pad_id": 9}


@pytest.fixture
def lay_out(corpus_path, documents):
    corpora = CorpusSet.open([corpus_path])

    def make(*cuts, skipped=None, **changes):
        """Lay out pieces of document 0, which has at least 20 tokens: (start, length) each."""
        assert len(documents[0]) > 20
        count = len(cuts)
        pieces = Pieces(
            np.zeros(count, dtype=np.int64),
            np.array([start for start, _ in cuts], dtype=np.int64),
            np.array([length for _, length in cuts], dtype=np.int64),
            np.zeros(count, dtype=np.int32),
        )
        return thd_from_pieces(pieces, spec=ViewSpec(**{**SPEC, **changes}), corpora=corpora, skipped=skipped)

    return make


def test_every_piece_gets_its_slot_and_the_rest_is_one_tail(lay_out, documents):
    words = documents[0].tolist()
    chunk = lay_out((0, 5), (5, 8))

    assert chunk.cu_seqlens.tolist() == [0, 5, 13, 13]
    assert chunk.cu_seqlens_padded.tolist() == [0, 8, 16, 32]
    assert chunk.tokens.tolist() == [*words[:5], 9, 9, 9, *words[5:13], *[9] * 16]
    assert chunk.padding_mask.tolist() == [False] * 5 + [True] * 3 + [False] * 8 + [True] * 16


def test_a_piece_that_its_document_goes_on_after_keeps_its_last_label(lay_out, documents):
    words = documents[0].tolist()

    assert lay_out((2, 5)).labels[:6].tolist() == [*words[3:8], -100]
    assert lay_out((2, 5), boundary="ignore").labels[:6].tolist() == [*words[3:7], -100, -100]


def test_the_last_token_of_a_document_has_no_label(lay_out, documents):
    size = len(documents[0])

    assert lay_out((size - 3, 3)).labels[:4].tolist() == [*documents[0][-2:].tolist(), -100, -100]


def test_positions_restart_or_go_on(lay_out):
    assert lay_out((2, 5)).position_ids[:6].tolist() == [0, 1, 2, 3, 4, 0]
    assert lay_out((2, 5), positions="continue").position_ids[:6].tolist() == [2, 3, 4, 5, 6, 0]


def test_a_skipped_piece_keeps_its_slot_without_a_token(lay_out, documents):
    chunk = lay_out((0, 5), (5, 8), skipped=np.array([True, False]))

    assert chunk.cu_seqlens_padded.tolist() == [0, 8, 16, 32]
    assert chunk.cu_seqlens.tolist() == [0, 0, 8, 8]
    assert chunk.tokens[:8].tolist() == [9] * 8
    assert chunk.tokens[8:16].tolist() == documents[0][5:13].tolist()
    assert chunk.documents.tolist() == [0]


def test_a_full_pack_has_no_tail(lay_out):
    assert lay_out((0, 16), (0, 16)).cu_seqlens_padded.tolist() == [0, 16, 32]


def test_no_piece_at_all_is_one_slot_of_padding(lay_out):
    chunk = lay_out()

    assert (chunk.cu_seqlens.tolist(), chunk.cu_seqlens_padded.tolist()) == ([0, 0], [0, 32])


def test_slots_that_do_not_fit_are_refused(lay_out):
    with pytest.raises(ValueError, match="take 36 tokens, 4 more than the pack's 32"):
        lay_out((0, 17), (0, 13))


def test_a_piece_outside_its_document_is_refused(lay_out, documents):
    with pytest.raises(ValueError, match=f"of document 0, which has {len(documents[0])} tokens"):
        lay_out((len(documents[0]) - 3, 4))
