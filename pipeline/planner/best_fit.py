"""Best-fit decreasing: each piece, longest first, goes to the fullest pack that still has room for it.

In:   sizes of pieces and the capacity of packs, in units of the pad multiple
Out:  the pack of each piece, and what is left in each pack

Packs are found by what is left in them: a stack of packs per remaining capacity, and a bitmap of the
stacks that are not empty, so that a piece costs a few word operations however many packs are open. Equal
sizes are placed together: while the pack just used has room for the next one, it is the fullest that does.

Shapes: P pieces, B packs.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["best_fit_decreasing", "descending_order"]

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bits = NDArray[np.uint64]

_DEBRUIJN = np.uint64(0x03F79D71B4CB0A89)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_NONE = np.uint64(0)
_ONE = np.uint64(1)
_SIX_BITS = np.uint64(63)


def _debruijn_table() -> NDArray[np.int64]:
    table = np.zeros(64, np.int64)
    for bit in range(64):
        table[((0x03F79D71B4CB0A89 << bit) & 0xFFFFFFFFFFFFFFFF) >> 58] = bit
    return table


_LOWEST_BIT = _debruijn_table()


@njit(cache=True, nogil=True)
def descending_order(sizes: Int64, largest: int) -> Int64:
    """Return the indices of ``sizes`` [P], largest first, equal ones in order: a counting sort.

    Args:
        sizes: int64 [P], 0 to ``largest``.
        largest: no size is larger.
    """
    ends = np.zeros(largest + 2, np.int64)
    for size in sizes:
        ends[largest - size + 1] += 1
    for i in range(largest + 1):
        ends[i + 1] += ends[i]
    order = np.empty(len(sizes), np.int64)
    for i in range(len(sizes)):
        place = largest - sizes[i]
        order[ends[place]] = i
        ends[place] += 1
    return order


@njit(cache=True, nogil=True)
def best_fit_decreasing(sizes: Int64, order: Int64, capacity: int) -> tuple[Int64, Int64, Int64]:
    """Place pieces in ``order`` into the fullest pack with room, a new one where there is none.

    Args:
        sizes: int64 [P], 1 to ``capacity``.
        order: int64 [P], indices of ``sizes`` in the order of placing; any order is legal.
        capacity: of a pack.

    Returns:
        int64 [P], the pack of each piece; int64 [B], what is left in each pack; int64 [B], the piece that
        opened each pack. Packs count in the order they were opened.
    """
    packs = np.empty(len(sizes), np.int64)
    left = np.empty(len(sizes), np.int64)
    opener = np.empty(len(sizes), np.int64)
    below = np.empty(len(sizes), np.int32)
    top = np.full(capacity + 1, -1, np.int32)
    words = np.zeros((capacity >> 6) + 2, np.uint64)
    summary = np.zeros((len(words) >> 6) + 2, np.uint64)
    num_packs = 0
    pack = -1
    previous = np.int64(-1)
    for turn in range(len(order)):
        piece = order[turn]
        size = sizes[piece]
        if pack < 0 or size != previous or left[pack] < size:
            if pack >= 0:
                _push(left[pack], pack, top, below, words, summary)
            room = _first_at_least(size, words, summary)
            if room >= 0:
                pack = _pop(room, top, below, words, summary)
            else:
                pack = num_packs
                left[pack] = capacity
                opener[pack] = piece
                num_packs += 1
            previous = size
        packs[piece] = pack
        left[pack] -= size
    return packs, left[:num_packs].copy(), opener[:num_packs].copy()


@njit(cache=True, nogil=True, inline="always")
def _lowest(word: np.uint64) -> int:
    """Return the index of the lowest set bit."""
    isolated = word & (~word + _ONE)
    return int(_LOWEST_BIT[np.int64((isolated * _DEBRUIJN) >> np.uint64(58))])


@njit(cache=True, nogil=True, inline="always")
def _push(room: int, pack: int, top: Int32, below: Int32, words: Bits, summary: Bits) -> None:
    """Put ``pack`` on the stack of packs with ``room`` left."""
    if top[room] < 0:
        word = room >> 6
        words[word] |= _ONE << (np.uint64(room) & _SIX_BITS)
        summary[word >> 6] |= _ONE << (np.uint64(word) & _SIX_BITS)
    below[pack] = top[room]
    top[room] = pack


@njit(cache=True, nogil=True, inline="always")
def _pop(room: int, top: Int32, below: Int32, words: Bits, summary: Bits) -> int:
    """Take the latest pack off the stack of packs with ``room`` left."""
    pack = int(top[room])
    top[room] = below[pack]
    if top[room] < 0:
        word = room >> 6
        words[word] &= ~(_ONE << (np.uint64(room) & _SIX_BITS))
        if words[word] == _NONE:
            summary[word >> 6] &= ~(_ONE << (np.uint64(word) & _SIX_BITS))
    return pack


@njit(cache=True, nogil=True, inline="always")
def _first_at_least(room: int, words: Bits, summary: Bits) -> int:
    """Return the least remaining capacity of at least ``room`` that some pack has, or -1."""
    word = room >> 6
    found = words[word] & (_ALL << (np.uint64(room) & _SIX_BITS))
    if found != _NONE:
        return (word << 6) + _lowest(found)
    group = (word + 1) >> 6
    found = summary[group] & (_ALL << (np.uint64(word + 1) & _SIX_BITS))
    while found == _NONE:
        group += 1
        if group >= len(summary):
            return -1
        found = summary[group]
    word = (group << 6) + _lowest(found)
    return (word << 6) + _lowest(words[word])
