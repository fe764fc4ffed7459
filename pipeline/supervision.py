"""How many labels of a piece are trained on: the one place that counts them.

In:   lengths of documents, and the pieces cut from them (``planner/``, ``views.py``)
Out:  supervised tokens per piece

Labels are next-token labels made on whole documents. A document of n tokens has n - 1 of them,
since its last token has nothing after it. A piece that its document goes on after keeps the
label of its last token (``next``) or does without it (``ignore``).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["BOUNDARY_LABELS", "supervised_tokens"]

BOUNDARY_LABELS = ("next", "ignore")


def supervised_tokens(
    document_lengths: ArrayLike, starts: ArrayLike, lengths: ArrayLike, *, boundary: str
) -> NDArray[np.int64]:
    """Return the supervised tokens of each piece, for documents without a mask.

    Args:
        document_lengths: int [P], tokens of the whole document that each piece is cut from.
        starts: int [P], first token of the piece in its document.
        lengths: int [P], tokens of the piece; 0 is legal and has none.
        boundary: ``next``: the last label of a piece is the document's next token, if there is
            one. ``ignore``: a piece's last token has no label.

    Returns:
        int64 [P].

    Raises:
        ValueError: for another ``boundary``.
    """
    if boundary not in BOUNDARY_LABELS:
        raise ValueError(f"boundary_label={boundary!r}: must be one of {', '.join(BOUNDARY_LABELS)}")
    of_document = np.asarray(document_lengths, dtype=np.int64)
    start = np.asarray(starts, dtype=np.int64)
    length = np.asarray(lengths, dtype=np.int64)
    if boundary == "ignore":
        return np.maximum(length - 1, 0)
    goes_on = start + length < of_document
    counted: NDArray[np.int64] = np.where(length > 0, length - 1 + goes_on, 0)
    return counted
