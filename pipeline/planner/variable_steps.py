"""Loops of the planner for variable packs: one step after the other from a pool, whole or not at all.

In:   pieces of a pool in arrival order, and the deadlines of those that waited (``variable_packs.py``)
Out:  the pack of each piece, or that it is left for the next pool

A step takes pieces that waited, then new ones in arrival order until it has its slots. If some find no room,
it gives new ones back from the last one on: whatever is not in a step either waits, or was never drawn.

Shapes: P pieces of the pool, K packs of a step, H pieces that wait, Q members of a step.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.variable_groups import choose_waiting, num_forced
from ringfeed.pipeline.planner.variable_places import (
    Packs,
    bucket_limits,
    find_pack,
    new_packs,
    place,
    place_in_order,
    put,
)
from ringfeed.pipeline.planner.variable_rules import LEFT, Int64, PoolPieces, StepRules

__all__ = ["UNDRAWN", "pack_steps"]

UNDRAWN = -1
"""In place of a deadline: the piece has not been drawn for a step yet."""
_TRIES = 40


class _Draw(NamedTuple):
    """New pieces of one step."""

    taken: Int64
    """Places in the pool, in arrival order."""
    held: Int64
    """Of pieces that wait from now on."""
    end: int
    """How many pieces have been drawn after it."""
    is_whole: bool
    """Did the pool last?"""


class _Limits(NamedTuple):
    """What the members of a step are, and how many of them may wait."""

    forced: int
    """The first so many must go."""
    taken: int
    """So many after them are new."""
    may_hold: int
    """So many new ones may wait."""


@njit(cache=True, nogil=True)
def pack_steps(pool: PoolPieces, dues: Int64, rules: StepRules) -> tuple[Int64, Int64, int]:
    """Make steps of a pool until it has no whole step left.

    Args:
        pool: its pieces.
        dues: int64 [P], for a piece that waited before this pool the last step that may take it, counted from
            the pool's first one; ``UNDRAWN`` for the others.
        rules: of all steps.

    Returns:
        int64 [P], pack of each piece, ``LEFT`` for those that are left; int64 [packs], the row of each pack
        within its step; the number of packs.
    """
    packs, rows = np.full(len(dues), LEFT, np.int64), np.empty(len(dues), np.int64)
    waiting = np.flatnonzero(dues != UNDRAWN)
    due = dues[waiting]
    undrawn = np.flatnonzero(dues == UNDRAWN)
    end = step = num_packs = 0
    while True:
        forced = num_forced(due - step, rules.packs)
        chosen = choose_waiting(pool.slots[waiting], pool.costs[waiting], forced, rules)
        may_hold = rules.packs * rules.delay - len(waiting) + forced
        draw = _draw(pool, undrawn, end, waiting[chosen], may_hold, rules)
        if not draw.is_whole:
            if not rules.final:
                return packs, rows, num_packs
            # The end is flushed: what waits fills up what is drawn last.
            draw = _draw(pool, undrawn, end, waiting[chosen], 0, rules)
            _choose_rest(pool, chosen, waiting, draw, rules)
        # Those that must go come first.
        members = np.concatenate((waiting[:forced], draw.taken, waiting[forced:][chosen[forced:]]))
        if len(members) == 0:
            return packs, rows, num_packs
        limits = _Limits(forced, len(draw.taken), may_hold - len(draw.held))
        where, filled, kept = _fit(pool, members, limits, rules)
        end, held = _drawn_to(undrawn, draw, kept)
        late = members[forced : forced + kept][where[forced : forced + kept] == LEFT]
        held = np.sort(np.concatenate((held, late)))
        if len(rules.buckets):
            more, places, late, end = _fill_up(pool, undrawn[end:], filled, may_hold - len(held), rules, end)
            members, where = np.concatenate((members, more)), np.concatenate((where, places))
            held = np.concatenate((held, late))
        num_packs = _commit(packs, rows, members, where, num_packs, rules)
        left = packs[waiting] == LEFT
        waiting = np.concatenate((waiting[left], held))
        due = np.concatenate((due[left], np.full(len(held), step + rules.delay, np.int64)))
        step += 1


@njit(cache=True, nogil=True)
def _draw(
    pool: PoolPieces, undrawn: Int64, end: int, chosen: Int64, may_hold: int, rules: StepRules
) -> _Draw:
    """Draw until the step has its slots and K pieces; up to ``may_hold`` outliers wait instead."""
    taken, held = np.empty(len(undrawn) - end, np.int64), np.empty(len(undrawn) - end, np.int64)
    num_taken = num_held = 0
    slots, work = pool.slots[chosen].sum(), pool.costs[chosen].sum()
    most_work = rules.budget * rules.packs
    while (slots < rules.target and work < most_work) or len(chosen) + num_taken < rules.packs:
        if end == len(undrawn):
            return _Draw(taken[:num_taken], held[:num_held], end, is_whole=False)
        piece = undrawn[end]
        end += 1
        if pool.costs[piece] > rules.outlier and num_held < may_hold:
            held[num_held] = piece
            num_held += 1
            continue
        taken[num_taken] = piece
        num_taken += 1
        slots += pool.slots[piece]
        work += pool.costs[piece]
    return _Draw(taken[:num_taken], held[:num_held], end, is_whole=True)


@njit(cache=True, nogil=True)
def _choose_rest(
    pool: PoolPieces, chosen: NDArray[np.bool_], waiting: Int64, draw: _Draw, rules: StepRules
) -> None:
    """Take waiting pieces, the oldest first, until the step has its slots and K pieces."""
    slots = pool.slots[draw.taken].sum() + pool.slots[waiting[chosen]].sum()
    count = len(draw.taken) + chosen.sum()
    for i in range(len(waiting)):
        if slots >= rules.target and count >= rules.packs:
            return
        if not chosen[i]:
            chosen[i] = True
            slots += pool.slots[waiting[i]]
            count += 1


@njit(cache=True, nogil=True)
def _fit(pool: PoolPieces, members: Int64, limits: _Limits, rules: StepRules) -> tuple[Int64, Packs, int]:
    """Place members. Those that find no room wait; if too many, new ones go back, from the last one on.

    Args:
        pool: all pieces.
        members: int64 [Q]: those that must go, then new ones, then others that waited.
        limits: how many are which.
        rules: of the step.

    Returns:
        int64 [Q], the pack of each member, ``LEFT`` for none; the packs; how many new ones count as drawn.
    """
    forced, num_taken = limits.forced, limits.taken
    kept = num_taken
    room = np.full(rules.packs, rules.capacity, np.int64)
    in_buckets = len(rules.buckets) == 0
    for _ in range(_TRIES):
        is_kept = np.ones(len(members), np.bool_)
        is_kept[forced + kept : forced + num_taken] = False
        if is_kept.sum() < min(rules.packs, len(members)):
            break
        packs = new_packs(room, rules)
        where, lacking = place(pool, members, is_kept, packs, rules)
        num_late = int((where[forced : forced + kept] == LEFT).sum())
        if (where[:forced] != LEFT).all() and num_late <= limits.may_hold:
            if in_buckets:
                return where, packs, kept
            room = bucket_limits(pool, members, where, packs, rules)
            in_buckets = True
            continue
        while lacking > 0 and kept > 0:
            kept -= 1
            lacking -= pool.slots[members[forced + kept]]
        if lacking > 0:
            break
    packs = new_packs(np.full(rules.packs, rules.capacity, np.int64), rules)
    where = place_in_order(pool, members, packs, rules)
    return where, packs, int((where[forced : forced + num_taken] != LEFT).sum())


@njit(cache=True, nogil=True)
def _fill_up(
    pool: PoolPieces, undrawn: Int64, packs: Packs, may_hold: int, rules: StepRules, end: int
) -> tuple[Int64, Int64, Int64, int]:
    """Draw on while pieces find room below the limits of the packs; some that find none wait.

    Returns:
        The pieces; their packs; those that wait; how many pieces have been drawn.
    """
    most = len(undrawn)
    more, places, late = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    num_more = num_late = 0
    may_hold = min(may_hold, rules.packs)
    for piece in undrawn:
        pack = find_pack(packs, pool.slots[piece], pool.costs[piece], rules.budget, rules.capacity)
        if pack >= 0 and pool.costs[piece] <= rules.outlier:
            put(packs, pack, pool.slots[piece], pool.costs[piece])
            more[num_more], places[num_more] = piece, pack
            num_more += 1
        elif num_late < may_hold:
            late[num_late] = piece
            num_late += 1
        else:
            break
    return more[:num_more], places[:num_more], late[:num_late], end + num_more + num_late


@njit(cache=True, nogil=True)
def _commit(packs: Int64, rows: Int64, members: Int64, where: Int64, num_packs: int, rules: StepRules) -> int:
    """Note the packs of one step's members, numbered on without a gap; return how many there are now."""
    numbers = np.full(rules.packs, LEFT, np.int64)
    numbers[where[where != LEFT]] = 0
    for pack in range(rules.packs):
        if numbers[pack] != LEFT:
            numbers[pack] = num_packs
            rows[num_packs] = pack // rules.ranks
            num_packs += 1
    for turn in range(len(members)):
        if where[turn] != LEFT:
            packs[members[turn]] = numbers[where[turn]]
    return num_packs


@njit(cache=True, nogil=True)
def _drawn_to(undrawn: Int64, draw: _Draw, kept: int) -> tuple[int, Int64]:
    """Return how many pieces are drawn if only the first ``kept`` new ones are, and which of them wait."""
    if kept == len(draw.taken):
        return draw.end, draw.held
    first = draw.taken[kept]
    return int(np.searchsorted(undrawn, first)), draw.held[draw.held < first]
