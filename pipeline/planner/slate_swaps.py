"""Slates become level: long pieces of a step are exchanged with others of the pool.

In:   long pieces with their places (``slate_stock.py``), the room and cost of the step's packs
Out:  the same, changed; and the rank that each pack will go to (``pipeline/ranks.py`` has the rule)

A pack's cost is what it will be when short pieces have filled it. A slate is level when its packs cost the
same, but for what the ranks that get them lack or have too much from the slates before.

Shapes: L long pieces, smallest first; K packs in the step.
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
    Stock,
    Supply,
    exchange,
    waste,
)

__all__ = ["level_slates", "move_to_packs"]

Int64 = NDArray[np.int64]

_NEIGHBOURS = 16
"""Pieces on either side of the longest of a pack that are tried in its place."""
_REACH = 64
"""Pieces of other packs that are passed over in a search."""
_ROUNDS = 16


@njit(cache=True, nogil=True)
def level_slates(longs: Longs, packs: StepPacks, rules: Rules, supply: Supply) -> None:
    """Exchange pieces with the pool until packs cost what their ranks lack, slate by slate."""
    members = _members(longs, packs, rules)
    for first in range(0, len(members), rules.slate):
        slate = members[first : first + rules.slate]
        _level_slate(longs, packs, slate, rules, supply)
        _deal_slate(packs, slate[:, 0])


@njit(cache=True, nogil=True)
def _members(longs: Longs, packs: StepPacks, rules: Rules) -> Int64:
    """Return for each pack its number, the slates from its own on, its long pieces, then at least one -1."""
    num_packs = len(packs.rooms)
    counts = np.zeros(num_packs, np.int64)
    for pack in longs.places:
        if pack >= 0:
            counts[pack] += 1
    members = np.full((num_packs, 3 + counts.max()), -1, np.int64)
    for pack in range(num_packs):
        members[pack, 0] = pack
        members[pack, 1] = -(-num_packs // rules.slate) - pack // rules.slate
    counts[:] = 2
    for j in range(len(longs.places)):
        pack = longs.places[j]
        if pack >= 0:
            members[pack, counts[pack]] = j
            counts[pack] += 1
    return members


@njit(cache=True, nogil=True)
def _level_slate(longs: Longs, packs: StepPacks, members: Int64, rules: Rules, supply: Supply) -> None:
    """Level one slate; the packs' loads are those of the slates before."""
    numbers = members[:, 0]
    costs = packs.costs[numbers]
    order, ranks = np.argsort(-costs, kind="mergesort"), np.argsort(packs.loads, kind="mergesort")
    mean_load = packs.loads.sum() // len(packs.loads)
    targets = np.empty(len(costs), np.int64)
    for i in range(len(order)):
        lacking = mean_load - packs.loads[ranks[i]]
        targets[order[i]] = costs.sum() // len(costs) + lacking // members[0, 1]
    for _ in range(_ROUNDS):
        changed = False
        for i in range(len(numbers)):
            lacking = targets[i] - packs.costs[numbers[i]]
            if abs(lacking) > rules.plain // 64 and _level_pack(
                longs, packs, members[i], (rules, supply, lacking)
            ):
                changed = True
        if not changed:
            break


@njit(cache=True, nogil=True)
def _level_pack(longs: Longs, packs: StepPacks, member: Int64, terms: tuple[Rules, Supply, int]) -> bool:
    """Change a pack by about what it lacks, with one exchange, or two at once. Is it changed?"""
    rules, supply, lacking = terms
    pack, pieces = member[0], member[2:]
    error = abs(lacking) * 7 // 8
    best, new = -1, -1
    for i in range(len(pieces)):
        piece = pieces[i]
        size, extra = (longs.sizes[piece], longs.extras[piece]) if piece >= 0 else (0, 0)
        if piece >= 0 and longs.ages[piece] >= rules.window * TICKS // 2:
            continue
        other = _find(longs, extra + lacking, packs.rooms[pack] + size)
        if other >= 0:
            differ = abs(longs.extras[other] - extra - lacking)
            differ += waste(size - longs.sizes[other], rules, supply)
            if differ < error:
                error, best, new = differ, i, other
        differ = abs(extra + lacking) + waste(size, rules, supply)
        # What is taken out of the plan's last steps would make more of them.
        if piece >= 0 and not rules.final and differ < error:
            error, best, new = differ, i, -1
    if error > rules.plain // 32:
        first, second = _two_longest(longs, pieces, rules)
        if second >= 0:
            pair = _find_pair(longs, packs.rooms[pack], (pieces[first], pieces[second]), terms, error)
            if pair[0] >= 0:
                exchange(longs, packs, pack, (pieces[first], pair[0]))
                exchange(longs, packs, pack, (pieces[second], pair[1]))
                pieces[first], pieces[second] = pair
                return True
    if best >= 0:
        exchange(longs, packs, pack, (pieces[best], new))
        pieces[best] = new
    return best >= 0


