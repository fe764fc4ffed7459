"""The placing loops of the ``whole_document`` layout, compiled by numba on first use.

In:   slot offsets and real offsets (``whole_document.py``, with the rule)
Out:  merged runs, rank after rank

One call does it all, and few arrays go from loop to loop: at a thousand documents the way in and out of
numpy, and numba's count of references to each array, were most of the time.

Shapes: N slots, R ranks, K placed runs, Q parts of slots that wait to be placed.
"""

import numpy as np
from numba import njit

from ringfeed.sharding.run_kernels import Int64Array, deal_runs

__all__ = ["longest_first", "place_documents"]

_WORK, _ROOM, _IS_ASKED = 0, 1, 2
"""Columns of ``shares``, int64 [R, 3]: a rank's work so far, the tokens left in its share, and 1 for a rank
whose runs are asked for, else 0."""
_FULL = np.iinfo(np.int64).max
"""The work of a rank whose share is full: it is never the least."""
_SLOT, _START, _STOP = 0, 1, 2
"""Columns of ``parts``, int64 [Q, 3]: a slot, and the tokens [start, stop) of it."""
_RANK, _BEGIN, _LENGTH = 1, 2, 3
"""Columns of ``placed``, int64 [K, 4], after ``_SLOT``: who got it, where in the chunk, how much."""
_DIGIT_BITS = 11
"""Of one pass of sorting: for slots shorter than 2048 tokens, one pass does."""


@njit(cache=True, nogil=True)
def _work(start: int, stop: int, cost: tuple[int, int]) -> int:
    """``PieceCost.work`` again: numba cannot call a method of a dataclass."""
    pairs = (stop * (stop + 1) - start * (start + 1)) // 2
    return cost[0] * (stop - start) + cost[1] * pairs


@njit(cache=True, nogil=True)
def _take(shares: Int64Array, rank: int, start: int, stop: int, cost: tuple[int, int]) -> int:
    """Give ``rank`` what it has room for of a slot's [start, stop); return where that ends."""
    end: int = start + min(stop - start, shares[rank, _ROOM])
    if end > start:
        shares[rank, _ROOM] -= end - start
        shares[rank, _WORK] += _work(start, end, cost)
        if shares[rank, _ROOM] == 0:
            shares[rank, _WORK] = _FULL
    return end


@njit(cache=True, nogil=True)
def _note(placed: Int64Array, count: int, slot: int, rank: int, run: tuple[int, int]) -> None:
    """Write row ``count`` of ``placed``; it stays if the caller counts it."""
    placed[count, _SLOT] = slot
    placed[count, _RANK] = rank
    placed[count, _BEGIN] = run[0]
    placed[count, _LENGTH] = run[1]


@njit(cache=True, nogil=True)
def _least_busy(shares: Int64Array) -> int:
    """Return the rank with the least work, the lower one of equals."""
    best, least = 0, shares[0, _WORK]
    for rank in range(1, len(shares)):
        # Written so that nothing branches: who is next cannot be predicted.
        is_less = shares[rank, _WORK] < least
        best = rank if is_less else best
        least = min(least, shares[rank, _WORK])
    return best


@njit(cache=True, nogil=True)
def _place_by_work(
    parts: Int64Array,
    offsets: Int64Array,
    shares: Int64Array,
    placed: Int64Array,
    count: int,
    cost: tuple[int, int],
) -> int:
    """Place each part on the least busy rank, what it has no room for on the next; return the new count."""
    for index in range(len(parts)):
        slot, start = parts[index, _SLOT], parts[index, _START]
        while start < parts[index, _STOP]:
            rank = _least_busy(shares)
            end = _take(shares, rank, start, parts[index, _STOP], cost)
            _note(placed, count, slot, rank, (offsets[slot] + start, end - start))
            count += shares[rank, _IS_ASKED]
            start = end
    return count


@njit(cache=True, nogil=True)
def _place_dual_chunked(
    slots: Int64Array, offsets: Int64Array, shares: Int64Array, placed: Int64Array, cost: tuple[int, int]
) -> int:
    """Place 2R pieces of each slot, then what shares had no room for; return how many runs that makes."""
    cp_size = len(shares)
    pieces = 2 * cp_size
    rests = np.empty((pieces * len(slots), 3), dtype=np.int64)
    num_rests = count = 0
    for slot in slots:
        length = offsets[slot + 1] - offsets[slot]
        width, first_wide = length // pieces, pieces - length % pieces
        start = 0
        for piece in range(pieces):
            stop = start + width + (1 if piece >= first_wide else 0)
            rank = piece if piece < cp_size else pieces - 1 - piece
            end = _take(shares, rank, start, stop, cost)
            if end > start:
                _note(placed, count, slot, rank, (offsets[slot] + start, end - start))
                count += shares[rank, _IS_ASKED]
            if end < stop:
                rests[num_rests, _SLOT] = slot
                rests[num_rests, _START] = end
                rests[num_rests, _STOP] = stop
                num_rests += 1
            start = stop
    return _place_by_work(rests[:num_rests], offsets, shares, placed, count, cost)


