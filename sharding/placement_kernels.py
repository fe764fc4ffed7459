"""The placing loop of the ``whole_document`` layout, compiled by numba on first use.

In:   slot offsets and the order in which to place slots (``whole_document.py``, with the rule)
Out:  raw runs and the rank of each, in the order they were placed

Shapes: N slots, R ranks, K placed runs.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["place_documents"]


class _Placement(NamedTuple):
    """What the loop writes to; a NamedTuple because numba takes it apart for free."""

    work: Int64Array
    """int64 [R], so far."""
    room: Int64Array
    """int64 [R], tokens left in the share."""
    ranks: Int64Array
    """int64 [K], of each placed run."""
    runs: Int64Array
    """int64 [K, 2]"""
    num_placed: Int64Array
    """int64 [1], K so far."""


@njit(cache=True, nogil=True)
def _work(start: int, stop: int, cost: tuple[int, int]) -> int:
    """``PieceCost.work`` again: numba cannot call a method of a dataclass."""
    pairs = (stop * (stop + 1) - start * (start + 1)) // 2
    return cost[0] * (stop - start) + cost[1] * pairs


@njit(cache=True, nogil=True)
def _put(to: _Placement, rank: int, base: int, start: int, stop: int, cost: tuple[int, int]) -> int:
    """Give ``rank`` what it has room for of [start, stop) of the slot at ``base``; return where that ends."""
    taken: int = min(stop - start, to.room[rank])
    if taken == 0:
        return start
    index = to.num_placed[0]
    to.ranks[index] = rank
    to.runs[index, 0] = base + start
    to.runs[index, 1] = taken
    to.num_placed[0] = index + 1
    to.room[rank] -= taken
    to.work[rank] += _work(start, start + taken, cost)
    return start + taken


@njit(cache=True, nogil=True)
def _put_by_work(to: _Placement, base: int, start: int, stop: int, cost: tuple[int, int]) -> None:
    """Place [start, stop) of the slot at ``base`` on the least busy rank, and the rest on the next."""
    while start < stop:
        best = -1
        for rank in range(len(to.work)):
            if to.room[rank] > 0 and (best < 0 or to.work[rank] < to.work[best]):
                best = rank
        start = _put(to, best, base, start, stop, cost)


@njit(cache=True, nogil=True)
def _put_dual_chunked(
    to: _Placement, base: int, length: int, rests: Int64Array, num_rests: int, cost: tuple[int, int]
) -> int:
    """Place the 2R pieces of a slot; append what shares have no room for to ``rests``."""
    cp_size = len(to.work)
    pieces = 2 * cp_size
    width = length // pieces
    first_wide = pieces - length % pieces
    start = 0
    for piece in range(pieces):
        stop = start + width + (1 if piece >= first_wide else 0)
        rank = piece if piece < cp_size else pieces - 1 - piece
        placed = _put(to, rank, base, start, stop, cost)
        if placed < stop:
            rests[num_rests, 0] = base
            rests[num_rests, 1] = placed
            rests[num_rests, 2] = stop
            num_rests += 1
        start = stop
    return num_rests


@njit(cache=True, nogil=True)
def place_documents(
    offsets: Int64Array,
    order: Int64Array,
    counts: tuple[int, int],
    cp_size: int,
    cost: tuple[int, int],
) -> tuple[Int64Array, Int64Array]:
    """Place every slot on ranks, each of which ends up with T / R tokens.

    Args:
        offsets: slot offsets [N + 1], T a multiple of R.
        order: the slots in placing order [N]: long ones, short ones, empty ones.
        counts: how many slots are long, and how many are not empty.
        cp_size: R.
        cost: work per token and per pair.

    Returns:
        The rank [K] and the run [K, 2] of each placed part.
    """
    num_slots = len(order)
    num_long, num_real = counts
    num_pieces = 2 * cp_size * num_long
    # A cut fills a share, so there are at most R of them beside the pieces that were planned.
    most = num_pieces + num_slots + cp_size
    to = _Placement(
        np.zeros(cp_size, dtype=np.int64),
        np.full(cp_size, offsets[num_slots] // cp_size, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty((most, 2), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )
    rests = np.empty((num_pieces, 3), dtype=np.int64)
    num_rests = 0
    for index in range(num_long):
        base = offsets[order[index]]
        length = offsets[order[index] + 1] - base
        num_rests = _put_dual_chunked(to, base, length, rests, num_rests, cost)
    for index in range(num_rests):
        _put_by_work(to, rests[index, 0], rests[index, 1], rests[index, 2], cost)
    for index in range(num_long, num_slots):
        base = offsets[order[index]]
        stop = offsets[order[index] + 1] - base
        _put_by_work(to, base, 0, stop, cost if index < num_real else (0, 0))
    return to.ranks[: to.num_placed[0]], to.runs[: to.num_placed[0]]
