"""Which pack of a step a piece goes to: that of the rank with the least work.

In:   members of a step (``variable_steps.py``)
Out:  the pack of each

A rank's packs lie in different rows, and a row is a micro-batch: all ranks wait for the largest pack of a
row. So a piece goes to the rank with the least work in the step, there to a pack that stays below the peak of
its row, where more work keeps nobody waiting, or else to the pack with the least work.

Shapes: Q members, K packs, R ranks, M = K / R rows.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.variable_rules import LEFT, Int64, PoolPieces, StepRules

__all__ = ["Packs", "bucket_limits", "find_pack", "new_packs", "place", "place_in_order", "put"]

Flags = NDArray[np.bool_]

_MANY = 1 << 62


class Packs(NamedTuple):
    """The packs of one step while they are filled; all arrays are changed in place."""

    used: Int64
    """int64 [K], slots taken."""
    works: Int64
    """int64 [K]"""
    limits: Int64
    """int64 [K], slots that each may take."""
    loads: Int64
    """int64 [R], work of each rank."""
    peaks: Int64
    """int64 [M], the largest work in each row."""


@njit(cache=True, nogil=True)
def new_packs(limits: Int64, rules: StepRules) -> Packs:
    """Return empty packs that may take ``limits`` slots, int64 [K]."""
    return Packs(
        np.zeros(rules.packs, np.int64),
        np.zeros(rules.packs, np.int64),
        limits,
        np.zeros(rules.ranks, np.int64),
        np.zeros(rules.packs // rules.ranks, np.int64),
    )


@njit(cache=True, nogil=True)
def put(packs: Packs, pack: int, size: int, cost: int) -> None:
    """Put a piece into ``pack``."""
    ranks = len(packs.loads)
    packs.used[pack] += size
    packs.works[pack] += cost
    packs.loads[pack % ranks] += cost
    packs.peaks[pack // ranks] = max(packs.peaks[pack // ranks], packs.works[pack])


@njit(cache=True, nogil=True)
def find_pack(packs: Packs, size: int, cost: int, budget: int, most_used: int) -> int:
    """Return the pack for a piece by the rule above, -1 if none has room.

    Args:
        packs: of the step.
        size: slots of the piece.
        cost: of the piece.
        budget: work of a pack at most.
        most_used: look at packs alone that have no more slots taken; with 0, at empty ones.
    """
    ranks = len(packs.loads)
    tried = np.zeros(ranks, np.bool_)
    for _ in range(ranks):
        rank = -1
        for other in range(ranks):
            if not tried[other] and (rank < 0 or packs.loads[other] < packs.loads[rank]):
                rank = other
        tried[rank] = True
        best, most = -1, np.int64(0)
        for row in range(len(packs.peaks)):
            pack = row * ranks + rank
            used = packs.used[pack]
            if used > min(most_used, packs.limits[pack] - size) or packs.works[pack] + cost > budget:
                continue
            slack = packs.peaks[row] - packs.works[pack] - cost
            if slack < 0:
                slack = -packs.works[pack] - _MANY
            if best < 0 or slack > most:
                best, most = pack, slack
        if best >= 0:
            return best
    return -1


@njit(cache=True, nogil=True)
def place(
    pool: PoolPieces, members: Int64, is_kept: Flags, packs: Packs, rules: StepRules
) -> tuple[Int64, int]:
    """Place the kept members into empty ``packs``, those that cost most first.

    Returns:
        int64 [Q], the pack of each member, ``LEFT`` for none; the slots of kept ones that found no room.
    """
    where = np.full(len(members), LEFT, np.int64)
    num_left, num_empty, lacking = int(is_kept.sum()), rules.packs, 0
    for turn in np.argsort(-pool.costs[members], kind="mergesort"):
        if not is_kept[turn]:
            continue
        size, cost = pool.slots[members[turn]], pool.costs[members[turn]]
        # No pack may stay empty: the last pieces go where there is none.
        most_used = 0 if num_left <= num_empty else rules.capacity
        pack = find_pack(packs, size, cost, rules.budget, most_used)
        num_left -= 1
        if pack < 0:
            lacking += size
            continue
        num_empty -= packs.used[pack] == 0
        where[turn] = pack
        put(packs, pack, size, cost)
    return where, lacking


@njit(cache=True, nogil=True)
def place_in_order(pool: PoolPieces, members: Int64, packs: Packs, rules: StepRules) -> Int64:
    """Give each of the first K members a pack of its own, then the next ones room, until one finds none.

    Every piece fits an empty pack, so that this always makes a step.

    Returns:
        int64 [Q], the pack of each member, ``LEFT`` from the one on that found no room.
    """
    where = np.full(len(members), LEFT, np.int64)
    for turn in range(len(members)):
        size, cost = pool.slots[members[turn]], pool.costs[members[turn]]
        pack = turn if turn < rules.packs else find_pack(packs, size, cost, rules.budget, rules.capacity)
        if pack < 0:
            break
        where[turn] = pack
        put(packs, pack, size, cost)
    return where


@njit(cache=True, nogil=True)
def bucket_limits(pool: PoolPieces, members: Int64, where: Int64, packs: Packs, rules: StepRules) -> Int64:
    """Return a bucket for each pack: int64 [K].

    It is the next one above or below what the pack has, whichever keeps the slots of its rank closer to what
    they are, and holds its largest piece.
    """
    largest = np.zeros(rules.packs, np.int64)
    for turn in range(len(members)):
        if where[turn] != LEFT:
            largest[where[turn]] = max(largest[where[turn]], pool.slots[members[turn]])
    limits = np.empty(rules.packs, np.int64)
    apart = np.zeros(rules.ranks, np.int64)
    for pack in range(rules.packs):
        used = packs.used[pack]
        found = np.searchsorted(rules.buckets, used)
        above, below = rules.buckets[found], rules.buckets[max(found - 1, 0)]
        rank = pack % rules.ranks
        is_closer = abs(apart[rank] + below - used) < abs(apart[rank] + above - used)
        limits[pack] = below if is_closer and largest[pack] <= below else above
        apart[rank] += limits[pack] - used
    return limits
