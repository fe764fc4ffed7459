"""Documents that are longer than a pack, and documents without a token.

In:   ids and lengths in drawing order (``pipeline/planner/draw.py``)
Out:  ``CutDocuments``: pieces that fit a pack, and the documents that lost tokens
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.options import Balance, Overflow

__all__ = ["CutDocuments", "CutRule", "cut_documents"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class CutRule:
    """How documents become pieces."""

    pack_tokens: int
    """The longest piece that a pack takes (a multiple of the pad multiple)."""
    overflow: Overflow
    balance: Balance
    """The strategy that will pack the pieces."""
    max_piece: int | None = None
    """A curriculum's limit: what is kept of a document is cut into pieces of so many tokens."""
    field: str = "pack_tokens"
    """What the user calls ``pack_tokens``."""

    @property
    def longest_piece(self) -> int | None:
        """Return the tokens of the longest piece, None where documents stay whole.

        With ``concat``, ``split`` leaves long documents whole: packs are chopped from the stream anyway, and
        a cut that is no pack border would be one too many.
        """
        if self.overflow is not Overflow.SPLIT or self.balance is Balance.CONCAT:
            return self.max_piece
        return min(self.pack_tokens, self.max_piece or self.pack_tokens)


def cut_documents(ids: Int64, lengths: Int64, rule: CutRule) -> CutDocuments:
    """Apply ``rule`` to D documents.

    Args:
        ids: int64 [D], global ids, for the error message.
        lengths: int64 [D], at least 0.
        rule: which documents stay, and how they are cut.

    Raises:
        ValueError: if a document is too long and the policy is ``error``.
    """
    places = np.flatnonzero(lengths)
    kept = lengths[places]
    empty = np.flatnonzero(lengths == 0)
    shortened = lost = np.empty(0, np.int64)
    long = kept > rule.pack_tokens
    if rule.overflow is not Overflow.SPLIT and long.any():
        shortened = places[long]
        if rule.overflow is Overflow.TRUNCATE:
            lost = kept[long] - rule.pack_tokens
            kept = np.minimum(kept, rule.pack_tokens)
        elif rule.overflow is Overflow.DROP:
            lost = kept[long]
            places, kept = places[~long], kept[~long]
        else:
            first = int(long.argmax())
            raise ValueError(
                f"document {ids[places[first]]} has {kept[first]} tokens, more than "
                f"{rule.field}={rule.pack_tokens}, and overflow=error refuses it; use overflow split, "
                "truncate or drop, or larger packs"
            )
    places, starts, pieces = _cut(places, kept, rule.longest_piece)
    return CutDocuments(places, starts, pieces, empty, shortened, lost)


def _cut(places: Int64, kept: Int64, longest: int | None) -> tuple[Int64, Int64, Int64]:
    """Cut each document into pieces of ``longest`` tokens, and the rest: places, starts and lengths."""
    if longest is None or not (kept > longest).any():
        return places, np.zeros_like(kept), kept
    counts = -(-kept // longest)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(firsts)) - firsts) * longest
    return np.repeat(places, counts), starts, np.minimum(np.repeat(kept, counts) - starts, longest)
