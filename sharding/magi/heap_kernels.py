"""The loops that give each chunk to a rank with little work, compiled by numba on first use.

In:   areas and the order in which to place chunks (``heap_solvers.py``, ``sequential_solvers.py``)
Out:  the rank of every chunk

Sums are float64 because MagiAttention's are: they differ from whole numbers beyond 2**53 only, and there
the same rounding gives the same ranks. "Lowest" is the smallest sum, ties to the lower rank.

Shapes: N chunks, R ranks, S slices, P pieces, G segments: the key axis cut at every end of a key range.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["KeySegments", "Limits", "fill_by_overlap", "fill_by_slice", "fill_lowest"]


class Limits(NamedTuple):
    """What ranks may hold, and how many chunks and ranks are looked at together."""

    num_ranks: int
    capacity: int
    """Chunks a rank may hold."""
    num_candidates: int
    batch: int
    """Chunks that are placed on the same candidates."""


class KeySegments(NamedTuple):
    """The keys that chunks see; a NamedTuple because numba takes it apart for free."""

    firsts: Int64Array
    """int64 [N + 1], where each chunk's rows of ``spans`` begin, and where the last one's end."""
    spans: Int64Array
    """int64 [P, 2], first and last end of each key range, in segments."""
    widths: Int64Array
    """int64 [G], keys in each segment."""


@njit(cache=True, nogil=True)
def _lowest(sums: npt.NDArray[np.float64], is_open: npt.NDArray[np.bool_]) -> int:
    """Return the lowest of the open ranks, or -1."""
    best = -1
    for rank in range(len(sums)):
        if is_open[rank] and (best < 0 or sums[rank] < sums[best]):
            best = rank
    return best


@njit(cache=True, nogil=True)
def fill_lowest(areas: Int64Array, order: Int64Array, num_ranks: int, capacity: int) -> Int64Array:
    """Give each chunk, in ``order``, to the lowest rank with less than ``capacity`` chunks: int64 [N]."""
    sums = np.zeros(num_ranks, dtype=np.float64)
    counts = np.zeros(num_ranks, dtype=np.int64)
    is_open = np.ones(num_ranks, dtype=np.bool_)
    ranks = np.empty(len(areas), dtype=np.int64)
    for chunk in order:
        rank = _lowest(sums, is_open)
        ranks[chunk] = rank
        sums[rank] += areas[chunk]
        counts[rank] += 1
        is_open[rank] = counts[rank] < capacity
    return ranks


@njit(cache=True, nogil=True)
def _open_candidates(
    sums: npt.NDArray[np.float64], counts: Int64Array, limits: Limits, candidates: Int64Array
) -> int:
    """Write the next batch's candidates, lowest first, and return how many there are.

    As many as ``num_candidates`` if these have room for a batch; otherwise every rank with room.
    """
    is_open = counts < limits.capacity
    room = 0
    found = 0
    while True:
        rank = _lowest(sums, is_open)
        if rank < 0:
            return found
        is_open[rank] = False
        candidates[found] = rank
        found += 1
        room += limits.capacity - counts[rank]
        if found == limits.num_candidates and room >= limits.batch:
            return found


@njit(cache=True, nogil=True)
def _cover(chunk: int, keys: KeySegments, cover: Int64Array, touched: Int64Array) -> int:
    """Count in ``cover`` how many of the chunk's ranges hold each segment; list those in ``touched``."""
    count = 0
    for row in range(keys.firsts[chunk], keys.firsts[chunk + 1]):
        for segment in range(keys.spans[row, 0], keys.spans[row, 1]):
            if cover[segment] == 0:
                touched[count] = segment
                count += 1
            cover[segment] += 1
    return count


