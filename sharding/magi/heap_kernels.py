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

from ringfeed.sharding.magi.segments import KeySegments
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["Limits", "fill_by_overlap", "fill_by_slice", "fill_lowest"]


class Limits(NamedTuple):
    """What ranks may hold, and how many chunks and ranks are looked at together."""

    num_ranks: int
    capacity: int
    """Chunks a rank may hold."""
    num_candidates: int
    batch: int
    """Chunks that are placed on the same candidates."""


@njit(cache=True, nogil=True)
def _lowest(sums: npt.NDArray[np.float64], counts: Int64Array, capacity: int) -> int:
    """Return the lowest of the ranks with less than ``capacity`` chunks, or -1."""
    best = -1
    for rank in range(len(sums)):
        if counts[rank] < capacity and (best < 0 or sums[rank] < sums[best]):
            best = rank
    return best


@njit(cache=True, nogil=True)
def fill_lowest(areas: Int64Array, order: Int64Array, num_ranks: int, capacity: int) -> Int64Array:
    """Give each chunk, in ``order``, to the lowest rank with less than ``capacity`` chunks: int64 [N]."""
    sums = np.zeros(num_ranks, dtype=np.float64)
    counts = np.zeros(num_ranks, dtype=np.int64)
    ranks = np.empty(len(areas), dtype=np.int64)
    for chunk in order:
        rank = _lowest(sums, counts, capacity)
        ranks[chunk] = rank
        sums[rank] += areas[chunk]
        counts[rank] += 1
    return ranks


@njit(cache=True, nogil=True)
def _open_candidates(
    sums: npt.NDArray[np.float64], counts: Int64Array, limits: Limits, candidates: Int64Array
) -> int:
    """Write the next batch's candidates, lowest first, and return how many there are.

    As many as ``num_candidates`` if these have room for a batch; otherwise every rank with room.
    """
    # A rank that is chosen counts as full for the rest of the search.
    taken = counts.copy()
    room = 0
    found = 0
    while True:
        rank = _lowest(sums, taken, limits.capacity)
        if rank < 0:
            return found
        taken[rank] = limits.capacity
        candidates[found] = rank
        found += 1
        room += limits.capacity - counts[rank]
        if found == limits.num_candidates and room >= limits.batch:
            return found


@njit(cache=True, nogil=True)
def _are_apart(spans: Int64Array) -> bool:
    """Return whether no two ranges of one chunk share a key, and they rise: so it is where documents are."""
    apart = True
    for row in range(1, len(spans)):
        apart &= spans[row, 0] >= spans[row - 1, 1]
    return apart


@njit(cache=True, nogil=True)
def _overlaps_apart(
    candidates: Int64Array, held: Int64Array, spans: Int64Array, overlaps: Int64Array
) -> None:
    """Write what each candidate shares with a chunk whose ranges are apart."""
    for place in range(len(candidates)):
        row = held[candidates[place]]
        shared = 0
        for index in range(len(spans)):
            # Unsigned, so that no index counts from the end: only then are several added at a time.
            for segment in range(np.uint64(spans[index, 0]), np.uint64(spans[index, 1])):
                shared += row[segment]
        overlaps[place] = shared


@njit(cache=True, nogil=True)
def _overlaps(
    candidates: Int64Array, held: Int64Array, spans: Int64Array, widths: Int64Array, overlaps: Int64Array
) -> None:
    """Write what each candidate shares with a chunk whose ranges may share keys with each other.

    A key that x ranges of the chunk and y of the rank hold counts x + y - 1 times.
    """
    overlaps[: len(candidates)] = 0
    first, stop = spans[:, 0].min(), spans[:, 1].max()
    cover = np.zeros(stop - first, dtype=np.int64)
    for row in range(len(spans)):
        cover[spans[row, 0] - first : spans[row, 1] - first] += 1
    for place in range(len(candidates)):
        for segment in range(first, stop):
            times, tokens = cover[segment - first], held[candidates[place], segment]
            if times > 0 and tokens > 0:
                overlaps[place] += (times - 1) * widths[segment] + tokens


@njit(cache=True, nogil=True)
def fill_by_overlap(areas: Int64Array, order: Int64Array, limits: Limits, keys: KeySegments) -> Int64Array:
    """Give each chunk, in ``order``, to the one of the lowest ranks whose keys overlap its own most.

    Returns:
        The rank of each chunk, int64 [N].
    """
    sums = np.zeros(limits.num_ranks, dtype=np.float64)
    counts = np.zeros(limits.num_ranks, dtype=np.int64)
    ranks = np.empty(len(areas), dtype=np.int64)
    # Keys of each segment, times the ranges of the rank that hold them.
    held = np.zeros((limits.num_ranks, len(keys.widths)), dtype=np.int64)
    candidates = np.empty(limits.num_ranks, dtype=np.int64)
    overlaps = np.empty(limits.num_ranks, dtype=np.int64)
    num_candidates = 0
    for number in range(len(order)):
        chunk = order[number]
        if number % limits.batch == 0:
            num_candidates = _open_candidates(sums, counts, limits, candidates)
        spans = keys.spans[keys.firsts[chunk] : keys.firsts[chunk + 1]]
        place = 0
        if num_candidates > 1 and len(spans):
            if _are_apart(spans):
                _overlaps_apart(candidates[:num_candidates], held, spans, overlaps)
            else:
                _overlaps(candidates[:num_candidates], held, spans, keys.widths, overlaps)
            place = int(np.argmax(overlaps[:num_candidates]))
        rank = candidates[place]
        ranks[chunk] = rank
        sums[rank] += areas[chunk]
        counts[rank] += 1
        row = held[rank]
        for index in range(len(spans)):
            for segment in range(np.uint64(spans[index, 0]), np.uint64(spans[index, 1])):
                row[segment] += keys.widths[segment]
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
        rank = _lowest(sums, counts, capacity)
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
                rank = _lowest(sums, counts, capacity)
                given = 0
    rank = -1
    for chunk in range(len(areas)):
        if ranks[chunk] < 0:
            if rank < 0 or counts[rank] == capacity:
                rank = _lowest(sums, counts, capacity)
            ranks[chunk] = rank
            counts[rank] += 1
    return ranks