@njit(cache=True, nogil=True)
def _two_longest(longs: Longs, pieces: Int64, rules: Rules) -> tuple[int, int]:
    """Return where the two longest pieces of a pack stand, -1 for none; none if one of them is old."""
    first, second = -1, -1
    for i in range(len(pieces)):
        if pieces[i] < 0:
            continue
        if first < 0 or pieces[i] > pieces[first]:
            first, second = i, first
        elif second < 0 or pieces[i] > pieces[second]:
            second = i
    old = rules.window * TICKS // 2
    if second < 0 or longs.ages[pieces[first]] >= old or longs.ages[pieces[second]] >= old:
        return -1, -1
    return first, second


@njit(cache=True, nogil=True)
def _find_pair(
    longs: Longs, room: int, pair: tuple[int, int], terms: tuple[Rules, Supply, int], error: int
) -> tuple[int, int]:
    """Return two pieces of the pool that take the place of two of a pack, with an error below ``error``."""
    rules, supply, lacking = terms
    size = longs.sizes[pair[0]] + longs.sizes[pair[1]]
    wanted = longs.extras[pair[0]] + longs.extras[pair[1]] + lacking
    best = (-1, -1)
    for step in (1, -1):
        first, tried = pair[0] + step, 0
        while 0 <= first < len(longs.sizes) and tried < _NEIGHBOURS and longs.sizes[first] < size + room:
            if longs.places[first] == IN_POOL:
                tried += 1
                longs.places[first] = 0
                second = _find(longs, wanted - longs.extras[first], size + room - longs.sizes[first])
                longs.places[first] = IN_POOL
                if second >= 0:
                    differ = abs(wanted - longs.extras[first] - longs.extras[second])
                    less = size - longs.sizes[first] - longs.sizes[second]
                    differ += waste(less, rules, supply)
                    if differ < error:
                        error, best = differ, (first, second)
            first += step
    return best


@njit(cache=True, nogil=True)
def _find(longs: Longs, extra: int, room: int) -> int:
    """Return the piece of the pool that fits ``room`` and whose extra cost is nearest, or -1."""
    end = int(np.searchsorted(longs.sizes, room, side="right"))
    up = int(np.searchsorted(longs.extras[:end], extra))
    down = up - 1
    last, first = min(end, up + _REACH), max(-1, down - _REACH)
    while up < last and longs.places[up] != IN_POOL:
        up += 1
    while down > first and longs.places[down] != IN_POOL:
        down -= 1
    if up >= last:
        return down if down > first else -1
    if down <= first or longs.extras[up] - extra <= extra - longs.extras[down]:
        return up
    return down


@njit(cache=True, nogil=True)
def _deal_slate(packs: StepPacks, numbers: Int64) -> None:
    """Reckon which rank gets each pack of a slate: the most expensive goes to the one with least."""
    order = numbers[np.argsort(-packs.costs[numbers], kind="mergesort")]
    ranks = np.argsort(packs.loads, kind="mergesort")[: len(order)]
    for i in range(len(order)):
        packs.ranks[order[i]] = ranks[i]
    packs.loads[ranks] += packs.costs[order]


@njit(cache=True, nogil=True)
def move_to_packs(stock: Stock, packs: StepPacks) -> None:
    """Take the long pieces of the step out of the pool for good."""
    longs = stock.longs
    for j in range(len(longs.places)):
        if longs.places[j] >= 0:
            stock.packs[longs.pieces[j]] = packs.first + longs.places[j]
            stock.clock[1] += longs.sizes[j]
            longs.places[j] = GONE