@njit(cache=True, nogil=True)
def _best_overlap(
    candidates: Int64Array, held: Int64Array, cover: Int64Array, touched: Int64Array, widths: Int64Array
) -> int:
    """Return the place of the candidate that shares most keys with the chunk, the first one on ties.

    A key that x ranges of the chunk and y of the rank hold counts x + y - 1 times.
    """
    best = 0
    most = -1
    for place in range(len(candidates)):
        shared = 0
        for segment in touched:
            if held[candidates[place], segment] > 0:
                shared += (cover[segment] + held[candidates[place], segment] - 1) * widths[segment]
        if shared > most:
            best = place
            most = shared
    return best


@njit(cache=True, nogil=True)
def fill_by_overlap(areas: Int64Array, order: Int64Array, limits: Limits, keys: KeySegments) -> Int64Array:
    """Give each chunk, in ``order``, to the one of the lowest ranks whose keys overlap its own most.

    Returns:
        The rank of each chunk, int64 [N].
    """
    sums = np.zeros(limits.num_ranks, dtype=np.float64)
    counts = np.zeros(limits.num_ranks, dtype=np.int64)
    ranks = np.empty(len(areas), dtype=np.int64)
    held = np.zeros((limits.num_ranks, len(keys.widths)), dtype=np.int64)
    cover = np.zeros(len(keys.widths), dtype=np.int64)
    touched = np.empty(len(keys.widths), dtype=np.int64)
    candidates = np.empty(limits.num_ranks, dtype=np.int64)
    num_candidates = 0
    for number in range(len(order)):
        chunk = order[number]
        if number % limits.batch == 0:
            num_candidates = _open_candidates(sums, counts, limits, candidates)
        num_touched = _cover(chunk, keys, cover, touched)
        place = _best_overlap(candidates[:num_candidates], held, cover, touched[:num_touched], keys.widths)
        rank = candidates[place]
        ranks[chunk] = rank
        sums[rank] += areas[chunk]
        counts[rank] += 1
        for segment in touched[:num_touched]:
            held[rank, segment] += cover[segment]
            cover[segment] = 0
        if counts[rank] == limits.capacity:
            candidates[place : num_candidates - 1] = candidates[place + 1 : num_candidates].copy()
            num_candidates -= 1
    return ranks


@njit(cache=True, nogil=True)
def fill_by_slice(
    areas: Int64Array, order: Int64Array, chunks: Int64Array, firsts: Int64Array, cp_size: int, ratio: float
) -> Int64Array:
    """Give each slice's chunks, from its last one on, to the lowest rank, and when it is full to the next.

    Args:
        areas: int64 [N].
        order: int64 [S], slices in the order in which to place them.
        chunks: int64 [P], the chunks of each slice, rising, slice after slice.
        firsts: int64 [S + 1], where each slice's chunks begin, and where the last one's end.
        cp_size: R, which divides N.
        ratio: below 1, after that part of a slice's chunks it is the then lowest rank's turn.

    Returns:
        The rank of each chunk, int64 [N]. Chunks without a pair fill the ranks up, in rising order.
    """
    capacity = len(areas) // cp_size
    sums = np.zeros(cp_size, dtype=np.float64)
    counts = np.zeros(cp_size, dtype=np.int64)
    ranks = np.full(len(areas), -1, dtype=np.int64)
    for number in order:
        at_once = max(1, math.ceil(ratio * (firsts[number + 1] - firsts[number])))
        rank = _lowest(sums, counts < capacity)
        given = 0
        for row in range(firsts[number + 1] - 1, firsts[number] - 1, -1):
            chunk = chunks[row]
            if ranks[chunk] >= 0:
                continue
            ranks[chunk] = rank
            sums[rank] += areas[chunk]
            counts[rank] += 1
            given += 1
            if counts[rank] == capacity or (ratio < 1 and given == at_once):
                rank = _lowest(sums, counts < capacity)
                given = 0
    rank = -1
    for chunk in range(len(areas)):
        if ranks[chunk] < 0:
            if rank < 0 or counts[rank] == capacity:
                rank = _lowest(sums, counts < capacity)
            ranks[chunk] = rank
            counts[rank] += 1
    return ranks
