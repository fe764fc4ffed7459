"""How many query-key pairs each chunk of a stream has, compiled by numba on first use.

In:   slices in query order (``slices.py``), the length of a chunk (``chunking.py``)
Out:  areas per chunk, or the pieces into which chunks cut the slices, for solvers (``solver.py``)

Shapes: S slices, N chunks, P pieces.
"""

import numpy as np
from numba import njit

from ringfeed.sharding.magi.slice_kernels import rectangle_pairs
from ringfeed.sharding.magi.slices import Kinds, MaskKind, MaskSlices
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["check_area_range", "chunk_areas", "chunk_pieces", "slice_areas"]

# The two bits of a kind, one for each slanted side (``MaskKind``).
_RIGHT, _LEFT = int(MaskKind.CAUSAL), int(MaskKind.INV_CAUSAL)
_LARGEST_AREA = float(2**62)


@njit(cache=True, nogil=True)
def _piece(span: tuple[int, int, int, int], kind: int, start: int, stop: int) -> tuple[int, int, int]:
    """Return pairs, first key and last key's end of the rows [start, stop) of one slice.

    Args:
        span: q0, q1, k0, k1 of the slice: numbers, since a row of an array costs more than the counting.
        kind: its ``MaskKind``.
        start: any token, also one before the slice.
        stop: any token, also one behind the slice.
    """
    q0, q1, first_key, end_key = span
    num_keys = end_key - first_key
    low = max(q0, start)
    high = min(q1, stop)
    if kind & _RIGHT:
        low = max(low, q1 - num_keys)
    if kind & _LEFT:
        high = min(high, q0 + num_keys)
    rows = high - low
    if rows <= 0:
        return 0, first_key, first_key
    num_slanted = 0
    if kind & _RIGHT:
        end_key -= q1 - high
        num_slanted += 1
    if kind & _LEFT:
        first_key += low - q0
        num_slanted += 1
    # Each slanted side cuts a triangle off the rectangle.
    area = rows * (end_key - first_key) - num_slanted * (rows * (rows - 1) // 2)
    return max(0, area), first_key, end_key


@njit(cache=True, nogil=True)
def _chunk_areas(ranges: Int64Array, kinds: Kinds, chunk_size: int, num_chunks: int) -> Int64Array:
    areas = np.zeros(num_chunks, dtype=np.int64)
    chunk = 0
    for row in range(len(kinds)):
        span = (ranges[row, 0], ranges[row, 1], ranges[row, 2], ranges[row, 3])
        if span[0] >= span[1]:
            continue
        # Slices come in query order, mostly in the chunk where the last one ended: a division for each would
        # take longer than all the rest.
        if not 0 <= span[0] - chunk * chunk_size < chunk_size:
            chunk = span[0] // chunk_size
        start = chunk * chunk_size
        areas[chunk] += _piece(span, kinds[row], start, start + chunk_size)[0]
        while start + chunk_size < span[1]:
            start += chunk_size
            chunk += 1
            areas[chunk] += _piece(span, kinds[row], start, start + chunk_size)[0]
    return areas


@njit(cache=True, nogil=True)
def _chunk_pieces(ranges: Int64Array, kinds: Kinds, chunk_size: int) -> Int64Array:
    most = 0
    for row in range(len(kinds)):
        if ranges[row, 0] < ranges[row, 1]:
            most += (ranges[row, 1] - 1) // chunk_size - ranges[row, 0] // chunk_size + 1
    pieces = np.empty((most, 4), dtype=np.int64)
    count = 0
    for row in range(len(kinds)):
        span = (ranges[row, 0], ranges[row, 1], ranges[row, 2], ranges[row, 3])
        if span[0] >= span[1]:
            continue
        for chunk in range(span[0] // chunk_size, (span[1] - 1) // chunk_size + 1):
            start = chunk * chunk_size
            area, first_key, end_key = _piece(span, kinds[row], start, start + chunk_size)
            if area > 0:
                pieces[count, 0] = chunk
                pieces[count, 1] = row
                pieces[count, 2] = first_key
                pieces[count, 3] = end_key
                count += 1
    return pieces[:count]


def chunk_areas(slices: MaskSlices, *, chunk_size: int, num_chunks: int) -> Int64Array:
    """Return the pairs of each chunk's queries, int64 [N]; chunk i is tokens [i, i + 1) * ``chunk_size``."""
    areas: Int64Array = _chunk_areas(slices.ranges, slices.kinds, chunk_size, num_chunks)
    return areas


def chunk_pieces(slices: MaskSlices, *, chunk_size: int) -> Int64Array:
    """Return the pieces into which chunks cut the slices: those that hold at least one pair.

    Returns:
        int64 [P, 4]: chunk, slice, first and last end of the keys that the piece sees; slice after slice,
        chunks rising in each.
    """
    pieces: Int64Array = _chunk_pieces(slices.ranges, slices.kinds, chunk_size)
    return pieces


def slice_areas(slices: MaskSlices) -> Int64Array:
    """Return the pairs of each whole slice, int64 [S].

    A band of less than no key counts below 0, as in MagiAttention; solvers only order by these.
    """
    rows = slices.ranges[:, 1] - slices.ranges[:, 0]
    keys = slices.ranges[:, 3] - slices.ranges[:, 2]
    num_slanted = (slices.kinds & _RIGHT) // _RIGHT + (slices.kinds & _LEFT) // _LEFT
    # With one slanted side, rows beyond the keys see nothing.
    rows = np.where(num_slanted == 1, np.minimum(rows, keys), rows)
    areas: Int64Array = rows * keys - num_slanted * (rows * (rows - 1) // 2)
    return areas


def check_area_range(slices: MaskSlices) -> None:
    """Refuse masks whose pairs may not fit into int64.

    Raises:
        ValueError: if the rectangles of all slices hold more than 2**62 pairs.
    """
    rectangles = rectangle_pairs(slices.ranges)
    if rectangles > _LARGEST_AREA:
        raise ValueError(
            f"the slices hold up to {rectangles:.3g} query-key pairs, more than 2**62; use fewer"
        )