@njit(cache=True, nogil=True)
def longest_first(slots: Int64Array, offsets: Int64Array) -> Int64Array:
    """Return ``slots`` by falling length, equal ones in their order: a radix sort, least digit first."""
    longest = 0
    for slot in slots:
        longest = max(longest, offsets[slot + 1] - offsets[slot])
    order, spare = slots.copy(), np.empty_like(slots)
    mask = (1 << _DIGIT_BITS) - 1
    places = np.empty(min(longest, mask) + 1, dtype=np.int64)
    shift = 0
    while longest >> shift:
        places[:] = 0
        for slot in order:
            places[(offsets[slot + 1] - offsets[slot]) >> shift & mask] += 1
        before = 0
        for digit in range(len(places) - 1, -1, -1):
            before, places[digit] = before + places[digit], before
        for slot in order:
            digit = (offsets[slot + 1] - offsets[slot]) >> shift & mask
            spare[places[digit]] = slot
            places[digit] += 1
        order, spare = spare, order
        shift += _DIGIT_BITS
    return order


@njit(cache=True, nogil=True)
def _whole_slots(slots: Int64Array, offsets: Int64Array) -> Int64Array:
    """Return ``slots`` as parts that have all of their tokens, the longest first."""
    parts = np.empty((len(slots), 3), dtype=np.int64)
    order = longest_first(slots, offsets)
    for index in range(len(order)):
        slot = order[index]
        parts[index, _SLOT] = slot
        parts[index, _START] = 0
        parts[index, _STOP] = offsets[slot + 1] - offsets[slot]
    return parts


@njit(cache=True, nogil=True)
def _sorted_out(
    offsets: Int64Array, real_offsets: Int64Array, threshold: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the long slots, the short ones, and those without a real token, each in slot order."""
    num_slots = len(offsets) - 1
    long, short, empty = np.empty((3, num_slots), dtype=np.int64)
    num_long = num_short = num_empty = 0
    for slot in range(num_slots):
        if real_offsets[slot + 1] == real_offsets[slot]:
            empty[num_empty] = slot
            num_empty += 1
        elif offsets[slot + 1] - offsets[slot] >= threshold:
            long[num_long] = slot
            num_long += 1
        else:
            short[num_short] = slot
            num_short += 1
    return long[:num_long], short[:num_short], empty[:num_empty]


@njit(cache=True, nogil=True)
def _chunk_order(placed: Int64Array, num_slots: int) -> Int64Array:
    """Return the placed runs in chunk order, int64 [K]: by slot, and within a slot by where they begin."""
    places = np.zeros(num_slots + 1, dtype=np.int64)
    for index in range(len(placed)):
        places[placed[index, _SLOT] + 1] += 1
    for slot in range(num_slots):
        places[slot + 1] += places[slot]
    firsts = places.copy()
    order = np.empty(len(placed), dtype=np.int64)
    for index in range(len(placed)):
        slot = placed[index, _SLOT]
        place = places[slot]
        places[slot] += 1
        # A slot's runs come nearly in order, so each moves a step or two.
        while place > firsts[slot] and placed[order[place - 1], _BEGIN] > placed[index, _BEGIN]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = index
    return order


@njit(cache=True, nogil=True)
def _place(
    offsets: Int64Array, real_offsets: Int64Array, shares: Int64Array, threshold: int, cost: tuple[int, int]
) -> Int64Array:
    """Place every slot; return the rows of ``placed`` of the ranks asked for, in the order of the rule."""
    num_slots = len(offsets) - 1
    long, short, empty = _sorted_out(offsets, real_offsets, threshold)
    cp_size = len(shares)
    # A cut fills a share, so there are at most R of them beside the pieces that were planned; and one row is
    # written without being counted.
    placed = np.empty((2 * cp_size * len(long) + num_slots + cp_size + 1, 4), dtype=np.int64)
    count = _place_dual_chunked(long, offsets, shares, placed, cost)
    count = _place_by_work(_whole_slots(short, offsets), offsets, shares, placed, count, cost)
    count = _place_by_work(_whole_slots(empty, offsets), offsets, shares, placed, count, (0, 0))
    return placed[:count]


@njit(cache=True, nogil=True)
def place_documents(
    offsets: Int64Array,
    real_offsets: Int64Array,
    ranks: tuple[int, int, int],
    threshold: int,
    cost: tuple[int, int],
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Place every slot on ranks, each of which ends up with T / R tokens.

    Args:
        offsets: slot offsets [N + 1], T a multiple of R.
        real_offsets: real offsets [N + 1].
        ranks: R, the first rank that is asked for, and how many are.
        threshold: slots of at least this many tokens are dual-chunked.
        cost: work per token and per pair.

    Returns:
        Merged runs [K, 2] of the ranks asked for, rank after rank, and where each one's begin and end among
        them.
    """
    cp_size, first_rank, num_ranks = ranks
    shares = np.zeros((cp_size, 3), dtype=np.int64)
    shares[:, _ROOM] = offsets[-1] // cp_size
    shares[first_rank : first_rank + num_ranks, _IS_ASKED] = 1
    placed = _place(offsets, real_offsets, shares, threshold, cost)
    order = _chunk_order(placed, len(offsets) - 1)
    return deal_runs(placed[:, _BEGIN:], placed[:, _RANK] - first_rank, order, num_ranks)
