"""How many labels of a piece are trained on."""

import numpy as np
import pytest

from ringfeed.pipeline.supervision import supervised_tokens


def labels_of(document_length, start, length, boundary):
    """Count labels one by one, as they are made."""
    count = 0
    for token in range(start, start + length):
        has_next = token + 1 < document_length
        is_last_of_piece = token + 1 == start + length
        count += has_next and not (is_last_of_piece and boundary == "ignore")
    return count


@pytest.mark.parametrize("boundary", ["next", "ignore"])
def test_every_piece_of_short_documents_is_counted_right(boundary):
    cases = [(n, a, b - a) for n in range(6) for a in range(n + 1) for b in range(a, n + 1)]
    documents, starts, lengths = (np.array(column) for column in zip(*cases, strict=True))

    counted = supervised_tokens(documents, starts, lengths, boundary=boundary)

    assert counted.dtype == np.int64
    assert counted.tolist() == [labels_of(*case, boundary) for case in cases]


def test_an_unmasked_document_has_one_label_less_than_tokens():
    assert supervised_tokens([1, 2, 9], [0, 0, 0], [1, 2, 9], boundary="next").tolist() == [0, 1, 8]


def test_another_boundary_is_refused():
    with pytest.raises(ValueError, match="boundary_label='keep': must be one of next, ignore"):
        supervised_tokens([1], [0], [1], boundary="keep")
