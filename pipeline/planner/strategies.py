"""How a pool of pieces becomes packs: balanced work, best fit, next fit, concatenate and chop, or as given.

In:   a ``Pool`` of at least one window's slots (``packing.py``)
Out:  a ``Packing`` of whole steps; the rest is carried to the next window

``work`` has its own module (``slates.py``).

``best_fit``: pieces carried over are placed first, longest first, then new ones, longest first, each into
the fullest pack that has room. Packs that hold a carried piece are kept first (oldest piece first), then the
fullest ones, as many as the window has; the pieces of the others are carried. So a piece is carried once, or
a few times where the window is a pack or two, and never starves. Kept packs stand in this order: those with
carried pieces by their oldest piece, then the others by the arrival of the piece that opened them, their
longest. So steps are near arrival order, and no step is made of long documents because it comes early.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.arrival import note_arrival_steps
from ringfeed.pipeline.planner.best_fit import best_fit_decreasing, descending_order
from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.given import packs_of_rows
from ringfeed.pipeline.planner.options import Balance
from ringfeed.pipeline.planner.packing import Packing, Pool, Shape, group_by_pack
from ringfeed.pipeline.planner.slates import pack_slates
from ringfeed.pipeline.planner.stream import StreamPieces
from ringfeed.pipeline.step_packs import Pieces

__all__ = ["Strategy", "strategy_for"]

Int64 = NDArray[np.int64]


Strategy = Callable[[Pool, Shape], Packing]


def strategy_for(balance: Balance, documents: DocumentTable) -> Strategy:
    """Return the function behind ``balance``, for a plan of ``documents``."""
    if balance is Balance.GIVEN:
        return partial(pack_given, row_starts=documents.row_starts())
    return {
        Balance.WORK: pack_work,
        Balance.BEST_FIT: pack_best_fit,
        Balance.IN_ORDER: pack_in_order,
        Balance.CONCAT: pack_concat,
    }[balance]


def pack_work(pool: Pool, shape: Shape) -> Packing:
    """Pack slates of like cost (``slates.py``).

    The plan's end takes no more packs than by best fit, where that moves no document further than the window.
    """
    packing = pack_slates(pool, shape)
    if pool.final:
        plain = pack_best_fit(pool, shape)
        if len(plain.offsets) < len(packing.offsets) and _stays_in_window(plain, pool, shape):
            return plain
    return packing


def _stays_in_window(packing: Packing, pool: Pool, shape: Shape) -> bool:
    num_packs = len(packing.offsets) - 1
    first_packs = np.append(np.arange(0, num_packs, shape.packs_per_step), num_packs)
    step_slots = shape.packs_per_step * shape.pack_tokens
    noted, _ = note_arrival_steps(packing, first_packs, pool, step_slots=step_slots)
    packs = np.repeat(np.arange(num_packs), np.diff(packing.offsets))
    moved = np.abs(pool.first_step + packs // shape.packs_per_step - noted.packed.arrival_steps)
    return int(moved.max(initial=0)) <= shape.window


def pack_best_fit(pool: Pool, shape: Shape) -> Packing:
    """Pack a window with the least padding; see the module's first lines."""
    stream = pool.stream
    sizes = stream.slots // shape.multiple
    capacity = shape.pack_tokens // shape.multiple
    carried = pool.num_carried
    order = np.concatenate(
        [
            descending_order(sizes[:carried], capacity),
            descending_order(sizes[carried:], capacity) + carried,
        ]
    )
    packs, left, opener = best_fit_decreasing(sizes, order, capacity)
    oldest = np.full(len(left), len(stream), np.int64)
    np.minimum.at(oldest, packs[:carried], np.arange(carried))
    urgent = oldest < carried
    num_kept = len(left) if pool.final else min(len(left), shape.window_packs)
    # By what must go, then by what is fullest; the opener decides between equals.
    choice = np.lexsort((opener, np.where(urgent, oldest, left), ~urgent))[:num_kept]
    kept = choice[np.lexsort((np.where(urgent, oldest, opener)[choice], ~urgent[choice]))]
    return _packing(stream, packs, kept, num_packs=len(left))


def pack_in_order(pool: Pool, shape: Shape) -> Packing:
    """Fill packs in arrival order; a pack ends where the next piece does not fit."""
    packs = next_fit(pool.stream.slots, shape.pack_tokens)
    return _whole_steps(pool, packs, shape)


def pack_concat(pool: Pool, shape: Shape) -> Packing:
    """Chop the stream where packs end. A cut piece fills its pack, so cuts add no padding."""
    stream = pool.stream
    ends = np.cumsum(stream.slots)
    first = (ends - stream.slots) // shape.pack_tokens
    counts = (ends - 1) // shape.pack_tokens - first + 1
    which = np.repeat(np.arange(len(stream)), counts)
    packs = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(len(which))
    # Slot offsets of each part, from the start of its piece.
    begins = np.maximum(packs * shape.pack_tokens - (ends - stream.slots)[which], 0)
    stops = np.minimum((packs + 1) * shape.pack_tokens - (ends - stream.slots)[which], stream.slots[which])
    pieces = stream.pieces
    chopped = StreamPieces(
        Pieces(
            pieces.documents[which],
            pieces.starts[which] + begins,
            np.minimum(stops, pieces.lengths[which]) - begins,
            pieces.epochs[which],
        ),
        stops - begins,
        stream.arrivals[which] + begins,
        np.where(begins == 0, stream.arrival_steps[which], -1),
    )
    return _whole_steps(replace(pool, stream=chopped), packs, shape)


def pack_given(pool: Pool, shape: Shape, *, row_starts: Int64) -> Packing:
    """Make a pack of each row; rows stay in arrival order. They are drawn whole, and fit (``given.py``)."""
    return _whole_steps(pool, packs_of_rows(pool.stream.pieces, row_starts), shape)


@njit(cache=True, nogil=True)
def next_fit(slots: Int64, pack_tokens: int) -> Int64:
    """Return the pack of each piece, int64 [P], opening a new pack where the next piece does not fit."""
    packs = np.empty(len(slots), np.int64)
    pack = 0
    used = np.int64(0)
    for i in range(len(slots)):
        if used + slots[i] > pack_tokens:
            pack += 1
            used = np.int64(0)
        used += slots[i]
        packs[i] = pack
    return packs


def _whole_steps(pool: Pool, packs: Int64, shape: Shape) -> Packing:
    """Keep the packs of full steps in order; the last one may still be open and is carried."""
    num_packs = int(packs[-1]) + 1 if len(packs) else 0
    num_closed = num_packs if pool.final else num_packs - 1
    num_kept = num_closed if pool.final else num_closed // shape.packs_per_step * shape.packs_per_step
    return _packing(pool.stream, packs, np.arange(num_kept), num_packs=num_packs)


def _packing(stream: StreamPieces, packs: Int64, kept: Int64, *, num_packs: int) -> Packing:
    ranks = np.full(num_packs, -1, np.int64)
    ranks[kept] = np.arange(len(kept))
    order, offsets, left = group_by_pack(packs, ranks, len(kept))
    return Packing(stream.take(order), offsets, stream.take(left))
