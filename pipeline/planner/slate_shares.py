"""Sources keep their shares though long documents are moved: exchanges with pieces of other sources.

In:   the long pieces of a step and the pool (``slate_stock.py``), what was drawn (``drawn_tokens.py``)
Out:  the same step with pieces of nearly the same cost, from sources that are behind

Steps should hold what the draw took, up to as many slots as they have, whatever rule it follows: weights, a
schedule of them, sources that drop out. What was drawn is either in steps or in the pool. So a source is
ahead by as much as the pool has less of it than was drawn after those slots.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.packing import Pool, Shape
from ringfeed.pipeline.planner.slate_choice import Skeletons
from ringfeed.pipeline.planner.slate_stock import (
    IN_POOL,
    TICKS,
    Rules,
    StepPacks,
    Stock,
    Supply,
    exchange,
)

__all__ = ["SourceParts", "burden_skeletons", "force_shares", "keep_shares", "source_parts"]

Int64 = NDArray[np.int64]

_BURDEN = 4
"""How much dearer a unit is where its source is a whole step ahead, in units of filler."""
_EXCHANGES = 64
_NEIGHBOURS = 128
"""Pieces on either side that are tried in place of one."""
_FAR_OFF = (5, 16)
"""How far a source may be ahead or behind after a step, in steps."""
_ANY_COST = 1 << 60


class SourceParts(NamedTuple):
    """Where pieces of a pool, P of them, come from."""

    sources: Int64
    """int64 [P]"""
    tokens: Int64
    """int64 [P], real tokens."""
    units: int
    """Of all pieces together."""
    step_tokens: int
    """Tokens of a step, about."""
    places: Int64
    """int64 [B + 1], units of the stream between the first step and each stretch of it, and its end."""
    later: Int64
    """int64 [B + 1, S], tokens of each source that were drawn from each place on."""


def source_parts(pool: Pool, shape: Shape) -> SourceParts | None:
    """Return where the pieces of a pool come from, None where it is one source."""
    mixed = pool.mixed
    if mixed is None:
        return None
    tokens = pool.stream.pieces.lengths
    slots = int(pool.stream.slots.sum())
    later = np.zeros((len(mixed.drawn) + 1, mixed.drawn.shape[1]), np.int64)
    later[:-1] = np.cumsum(mixed.drawn[::-1], axis=0)[::-1]
    return SourceParts(
        mixed.sources,
        tokens,
        slots // shape.multiple,
        int(tokens.sum()) * shape.packs_per_step * shape.pack_tokens // max(1, slots),
        (mixed.places - pool.planned_slots) // shape.multiple,
        later,
    )


@njit(cache=True, nogil=True)
def burden_skeletons(stock: Stock, skeletons: Skeletons, rules: Rules, parts: SourceParts) -> None:
    """Make skeletons dearer whose sources are ahead, so that the choice prefers others: ``burdens``."""
    ahead = _ahead(stock, 0, parts)
    for j in range(len(skeletons.of_long)):
        if skeletons.of_long[j] >= 0:
            # In 1/1024 of a step.
            part = ahead[parts.sources[stock.longs.pieces[j]]] * 1024 // parts.step_tokens
            cost = _BURDEN * stock.longs.sizes[j] * rules.filler // 1024
            skeletons.burdens[skeletons.of_long[j]] += cost * part // 1024


@njit(cache=True, nogil=True)
def keep_shares(stock: Stock, packs: StepPacks, rules: Rules, supply: Supply, parts: SourceParts) -> None:
    """Exchange pieces of sources that the step would put ahead for such of nearly their cost from others."""
    longs = stock.longs
    ahead = _ahead(stock, packs.rooms.sum() * supply.share // 1024, parts)
    enough = parts.step_tokens // 64
    chosen = np.flatnonzero(longs.places >= 0)
    for _ in range(_EXCHANGES):
        if np.abs(ahead).max() < enough:
            break
        best, at, new = 0, -1, -1
        for i in range(len(chosen)):
            piece = chosen[i]
            over = ahead[parts.sources[longs.pieces[piece]]]
            if over > ahead.min() and longs.ages[piece] < rules.window * TICKS // 2:
                terms = (piece, rules.plain // 16, _NEIGHBOURS)
                gain, other = _most_gain(stock, packs, parts, ahead, terms)
                if gain > best:
                    best, at, new = gain, i, other
        if at < 0:
            break
        old, chosen[at] = chosen[at], new
        exchange(longs, packs, longs.places[old], (old, new))
        ahead[parts.sources[longs.pieces[old]]] -= parts.tokens[longs.pieces[old]]
        ahead[parts.sources[longs.pieces[new]]] += parts.tokens[longs.pieces[new]]


@njit(cache=True, nogil=True)
def force_shares(stock: Stock, packs: StepPacks, rules: Rules, supply: Supply, parts: SourceParts) -> None:
    """Where a source would still be far ahead or behind, exchange pieces whatever they cost.

    Any thousand steps then have the shares that were drawn to within 0.1 point, a whole step: a source is off
    by a third of a step each where they begin and end.
    """
    longs = stock.longs
    limit = parts.step_tokens * _FAR_OFF[0] // _FAR_OFF[1]
    for _ in range(_EXCHANGES):
        ahead = _ahead(stock, packs.rooms.sum() * supply.share // 1024, parts)
        if np.abs(ahead).max() <= limit:
            break
        old, new = _best_change(stock, packs, rules, parts, ahead)
        if old < 0 and new < 0:
            break
        pack = longs.places[old] if old >= 0 else int(np.argmax(packs.rooms))
        exchange(longs, packs, pack, (old, new))


@njit(cache=True, nogil=True)
def _best_change(
    stock: Stock, packs: StepPacks, rules: Rules, parts: SourceParts, ahead: Int64
) -> tuple[int, int]:
    """Return the piece to take out of the step and the one to put in that even shares out most; -1 for none.

    Short pieces fill the place of one that only goes, and leave the emptiest pack to one that only comes.
    """
    longs = stock.longs
    best, change, most_room = 0, (-1, -1), packs.rooms.max()
    for piece in range(len(longs.places)):
        off, tokens = ahead[parts.sources[longs.pieces[piece]]], parts.tokens[longs.pieces[piece]]
        if longs.places[piece] >= 0 and longs.ages[piece] < (rules.window - 1) * TICKS:
            gain, other = _most_gain(stock, packs, parts, ahead, (piece, _ANY_COST, len(longs.places)))
            if gain > best:
                best, change = gain, (piece, other)
            gain = (2 * off - tokens) * tokens
            if not rules.final and gain > best:
                best, change = gain, (piece, -1)
        elif longs.places[piece] == IN_POOL and longs.sizes[piece] <= most_room:
            gain = (-2 * off - tokens) * tokens
            if gain > best:
                best, change = gain, (-1, piece)
    return change


@njit(cache=True, nogil=True)
def _ahead(stock: Stock, room: int, parts: SourceParts) -> Int64:
    """Return how many tokens beyond its share each source has with the step so far: int64 [S].

    Args:
        stock: long pieces that are in packs are not in the pool any more.
        room: units of short pieces that the step will take.
        parts: of the pool.
    """
    longs, shorts = stock.longs, stock.shorts
    left, taken = np.zeros(parts.later.shape[1], np.int64), parts.units
    for j in range(len(longs.places)):
        if longs.places[j] == IN_POOL:
            left[parts.sources[longs.pieces[j]]] += parts.tokens[longs.pieces[j]]
            taken -= longs.sizes[j]
    for i in range(stock.clock[3], len(shorts.packs)):
        if shorts.packs[i] == IN_POOL:
            # The step's room goes to the first short pieces.
            if room < shorts.sizes[i]:
                left[parts.sources[shorts.pieces[i]]] += parts.tokens[shorts.pieces[i]]
                taken -= shorts.sizes[i]
            room -= shorts.sizes[i]
    return _drawn_after(taken, parts) - left


@njit(cache=True, nogil=True)
def _drawn_after(units: int, parts: SourceParts) -> Int64:
    """Return the tokens of each source that were drawn after so many units of the stream: int64 [S]."""
    end = int(np.searchsorted(parts.places, units, side="right"))
    if end == len(parts.places):
        return np.zeros(parts.later.shape[1], np.int64)
    # In 2^-20 of the stretch.
    part = ((parts.places[end] - units) << 20) // (parts.places[end] - parts.places[end - 1])
    inside = parts.later[end - 1] - parts.later[end]
    return np.asarray(parts.later[end] + (inside * part >> 20), dtype=np.int64)


@njit(cache=True, nogil=True)
def _most_gain(
    stock: Stock, packs: StepPacks, parts: SourceParts, ahead: Int64, terms: tuple[int, int, int]
) -> tuple[int, int]:
    """Return by how much the best exchange of a piece evens shares out, and the piece to take for it."""
    piece, limit, reach = terms
    longs = stock.longs
    over, tokens = parts.sources[longs.pieces[piece]], parts.tokens[longs.pieces[piece]]
    best, found = 0, -1
    for step in (1, -1):
        other = piece + step
        for _ in range(reach):
            if not 0 <= other < len(longs.places) or abs(longs.extras[other] - longs.extras[piece]) > limit:
                break
            under = parts.sources[longs.pieces[other]]
            fits = longs.sizes[other] <= longs.sizes[piece] + packs.rooms[longs.places[piece]]
            if longs.places[other] == IN_POOL and under != over and fits:
                gap, moved = ahead[over] - ahead[under], parts.tokens[longs.pieces[other]]
                # Of the sum of squares, what goes away.
                gain = (tokens * ahead[over] - moved * ahead[under]) * 2 - tokens * tokens - moved * moved
                if gap > 0 and gain > best:
                    best, found = int(gain), other
            other += step
    return best, found
