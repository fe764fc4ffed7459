"""Which packs a step gets: skeletons of all long pieces, and of those, runs of like cost.

In:   a ``Stock`` (``slate_stock.py``)
Out:  ``Skeletons``, and the places of long pieces in the step's packs

A skeleton is the long pieces of a pack, placed by best fit over the whole pool; short pieces will fill it.
Sorted by the cost that they will have, skeletons that stand together make a slate. A step takes a slate from
each part of that order (or, where a run is a whole step, one run), the one whose packs differ least and have
waited longest. What is not taken is packed again, with what has arrived, for the next step.

Shapes: L long pieces, N skeletons, K packs in the step.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.best_fit import best_fit_decreasing
from ringfeed.pipeline.planner.slate_stock import GONE, TICKS, Longs, Rules, Stock, Supply

__all__ = ["Skeletons", "choose_packs", "make_skeletons"]

Int64 = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Skeletons(NamedTuple):
    """The packs that a pool comes to, int64 [N] each; the last ones may hold no long piece."""

    rooms: Int64
    """Units left."""
    full_costs: Int64
    """Cost with the short pieces that will fill the room."""
    ages: Int64
    """Of the oldest long piece; those with none count as not yet due."""
    burdens: Int64
    """Cost that counts as added: of sources of a mixture that are ahead, less of those behind."""
    of_long: Int64
    """int64 [L], skeleton of each long piece; -1 for those that are gone."""


def make_skeletons(stock: Stock, rules: Rules) -> tuple[Skeletons, Supply]:
    """Pack all long pieces of the pool, and reckon how far short ones will fill the room that is left."""
    longs = stock.longs
    live = np.flatnonzero(longs.places != GONE)
    packs, left, _ = best_fit_decreasing(
        longs.sizes[live], _placing_order(longs, live, rules), rules.capacity
    )
    units = int(stock.clock[2] + longs.sizes[live].sum())
    num_packs = max(len(left), -(-units // rules.capacity))
    share = 1024
    if num_packs == len(left):
        share = min(share, int(stock.clock[2]) * 1024 // max(1, int(left.sum())))
    supply = Supply(share, rules.filler * share // 1024)
    skeletons = Skeletons(
        np.append(left, np.full(num_packs - len(left), rules.capacity)),
        np.zeros(num_packs, np.int64),
        # Those without a long piece are not due yet.
        np.full(num_packs, -TICKS * rules.window // 2, np.int64),
        np.zeros(num_packs, np.int64),
        np.full(len(longs.sizes), -1, np.int64),
    )
    _sum_up(skeletons, longs, live, packs, supply)
    return skeletons, supply


@njit(cache=True, nogil=True)
def _sum_up(skeletons: Skeletons, longs: Longs, live: Int64, packs: Int64, supply: Supply) -> None:
    """Fill in what depends on the pieces of each skeleton; also what each piece costs beyond short ones."""
    skeletons.full_costs[:] = skeletons.rooms * supply.rate // 1024
    skeletons.ages[packs] = np.int64(-1) << 60
    for i in range(len(live)):
        piece, pack = live[i], packs[i]
        longs.extras[piece] = longs.costs[piece] - longs.sizes[piece] * supply.rate // 1024
        skeletons.of_long[piece] = pack
        skeletons.full_costs[pack] += longs.costs[piece]
        skeletons.ages[pack] = max(skeletons.ages[pack], longs.ages[piece])


@njit(cache=True, nogil=True)
def _placing_order(longs: Longs, live: Int64, rules: Rules) -> Int64:
    """Return the order in which long pieces are packed: old ones first, so that few packs hold any."""
    order = np.empty(len(live), np.int64)
    old = rules.window * TICKS // 2
    count = 0
    for young in range(2):
        for i in range(len(live) - 1, -1, -1):
            if (longs.ages[live[i]] < old) == (young == 1):
                order[count] = i
                count += 1
    return order


@njit(cache=True, nogil=True)
def choose_packs(skeletons: Skeletons, rules: Rules, supply: Supply, short_units: tuple[int, int]) -> Int64:
    """Return the skeletons of the step, int64 [K], slate by slate, the most expensive run first.

    Args:
        skeletons: N of them; if they are no more than a step holds, all are taken.
        rules: how many make a run.
        supply: how far room will be filled.
        short_units: units of short pieces that are late, and those that are due: the step should have room
            for the first, and for no more than the second, so that long and short ones keep their shares.
    """
    order = np.argsort(-skeletons.full_costs, kind="mergesort")
    if len(order) <= rules.packs:
        return order
    order = order[_ready(skeletons, rules, supply)[order]]
    num_runs = rules.packs // rules.run
    late, due = short_units
    alive = np.ones(len(order), np.bool_)
    unserved = np.ones(len(order), np.bool_)
    parts = np.arange(len(order)) * num_runs // len(order)
    firsts = np.empty(num_runs, np.int64)
    runs = np.empty((num_runs, rules.run), np.int64)
    for turn in range(num_runs):
        seed = _seed(skeletons, order, alive, unserved, rules)
        places = np.flatnonzero(alive)
        left = num_runs - turn
        allowed = _allowed(places, seed, unserved, rules)
        start = _best_run(skeletons, order[places], allowed, rules, (late // left, due // left, supply.rate))
        taken = places[start : start + rules.run]
        alive[taken] = False
        unserved[parts == parts[taken[rules.run // 2]]] = False
        firsts[turn] = taken[0]
        runs[turn] = order[taken]
        room = skeletons.rooms[runs[turn]].sum()
        late, due = max(0, late - room), max(0, due - room)
    return runs[np.argsort(firsts, kind="mergesort")].copy().reshape(-1)


@njit(cache=True, nogil=True)
def _ready(skeletons: Skeletons, rules: Rules, supply: Supply) -> Flags:
    """Return which packs may go: those that are nearly full, and old ones. Others wait for what fits them."""
    unfilled = skeletons.rooms * (1024 - supply.share) // 1024
    old = skeletons.ages >= rules.window * TICKS * 7 // 10
    limit = max(1, rules.capacity // 4)
    ready = old | (unfilled <= limit)
    while ready.sum() < rules.packs:
        limit *= 2
        ready = old | (unfilled <= limit)
    return ready


@njit(cache=True, nogil=True)
def _seed(skeletons: Skeletons, order: Int64, alive: Flags, unserved: Flags, rules: Rules) -> int:
    """Return the place of the oldest skeleton that must be in the next run, or -1.

    One that is nearly as old as the window goes first; younger ones where a part is not served yet, the later
    the further their sources are ahead.
    """
    old, more = rules.window * TICKS * 7 // 10, rules.window * TICKS // 5
    seed = -1
    for place in range(len(order)):
        age = skeletons.ages[order[place]]
        if not alive[place] or age < old or (seed >= 0 and age <= skeletons.ages[order[seed]]):
            continue
        burden = min(rules.plain, max(0, skeletons.burdens[order[place]]))
        if age >= old + more or (unserved[place] and age >= old + more * burden // rules.plain):
            seed = place
    return seed


@njit(cache=True, nogil=True)
def _allowed(places: Int64, seed: int, unserved: Flags, rules: Rules) -> Flags:
    """Return where a run may begin among ``places``: around the seed, or in a part not served yet."""
    num_starts = len(places) - rules.run + 1
    allowed = np.zeros(num_starts, np.bool_)
    for start in range(num_starts):
        if seed >= 0:
            allowed[start] = places[start] <= seed <= places[start + rules.run - 1]
        else:
            allowed[start] = unserved[places[start + rules.run // 2]]
    if not allowed.any():
        allowed[:] = True
    return allowed


@njit(cache=True, nogil=True)
def _best_run(
    skeletons: Skeletons, order: Int64, allowed: Flags, rules: Rules, room: tuple[int, int, int]
) -> int:
    """Return the start of the run that costs least: waiting of its ranks, spread, youth, lack of room."""
    run = rules.run
    costs, rooms = skeletons.full_costs[order], skeletons.rooms[order]
    a_step, a_unit = rules.plain // 64, rules.filler // 128
    sums = np.zeros((3, len(order) + 1), np.int64)
    for i in range(len(order)):
        age = skeletons.ages[order[i]]
        sums[0, i + 1] = sums[0, i] + costs[i]
        sums[1, i + 1] = sums[1, i] + rooms[i]
        # To be late is twice as bad as it is good to be early.
        gain = (2 * age if age > 0 else age) * a_step // TICKS - skeletons.burdens[order[i]]
        sums[2, i + 1] = sums[2, i] + gain
    best, least = -1, np.int64(0)
    for start in range(len(allowed)):
        if not allowed[start]:
            continue
        inside = sums[:, start + run] - sums[:, start]
        spread = costs[start] - costs[start + run - 1]
        score = run * costs[start] - inside[0] - inside[2] + 4 * spread
        score += a_unit * max(0, room[0] - inside[1])
        score += abs(room[1] - inside[1]) * room[2] // 1024
        if best < 0 or score < least:
            best, least = start, score
    return best
