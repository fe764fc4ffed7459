"""Short pieces fill the packs of a step: the larger ones where a rank lacks work, the rest in their order.

In:   short pieces in arrival order (``slate_stock.py``), packs with their room (``slate_swaps.py``)
Out:  the pack of each piece that is placed

Pieces that arrive first are placed first. Of those that the step has room for, medium ones go, largest first,
to the rank with the least cost, to the pack of it that costs least beside the others of its slate. The others
follow as they arrived, pack after pack, and what is left of a pack is closed with the largest pieces that
fit. Where short pieces are too few for all room, each step gets its share, and all of them go by cost.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.best_fit import descending_order
from ringfeed.pipeline.planner.slate_stock import (
    GONE,
    IN_POOL,
    TICKS,
    Rules,
    StepPacks,
    Stock,
    Supply,
)

__all__ = ["due_units", "fill_packs", "fill_the_empty"]

Int64 = NDArray[np.int64]
Bits = NDArray[np.uint64]

_AHEAD = 2
"""How many times the step's room is looked through for pieces that close a pack."""


class _Sizes(NamedTuple):
    """Short pieces by size: for each size a stack, the first to arrive on top."""

    top: Int64
    below: Int64
    words: Bits
    """Bit s is set where the stack of size s is not empty."""


@njit(cache=True, nogil=True)
def due_units(stock: Stock, rules: Rules, ticks: int) -> int:
    """Return the units of short pieces that arrive before so many ticks from now, a step's at most."""
    shorts = stock.shorts
    step_units = rules.packs * rules.capacity
    until = stock.clock[1] + step_units * ticks // TICKS
    units = 0
    for i in range(stock.clock[3], len(shorts.sizes)):
        if shorts.arrivals[i] >= until or units >= step_units:
            break
        if shorts.packs[i] == IN_POOL:
            units += shorts.sizes[i]
    return units


