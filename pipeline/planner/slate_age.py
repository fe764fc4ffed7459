"""Old pieces of the pool go first: each takes the place of a younger one that is like it.

In:   long pieces with their places and ages, the packs of the step at hand (``slate_stock.py``)
Out:  the same, changed, before slates are made level (``slate_swaps.py``)
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.slate_stock import (
    GONE,
    IN_POOL,
    TICKS,
    Longs,
    Rules,
    StepPacks,
    Supply,
    exchange,
    waste,
)

__all__ = ["take_old"]

Int64 = NDArray[np.int64]

_FAR = 1 << 60


@njit(cache=True, nogil=True)
def take_old(longs: Longs, packs: StepPacks, rules: Rules, supply: Supply) -> None:
    """Bring old pieces of the pool into the step, each in place of a younger one of nearly its size.

    The older, the less like it the other may be. One that must go and is like none goes into any room that it
    fits, as a short one would leave a hole in place of a long one; only then in place of any other; and at
    last in place of as many as it takes.
    """
    arrived = np.flatnonzero((longs.places != GONE) & (longs.ages >= 0))
    arrived = arrived[np.argsort(-longs.ages[arrived], kind="mergesort")]
    chosen = np.flatnonzero(longs.places >= 0)
    window = rules.window * TICKS
    for turn in range(len(arrived)):
        piece = int(arrived[turn])
        # Asked for each piece in turn: one that an older piece took the place of may take another's.
        if longs.places[piece] != IN_POOL:
            continue
        age = longs.ages[piece]
        limit = rules.plain // 7 * age // window
        if age >= window - TICKS:
            limit = rules.plain // 2
        at = _most_like(piece, chosen, longs, packs, (rules, supply, limit))
        if at < 0 and age >= window:
            pack = _least_room(packs, longs.sizes[piece])
            if pack >= 0:
                exchange(longs, packs, pack, (-1, piece))
                continue
            at = _most_like(piece, chosen, longs, packs, (rules, supply, _FAR))
            if at < 0 and _make_room(piece, longs, packs, rules):
                chosen = np.flatnonzero(longs.places >= 0)
                continue
        if at >= 0:
            other = chosen[at]
            exchange(longs, packs, longs.places[other], (int(other), piece))
            # Kept in order: pieces between the two move up.
            while at + 1 < len(chosen) and chosen[at + 1] < piece:
                chosen[at] = chosen[at + 1]
                at += 1
            while at > 0 and chosen[at - 1] > piece:
                chosen[at] = chosen[at - 1]
                at -= 1
            chosen[at] = piece


@njit(cache=True, nogil=True)
def _least_room(packs: StepPacks, size: int) -> int:
    """Return the pack with the least room that is enough, or -1."""
    best = -1
    for pack in range(len(packs.rooms)):
        if packs.rooms[pack] >= size and (best < 0 or packs.rooms[pack] < packs.rooms[best]):
            best = pack
    return best


@njit(cache=True, nogil=True)
def _make_room(piece: int, longs: Longs, packs: StepPacks, rules: Rules) -> bool:
    """Put a piece where the most room is beside pieces that must go, in place of the others. Is it done?"""
    window = rules.window * TICKS
    room = packs.rooms.copy()
    for j in range(len(longs.places)):
        if longs.places[j] >= 0 and longs.ages[j] < window:
            room[longs.places[j]] += longs.sizes[j]
    pack = int(np.argmax(room))
    if room[pack] < longs.sizes[piece]:
        return False
    for j in range(len(longs.places) - 1, -1, -1):
        if packs.rooms[pack] >= longs.sizes[piece]:
            break
        if longs.places[j] == pack and longs.ages[j] < window:
            exchange(longs, packs, pack, (j, -1))
    exchange(longs, packs, pack, (-1, piece))
    return True


@njit(cache=True, nogil=True)
def _most_like(
    piece: int, chosen: Int64, longs: Longs, packs: StepPacks, terms: tuple[Rules, Supply, int]
) -> int:
    """Return which of ``chosen`` costs nearly as much, is clearly younger, and leaves room enough; or -1."""
    rules, supply, limit = terms
    window = rules.window * TICKS
    age = longs.ages[piece]
    at = int(np.searchsorted(chosen, piece))
    best = -1
    for step in (1, -1):
        i = at if step == 1 else at - 1
        while 0 <= i < len(chosen):
            other = chosen[i]
            differ = abs(longs.extras[piece] - longs.extras[other])
            if differ >= limit:
                break
            younger = longs.ages[other] < (window if age >= window else age - window // 5)
            less = longs.sizes[other] - longs.sizes[piece]
            if younger and -less <= packs.rooms[longs.places[other]]:
                differ += waste(less, rules, supply)
                if differ < limit:
                    best, limit = i, differ
            i += step
    return best
