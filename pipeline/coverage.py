"""Law L3 as arithmetic: over an epoch no token of a document is lost or doubled.

In:   all pieces of some documents, in any order, and the tokens that a plan says it lost
Out:  one line per document that is not covered exactly

Shapes: P pieces, D documents, whose ids are ``first_document`` to ``first_document`` + D - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.step_packs import Pieces

__all__ = ["Demand", "Expected", "coverage_faults"]


class Demand(IntEnum):
    """What is expected of a document in an epoch."""

    MUST_NOT_BE = 0
    """It was not drawn."""
    MAY_BE = 1
    """It was drawn for steps that the plan may not have: some of it, or nothing, may be there."""
    MUST_BE = 2
    """All of it must be there."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expected:
    """What the pieces of D documents must come to."""

    first_document: int
    lengths: npt.NDArray[np.int64]
    """int64 [D]"""
    num_epochs: int
    lost: npt.NDArray[np.int64]
    """int64 [num_epochs, D], tokens that were dropped or truncated on purpose."""
    demand: npt.NDArray[np.int8] | None = None
    """int8 [num_epochs, D], a ``Demand`` each; None asks for all of all."""


def coverage_faults(pieces: Pieces, expected: Expected) -> list[str]:
    """Return what is wrong with ``pieces``, which must be all pieces of the expected documents.

    The pieces of a document that must be there, put in order, begin at 0, touch each other, and reach the
    document's length less what was lost.
    """
    local = pieces.documents - expected.first_document
    num_documents = len(expected.lengths)
    strange = np.flatnonzero(
        (local < 0) | (local >= num_documents) | (pieces.epochs < 0) | (pieces.epochs >= expected.num_epochs)
    )
    if len(strange):
        i = int(strange[0])
        return [f"document {pieces.documents[i]} in epoch {pieces.epochs[i]} does not exist"]
    keys = pieces.epochs.astype(np.int64) * num_documents + local
    order = np.lexsort((pieces.starts, keys))
    keys, starts = keys[order], pieces.starts[order]
    ends = starts + pieces.lengths[order]
    demand = np.full(expected.num_epochs * num_documents, Demand.MUST_BE, dtype=np.int8)
    if expected.demand is not None:
        demand = expected.demand.reshape(-1)
    faults = _seam_faults(keys, starts, ends, demand, expected)
    reached = np.zeros(expected.num_epochs * num_documents, dtype=np.int64)
    np.maximum.at(reached, keys, ends)
    wanted = (expected.lengths[None, :] - expected.lost).reshape(-1)
    unasked = np.flatnonzero((demand == Demand.MUST_NOT_BE) & (reached > 0))
    for key in unasked.tolist():
        epoch, document = divmod(key, num_documents)
        faults.append(f"document {document + expected.first_document} in epoch {epoch} was never drawn")
    short = (demand == Demand.MUST_BE) & (reached != wanted)
    long = (demand == Demand.MAY_BE) & (reached > wanted)
    for key in np.flatnonzero(short | long).tolist():
        epoch, document = divmod(key, num_documents)
        faults.append(
            f"document {document + expected.first_document} in epoch {epoch}: its pieces reach token "
            f"{reached[key]}, they must reach {wanted[key]} ({expected.lengths[document]} tokens, "
            f"{expected.lost[epoch, document]} given up)"
        )
    return faults


def _seam_faults(
    keys: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    demand: npt.NDArray[np.int8],
    expected: Expected,
) -> list[str]:
    """Return the places where sorted pieces of one document in one epoch do not touch."""
    before = np.zeros_like(ends)
    before[1:] = np.where(keys[1:] == keys[:-1], ends[:-1], 0)
    # A document that may be missing may be missing in part.
    holes = (starts > before) & (demand[keys] != Demand.MAY_BE)
    faults = []
    for i in np.flatnonzero(holes | (starts < before)).tolist():
        epoch, document = divmod(int(keys[i]), len(expected.lengths))
        what = "are missing" if starts[i] > before[i] else "are there twice"
        low, high = sorted((int(starts[i]), int(before[i])))
        faults.append(
            f"document {document + expected.first_document} in epoch {epoch}: "
            f"tokens {low} to {high - 1} {what}"
        )
    return faults
