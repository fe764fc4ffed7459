"""Sources keep their shares though long documents are moved: exchanges with pieces of other sources.

In:   the long pieces of a step and the pool (``slate_stock.py``), the weights of a mixture (``packing.py``)
Out:  the same step with pieces of nearly the same cost, from sources that are behind

What was drawn has the shares of the mixture, to a few documents. What was drawn is either in steps or in the
pool. So a source has got more than its share of the steps by as much as it has less than that of the pool:
nothing has to be remembered from step to step.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.slate_choice import Skeletons
from ringfeed.pipeline.planner.slate_stock import (
    IN_POOL,
    TICKS,
    Rules,
    StepPacks,
    Stock,
    exchange,
)

__all__ = ["SourceParts", "burden_skeletons", "force_shares", "keep_shares"]

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
    weights: Int64
    """int64 [S], what of the pool each source should be; any unit."""


@njit(cache=True, nogil=True)
def burden_skeletons(stock: Stock, skeletons: Skeletons, rules: Rules, parts: SourceParts) -> None:
    """Make skeletons dearer whose sources are ahead, so that the choice prefers others: ``burdens``."""
    ahead = _ahead(stock, 0, parts)
    in_step = max(1, parts.tokens.sum() // (rules.window + 1))
    for j in range(len(skeletons.of_long)):
        if skeletons.of_long[j] >= 0:
            # In 1/1024 of a step.
            part = ahead[parts.sources[stock.longs.pieces[j]]] * 1024 // in_step
            cost = _BURDEN * stock.longs.sizes[j] * rules.filler // 1024
            skeletons.burdens[skeletons.of_long[j]] += cost * part // 1024


@njit(cache=True, nogil=True)
def keep_shares(stock: Stock, packs: StepPacks, rules: Rules, parts: SourceParts) -> None:
    """Exchange pieces of sources that the step would put ahead for such of nearly their cost from others."""
    longs = stock.longs
    ahead = _ahead(stock, packs.rooms.sum(), parts)
    enough = parts.tokens.sum() // (64 * (rules.window + 1))
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
def force_shares(stock: Stock, packs: StepPacks, rules: Rules, parts: SourceParts) -> None:
    """Where a source would still be far ahead or behind, exchange pieces whatever they cost.

    Any thousand steps then have the shares of the mixture to within 0.1 point, a whole step: what is drawn
    has them, and the pool before and after those steps is off by a third of a step each.
    """
    longs = stock.longs
    limit = parts.tokens.sum() // (rules.window + 1) * _FAR_OFF[0] // _FAR_OFF[1]
    for _ in range(_EXCHANGES):
        ahead = _ahead(stock, packs.rooms.sum(), parts)
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
    left = np.zeros(len(parts.weights), np.int64)
    for j in range(len(longs.places)):
        if longs.places[j] == IN_POOL:
            left[parts.sources[longs.pieces[j]]] += parts.tokens[longs.pieces[j]]
    for i in range(stock.clock[3], len(shorts.packs)):
        if shorts.packs[i] == IN_POOL:
            # The step's room goes to the first short pieces.
            if room < shorts.sizes[i]:
                left[parts.sources[shorts.pieces[i]]] += parts.tokens[shorts.pieces[i]]
            room -= shorts.sizes[i]
    unit = parts.weights.sum()
    # Not times the sum at once: that would be beyond int64.
    whole, rest = left.sum() // unit, left.sum() % unit
    wanted: Int64 = parts.weights * whole + parts.weights * rest // unit
    return np.asarray(wanted - left, dtype=np.int64)


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
