"""A pool of pieces made into packs, and what every strategy gives back.

In:   ``StreamPieces`` (``stream.py``): pieces carried over from the window before, then new ones
Out:  ``Packing``: pieces in pack order, and those to carry on

Packs of a window stand near the order in which documents arrived, never sorted by length: steps cut from
them are alike.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.stream import StreamPieces

__all__ = ["Packing", "Pool", "group_by_pack"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Pieces to pack in one window, in arrival order."""

    stream: StreamPieces
    num_carried: int
    """The first so many were carried over from the window before."""
    final: bool
    """Nothing comes after: every piece must be packed now."""
    first_step: int = 0
    """Of the window."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Packs of whole steps, in plan order."""

    packed: StreamPieces
    """Pieces in (pack, slot) order."""
    offsets: Int64
    """int64 [K + 1], pack k owns pieces offsets[k] to offsets[k + 1]."""
    carried: StreamPieces
    """Pieces left for the next window, in arrival order."""
    slates: NDArray[np.int32] | None = None
    """int32 [K], slate of each pack within its step; None: packs of like cost (``rows.py``)."""


@njit(cache=True, nogil=True)
def group_by_pack(packs: Int64, ranks: Int64, num_kept: int) -> tuple[Int64, Int64, Int64]:
    """Sort pieces by the place of their pack; pieces of a pack stay in arrival order.

    Args:
        packs: int64 [P], pack of each piece.
        ranks: int64 [B], place of each pack in the plan, or -1 to carry its pieces on.
        num_kept: K, how many packs have a place.

    Returns:
        int64 [Q] indices of placed pieces; int64 [K + 1] offsets of the packs; int64 [P - Q] the others.
    """
    offsets = np.zeros(num_kept + 1, np.int64)
    num_left = 0
    for pack in packs:
        if ranks[pack] >= 0:
            offsets[ranks[pack] + 1] += 1
        else:
            num_left += 1
    for k in range(num_kept):
        offsets[k + 1] += offsets[k]
    ends = offsets[:-1].copy()
    order = np.empty(len(packs) - num_left, np.int64)
    left = np.empty(num_left, np.int64)
    num_left = 0
    for i in range(len(packs)):
        rank = ranks[packs[i]]
        if rank >= 0:
            order[ends[rank]] = i
            ends[rank] += 1
        else:
            left[num_left] = i
            num_left += 1
    return order, offsets, left
