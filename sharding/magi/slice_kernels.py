"""What is asked of every slice of a mask, in one loop each, compiled by numba on first use.

In:   ranges of slices, int64 [S, 4]: q0, q1, k0, k1 (``slices.py``)
Out:  one number each; the ranges themselves, of documents (``masks.py``)

A mask has a slice per document: as numpy expressions these took longer than dealing the chunks out.
"""

import numpy as np
from numba import njit

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["document_ranges", "first_outside", "is_by_query", "last_query", "rectangle_pairs"]


@njit(cache=True, nogil=True)
def document_ranges(queries: Int64Array, keys: Int64Array) -> Int64Array:
    """Return first and last end of each document's queries and keys, int64 [N, 4], from offsets [N + 1]."""
    ranges = np.empty((len(queries) - 1, 4), dtype=np.int64)
    for row in range(len(ranges)):
        ranges[row, 0] = queries[row]
        ranges[row, 1] = queries[row + 1]
        ranges[row, 2] = keys[row]
        ranges[row, 3] = keys[row + 1]
    return ranges


@njit(cache=True, nogil=True)
def first_outside(ranges: Int64Array, total: int) -> int:
    """Return the first range that falls or does not lie in [0, total]: 2 i queries, 2 i + 1 keys; or -1."""
    for row in range(len(ranges)):
        for side in range(2):
            start, stop = ranges[row, 2 * side], ranges[row, 2 * side + 1]
            if start < 0 or stop < start or stop > total:
                return 2 * row + side
    return -1


@njit(cache=True, nogil=True)
def last_query(ranges: Int64Array) -> int:
    """Return the largest q1 of slices that have both queries and keys; 0 if there is none."""
    last = 0
    for row in range(len(ranges)):
        if ranges[row, 0] < ranges[row, 1] and ranges[row, 2] < ranges[row, 3]:
            last = max(last, ranges[row, 1])
    return last


@njit(cache=True, nogil=True)
def is_by_query(ranges: Int64Array) -> bool:
    """Return whether the slices stand in order of (q0, q1)."""
    for row in range(1, len(ranges)):
        ahead, behind = ranges[row, 0], ranges[row - 1, 0]
        if ahead < behind or (ahead == behind and ranges[row, 1] < ranges[row - 1, 1]):
            return False
    return True


@njit(cache=True, nogil=True)
def rectangle_pairs(ranges: Int64Array) -> float:
    """Return queries times keys, added over the slices; as a float, which cannot overflow."""
    pairs = 0.0
    for row in range(len(ranges)):
        pairs += float(ranges[row, 1] - ranges[row, 0]) * float(ranges[row, 3] - ranges[row, 2])
    return pairs