def fill_packs(stock: Stock, packs: StepPacks, rules: Rules, supply: Supply) -> None:
    """Place short pieces in the packs of the step."""
    room = int(packs.rooms.sum())
    scarce = supply.share < 1024
    least = 0 if scarce else rules.medium_units
    by_cost = _first_pieces(stock, room * supply.share // 1024, least)
    by_cost = by_cost[descending_order(stock.shorts.sizes[by_cost], rules.long_units)]
    _place_by_cost(stock, packs, by_cost, rules, supply)
    if not scarce:
        _place_in_order(stock, packs, rules, _end_of(stock, _AHEAD * room + rules.capacity))


@njit(cache=True, nogil=True)
def _first_pieces(stock: Stock, units: int, least: int) -> Int64:
    """Return those of the first ``units`` of short pieces that are no smaller than ``least``."""
    shorts = stock.shorts
    found = np.empty(len(shorts.sizes) - stock.clock[3], np.int64)
    count, taken = 0, 0
    for i in range(stock.clock[3], len(shorts.sizes)):
        if shorts.packs[i] != IN_POOL:
            continue
        taken += shorts.sizes[i]
        if taken > units:
            break
        if shorts.sizes[i] >= least:
            found[count] = i
            count += 1
    return found[:count]


@njit(cache=True, nogil=True)
def _place_by_cost(stock: Stock, packs: StepPacks, pieces: Int64, rules: Rules, supply: Supply) -> None:
    """Place each piece with the rank that has the least cost, in the cheapest of its packs with room."""
    num_ranks = len(packs.loads)
    slates = np.arange(len(packs.rooms)) // rules.slate
    dearest = np.zeros(slates[-1] + 1, np.int64)
    by_rank = np.full((num_ranks, slates[-1] + 1), -1, np.int64)
    most_room = np.full(num_ranks, -1, np.int64)
    for pack in range(len(slates)):
        dearest[slates[pack]] = max(dearest[slates[pack]], packs.costs[pack])
        rank = packs.ranks[pack]
        by_rank[rank, slates[pack]] = pack
        most_room[rank] = max(most_room[rank], packs.rooms[pack])
    for piece in pieces:
        size = stock.shorts.sizes[piece]
        rank = -1
        for r in range(num_ranks):
            if most_room[r] >= size and (rank < 0 or packs.loads[r] < packs.loads[rank]):
                rank = r
        if rank < 0:
            continue
        chosen = -1
        for slate in range(len(dearest)):
            pack = by_rank[rank, slate]
            if pack >= 0 and packs.rooms[pack] >= size:
                cheap = dearest[slate] - packs.costs[pack]
                if chosen < 0 or cheap > dearest[slates[chosen]] - packs.costs[chosen]:
                    chosen = pack
        extra = stock.shorts.costs[piece] - size * supply.rate // 1024
        _place(stock, packs, piece, chosen)
        packs.costs[chosen] += extra
        packs.loads[rank] += extra
        most_room[rank] = -1
        for pack in by_rank[rank]:
            if pack >= 0:
                most_room[rank] = max(most_room[rank], packs.rooms[pack])


@njit(cache=True, nogil=True)
def _place_in_order(stock: Stock, packs: StepPacks, rules: Rules, end: int) -> None:
    """Fill packs in arrival order, each until the next piece leaves less than the reserve, and close it."""
    sizes = _by_size(stock, end, rules.long_units)
    reserve = rules.long_units // 32
    piece = stock.clock[3]
    for pack in np.argsort(-packs.rooms, kind="mergesort"):
        while piece < end:
            if stock.shorts.packs[piece] == IN_POOL:
                if stock.shorts.sizes[piece] > packs.rooms[pack] - reserve:
                    break
                _place(stock, packs, piece, pack)
            piece += 1
        _close(stock, packs, pack, sizes)


@njit(cache=True, nogil=True)
def _close(stock: Stock, packs: StepPacks, pack: int, sizes: _Sizes) -> None:
    """Fill what is left of a pack, the largest piece that fits first."""
    shorts = stock.shorts
    size = min(packs.rooms[pack], len(sizes.top) - 1)
    while True:
        size = _largest(sizes.words, size)
        if size < 1:
            return
        piece = sizes.top[size]
        sizes.top[size] = sizes.below[piece]
        if sizes.top[size] < 0:
            sizes.words[size >> 6] &= ~(np.uint64(1) << np.uint64(size & 63))
        if shorts.packs[piece] == IN_POOL:
            _place(stock, packs, piece, pack)
            size = min(packs.rooms[pack], size)


@njit(cache=True, nogil=True)
def _largest(words: Bits, size: int) -> int:
    """Return the largest size up to ``size`` whose bit is set, or -1."""
    while size >= 0:
        word = words[size >> 6]
        if word == np.uint64(0):
            size = (size >> 6 << 6) - 1
        elif word >> np.uint64(size & 63) & np.uint64(1):
            return size
        else:
            size -= 1
    return -1


@njit(cache=True, nogil=True)
def _end_of(stock: Stock, units: int) -> int:
    """Return the place in the line of short pieces where there are ``units`` before it."""
    shorts = stock.shorts
    for i in range(stock.clock[3], len(shorts.sizes)):
        if units <= 0:
            return i
        if shorts.packs[i] == IN_POOL:
            units -= shorts.sizes[i]
    return len(shorts.sizes)


@njit(cache=True, nogil=True)
def _by_size(stock: Stock, end: int, long_units: int) -> _Sizes:
    """Sort the short pieces before ``end`` that are not placed into stacks by size."""
    shorts, first = stock.shorts, stock.clock[3]
    top = np.full(long_units, -1, np.int64)
    below = np.full(len(shorts.sizes), -1, np.int64)
    words = np.zeros((long_units >> 6) + 1, np.uint64)
    for i in range(end - 1, first - 1, -1):
        if shorts.packs[i] == IN_POOL:
            size = shorts.sizes[i]
            below[i] = top[size]
            top[size] = i
            words[size >> 6] |= np.uint64(1) << np.uint64(size & 63)
    return _Sizes(top, below, words)


@njit(cache=True, nogil=True)
def _place(stock: Stock, packs: StepPacks, piece: int, pack: int) -> None:
    """Place a short piece."""
    shorts = stock.shorts
    shorts.packs[piece] = pack
    stock.packs[shorts.pieces[piece]] = packs.first + pack
    packs.rooms[pack] -= shorts.sizes[piece]
    stock.clock[1] += shorts.sizes[piece]
    stock.clock[2] -= shorts.sizes[piece]


@njit(cache=True, nogil=True)
def fill_the_empty(stock: Stock, packs: StepPacks, rules: Rules) -> None:
    """Give each pack that has nothing the first piece that is left, while there is any; pass those placed."""
    longs, shorts = stock.longs, stock.shorts
    while stock.clock[3] < len(shorts.packs) and shorts.packs[stock.clock[3]] != IN_POOL:
        stock.clock[3] += 1
    for pack in range(len(packs.rooms)):
        if packs.rooms[pack] < rules.capacity:
            continue
        if stock.clock[2] > 0:
            piece = stock.clock[3]
            while shorts.packs[piece] != IN_POOL:
                piece += 1
            _place(stock, packs, piece, pack)
            continue
        for j in range(len(longs.places)):
            if longs.places[j] == IN_POOL:
                stock.packs[longs.pieces[j]] = packs.first + pack
                stock.clock[1] += longs.sizes[j]
                longs.places[j] = GONE
                break
