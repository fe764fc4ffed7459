"""What the slate planner works with: the pieces of a pool, long ones by size, short ones by arrival.

In:   a ``Pool`` (``packing.py``) and its ``Shape``
Out:  ``Stock``, which kernels read and write (``slate_choice.py``, ``slate_swaps.py``, ``slate_fill.py``)

Sizes are in units of the pad multiple. Costs are scaled by a power of two so that a mean pack costs about
2^20: shares of it are whole numbers for every cost model, and sums over a pool are far from int64's end.
Ages are in ticks, 1/64 of a step, negative for pieces of steps to come.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.best_fit import descending_order
from ringfeed.pipeline.planner.packing import Pool, Shape
from ringfeed.pipeline.planner.stream import UNKNOWN_STEP

__all__ = [
    "GONE",
    "IN_POOL",
    "TICKS",
    "Longs",
    "Rules",
    "Shorts",
    "StepPacks",
    "Stock",
    "Supply",
    "exchange",
    "is_any_left",
    "make_stock",
    "set_ages",
    "waste",
]

Int64 = NDArray[np.int64]

IN_POOL = -1
"""Place of a long piece that is in no pack of the step at hand."""
GONE = -2
"""Place of a long piece of an earlier step."""
TICKS = 64
_COST_BITS = 20


class Rules(NamedTuple):
    """What does not change while a pool is packed. Named tuples, because kernels take those."""

    capacity: int
    """Units of a pack."""
    packs: int
    """Packs of a step."""
    slate: int
    """Packs of a slate."""
    run: int
    """Packs of like cost that are chosen together: a slate, or a whole step."""
    window: int
    """Steps of look-ahead."""
    long_units: int
    """Pieces of at least so many units are long."""
    medium_units: int
    """Short pieces of at least so many units are placed by cost, smaller ones in their order."""
    filler: int
    """Cost of a unit of those smaller ones, in 1/1024."""
    plain: int
    """Cost of a pack of such pieces alone: the measure of all that is small beside it."""
    final: bool
    """Nothing comes after this pool."""


class Longs(NamedTuple):
    """Pieces that are placed ahead, smallest first: int64 [L] each."""

    pieces: Int64
    """Index in the pool."""
    sizes: Int64
    costs: Int64
    arrivals: Int64
    """Units of the stream between the first step and the piece."""
    steps: Int64
    """Step of its arrival, counted from the first one."""
    ages: Int64
    extras: Int64
    """Cost beyond that of short pieces in its place."""
    places: Int64
    """Pack in the step at hand, or ``IN_POOL``, or ``GONE``."""


class Shorts(NamedTuple):
    """Pieces that fill packs, in arrival order: int64 [S] each."""

    pieces: Int64
    """Index in the pool."""
    sizes: Int64
    costs: Int64
    arrivals: Int64
    packs: Int64
    """Pack of the pool, or ``IN_POOL``."""


class Stock(NamedTuple):
    """All pieces of a pool, and where its steps have come to."""

    longs: Longs
    shorts: Shorts
    packs: Int64
    """int64 [P], pack of each piece of the pool, or ``IN_POOL``."""
    clock: Int64
    """int64 [4]: steps, units in steps, units of short pieces left, the first of those."""


class Supply(NamedTuple):
    """Short pieces for the room that long ones leave."""

    share: int
    """How much of all room they fill, in 1/1024."""
    rate: int
    """Cost of a unit of room, as far as it will be filled, in 1/1024."""


class StepPacks(NamedTuple):
    """Packs of the step at hand: int64 [K] each."""

    first: int
    """Number of the first of them among those of the pool."""
    rooms: Int64
    costs: Int64
    """With the short pieces that will fill the room, as far as they will."""
    ranks: Int64
    loads: Int64
    """int64 [slate], cost of each rank in the step so far."""


def make_stock(pool: Pool, shape: Shape) -> tuple[Stock, Rules]:
    """Sort a pool into long and short pieces.

    A short piece that has waited for a quarter of the window counts as long: it is so large, or room so
    scarce, that it was never its turn.
    """
    stream = pool.stream
    sizes = stream.slots // shape.multiple
    step_slots = shape.packs_per_step * shape.pack_tokens
    ahead = stream.arrivals - pool.planned_slots
    known = stream.arrival_steps != UNKNOWN_STEP
    steps = np.where(known, stream.arrival_steps - pool.first_step, ahead // step_slots)
    costs = shape.cost_model.piece_costs(stream.pieces.lengths)
    rules, costs = _rules(sizes, costs, shape, final=pool.final)
    is_long = (sizes >= rules.long_units) | (steps <= -max(1, shape.window // 4))
    long = np.flatnonzero(is_long)
    # Backwards, so that of equal sizes the first to arrive is the last here: the largest are taken first.
    long = long[descending_order(sizes[long], rules.capacity)][::-1].copy()
    short = np.flatnonzero(~is_long)
    arrivals = ahead // shape.multiple
    longs = Longs(
        pieces=long,
        sizes=sizes[long],
        costs=costs[long],
        arrivals=arrivals[long],
        steps=steps[long],
        ages=np.zeros(len(long), np.int64),
        extras=np.zeros(len(long), np.int64),
        places=np.full(len(long), IN_POOL, np.int64),
    )
    shorts = Shorts(
        short, sizes[short], costs[short], arrivals[short], np.full(len(short), IN_POOL, np.int64)
    )
    clock = np.array([0, 0, shorts.sizes.sum(), 0], np.int64)
    return Stock(longs, shorts, np.full(len(sizes), IN_POOL, np.int64), clock), rules


def _rules(sizes: Int64, costs: Int64, shape: Shape, *, final: bool) -> tuple[Rules, Int64]:
    """Return the rules for a pool, and its costs, scaled."""
    capacity = shape.pack_tokens // shape.multiple
    # Of Python integers: a pool may cost more than int64 holds.
    total = int((costs >> 32).sum()) * (1 << 32) + int((costs & 0xFFFFFFFF).sum())
    mean = total * capacity // max(1, int(sizes.sum()))
    shift = _COST_BITS - mean.bit_length()
    costs = costs << shift if shift > 0 else costs >> -shift
    mean = mean << shift if shift > 0 else mean >> -shift
    long_units = max(1, -(-shape.long_tokens // shape.multiple))
    medium_units = long_units // 16
    small = sizes <= max(medium_units, int(sizes.min(initial=capacity)))
    # A unit is never worth a mean pack, whatever the cost model says of tiny pieces.
    filler = min(int(costs[small].sum()) * 1024 // max(1, int(sizes[small].sum())), mean * 1024)
    return Rules(
        capacity=capacity,
        packs=shape.packs_per_step,
        slate=shape.slate_size,
        run=shape.run_packs,
        window=shape.window,
        long_units=long_units,
        medium_units=medium_units,
        filler=filler,
        plain=filler * capacity // 1024,
        final=final,
    ), costs


@njit(cache=True, nogil=True)
def set_ages(stock: Stock, rules: Rules) -> None:
    """Reckon how long each long piece has waited: in units, but in steps where it must go soon."""
    longs = stock.longs
    step, planned = stock.clock[0], stock.clock[1]
    step_units = rules.packs * rules.capacity
    for j in range(len(longs.sizes)):
        age = (planned - longs.arrivals[j]) * TICKS // step_units
        if step - longs.steps[j] >= rules.window - 1:
            age = max(age, (step - longs.steps[j]) * TICKS)
        longs.ages[j] = age


def is_any_left(stock: Stock) -> bool:
    """Return whether any piece is in no pack yet."""
    return bool(stock.clock[2] > 0 or (stock.longs.places == IN_POOL).any())


@njit(cache=True, nogil=True)
def waste(less: int, rules: Rules, supply: Supply) -> int:
    """Return what it is worth that ``less`` units fewer are filled."""
    return 4 * max(0, less) * (rules.filler - supply.rate) // 1024


@njit(cache=True, nogil=True)
def exchange(longs: Longs, packs: StepPacks, pack: int, pair: tuple[int, int]) -> None:
    """Put the second piece of ``pair`` into a pack in place of the first; -1 for no piece."""
    old, new = pair
    if old >= 0:
        longs.places[old] = IN_POOL
        packs.rooms[pack] += longs.sizes[old]
        packs.costs[pack] -= longs.extras[old]
    if new >= 0:
        longs.places[new] = pack
        packs.rooms[pack] -= longs.sizes[new]
        packs.costs[pack] += longs.extras[new]
