"""How many labels of a piece are trained on: the one place that counts them.

In:   lengths of documents, or their mask runs (``mask_runs.py``), and the pieces cut from them
Out:  supervised tokens per piece (``planner/``, ``plan_source.py``)

Labels are next-token labels made on whole documents. A document of n tokens has n - 1 of them,
since its last token has nothing after it. A piece that its document goes on after keeps the
label of its last token (``next``) or does without it (``ignore``).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["BOUNDARY_LABELS", "supervised_tokens", "target_range"]

BOUNDARY_LABELS = ("next", "ignore")


def target_range(
    document_lengths: ArrayLike, starts: ArrayLike, lengths: ArrayLike, *, boundary: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of its document that each piece's labels ask for, masks left aside.

    Args:
        document_lengths: int [P], tokens of the whole document that each piece is cut from.
        starts: int [P], first token of the piece in its document.
        lengths: int [P], tokens of the piece; 0 is legal and asks for none.
        boundary: ``next``: the last label of a piece is the document's next token, if there is
            one. ``ignore``: a piece's last token has no label.

    Returns:
        int64 [P] twice: offsets of the first one, and of the one after the last.

    Raises:
        ValueError: for another ``boundary``.
    """
    if boundary not in BOUNDARY_LABELS:
        raise ValueError(f"boundary_label={boundary!r}: must be one of {', '.join(BOUNDARY_LABELS)}")
    of_document = np.asarray(document_lengths, dtype=np.int64)
    start = np.asarray(starts, dtype=np.int64)
    end = start + np.asarray(lengths, dtype=np.int64)
    last = np.minimum(end + 1, of_document) if boundary == "next" else end
    # A piece without a token asks for none, though its document may go on.
    stop = np.where(end > start, np.maximum(last, start + 1), start + 1)
    return start + 1, stop


def supervised_tokens(
    document_lengths: ArrayLike, starts: ArrayLike, lengths: ArrayLike, *, boundary: str
) -> NDArray[np.int64]:
    """Return the supervised tokens of each piece, for documents without a mask: int64 [P].

    Arguments and errors are those of ``target_range``.
    """
    first, stop = target_range(document_lengths, starts, lengths, boundary=boundary)
    return np.asarray(stop - first, dtype=np.int64)
