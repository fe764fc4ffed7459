"""Documents that are longer than a pack, and documents without a token.

In:   ids and lengths in drawing order (``pipeline/planner/draw.py``)
Out:  ``CutDocuments``: pieces that fit a pack, and the documents that lost tokens
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.options import Balance, Overflow

__all__ = ["CutDocuments", "cut_documents"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CutDocuments:
    """Pieces of D drawn documents, in drawing order. P pieces."""

    places: Int64
    """int64 [P], which of the D documents each piece is cut from; ascending."""
    starts: Int64
    """int64 [P]"""
    lengths: Int64
    """int64 [P], at least 1."""
    empty: Int64
    """int64, places of documents without a token: skipped."""
    shortened: Int64
    """int64, places of documents that lost tokens: truncated, or dropped whole."""
    lost: Int64
    """int64, tokens that each of ``shortened`` lost."""


def cut_documents(
    ids: Int64, lengths: Int64, *, pack_tokens: int, overflow: Overflow, balance: Balance
) -> CutDocuments:
    """Apply the overflow policy to D documents.

    With ``concat``, ``split`` leaves long documents whole: packs are chopped from the stream anyway, and a
    cut that is no pack border would be one too many.

    Args:
        ids: int64 [D], global ids, for the error message.
        lengths: int64 [D], at least 0.
        pack_tokens: the longest piece that fits a pack (a multiple of the pad multiple).
        overflow: the policy.
        balance: the strategy that will pack the pieces.

    Raises:
        ValueError: if a document is too long and the policy is ``error``.
    """
    places = np.flatnonzero(lengths)
    kept = lengths[places]
    empty = np.flatnonzero(lengths == 0)
    nothing = np.empty(0, np.int64)
    long = kept > pack_tokens
    if not long.any() or (overflow is Overflow.SPLIT and balance is Balance.CONCAT):
        return CutDocuments(places, np.zeros_like(kept), kept, empty, nothing, nothing)
    if overflow is Overflow.SPLIT:
        return _split(places, kept, empty, pack_tokens)
    if overflow is Overflow.TRUNCATE:
        shortened, lost = places[long], kept[long] - pack_tokens
        return CutDocuments(
            places, np.zeros_like(kept), np.minimum(kept, pack_tokens), empty, shortened, lost
        )
    if overflow is Overflow.DROP:
        shortened, lost = places[long], kept[long]
        return CutDocuments(
            places[~long], np.zeros(int((~long).sum()), np.int64), kept[~long], empty, shortened, lost
        )
    first = int(long.argmax())
    raise ValueError(
        f"document {ids[places[first]]} has {kept[first]} tokens, more than pack_tokens={pack_tokens}, and "
        "overflow=error refuses it; use overflow split, truncate or drop, or larger packs"
    )


def _split(places: Int64, kept: Int64, empty: Int64, pack_tokens: int) -> CutDocuments:
    """Cut each document into pieces of a pack, and the rest."""
    counts = -(-kept // pack_tokens)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(firsts)) - firsts) * pack_tokens
    pieces = np.minimum(np.repeat(kept, counts) - starts, pack_tokens)
    nothing = np.empty(0, np.int64)
    return CutDocuments(np.repeat(places, counts), starts, pieces, empty, nothing, nothing)
