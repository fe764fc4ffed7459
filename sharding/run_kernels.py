"""The loops over runs, compiled by numba on first use and cached on disk.

In:   checked int64 offsets (``offsets.py``) or raw runs
Out:  raw runs, merged runs, or the place of the first mistake; no error is raised here,
      because a message needs names that only the callers know

Shapes: N slots, K runs, R ranks. A run is a row (start, length) in chunk tokens.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = [
    "Int64Array",
    "deal_runs",
    "dual_chunk_runs",
    "expand",
    "first_falling_offset",
    "first_overfull_slot",
    "first_wrong_token",
    "merge_adjacent",
]

Int64Array: TypeAlias = npt.NDArray[np.int64]


@njit(cache=True, nogil=True)
def first_falling_offset(offsets: Int64Array) -> int:
    """Return the first slot of ``offsets`` [N + 1] that ends before it begins, or -1."""
    for slot in range(len(offsets) - 1):
        if offsets[slot + 1] < offsets[slot]:
            return slot
    return -1


@njit(cache=True, nogil=True)
def first_overfull_slot(real_offsets: Int64Array, offsets: Int64Array) -> int:
    """Return the first slot with more real tokens than room, or -1; both are [N + 1]."""
    for slot in range(len(offsets) - 1):
        if real_offsets[slot + 1] - real_offsets[slot] > offsets[slot + 1] - offsets[slot]:
            return slot
    return -1


@njit(cache=True, nogil=True)
def _append(runs: Int64Array, first: int, end: int, start: int, length: int) -> int:
    """Append a run to ``runs[first:end]``, joined to the last one if adjacent; return the new end."""
    if length == 0:
        return end
    if end > first and runs[end - 1, 0] + runs[end - 1, 1] == start:
        runs[end - 1, 1] += length
        return end
    runs[end, 0] = start
    runs[end, 1] = length
    return end + 1


@njit(cache=True, nogil=True)
def merge_adjacent(runs: Int64Array, num_tokens: int) -> tuple[Int64Array, int, int]:
    """Drop empty runs and join each run that begins where the one before it ends.

    Args:
        runs: [K, 2], any order.
        num_tokens: T.

    Returns:
        The merged runs [K', 2], their total length L, and the first row that does not
        lie inside [0, T) or has a negative length (-1 if none does).
    """
    merged = np.empty((len(runs), 2), dtype=np.int64)
    end = 0
    total = 0
    for row in range(len(runs)):
        start = runs[row, 0]
        length = runs[row, 1]
        if start < 0 or length < 0 or start > num_tokens - length:
            return merged[:0], 0, row
        total += length
        end = _append(merged, 0, end, start, length)
    return merged[:end].copy(), total, -1


@njit(cache=True, nogil=True)
def expand(runs: Int64Array, num_local: int) -> Int64Array:
    """Return the chunk position of each local token: runs [K, 2] -> int64 [L]."""
    positions = np.empty(num_local, dtype=np.int64)
    local = 0
    for row in range(len(runs)):
        start = runs[row, 0]
        for offset in range(runs[row, 1]):
            positions[local] = start + offset
            local += 1
    return positions


@njit(cache=True, nogil=True)
def first_wrong_token(runs: Int64Array, num_tokens: int) -> tuple[int, int]:
    """Return the first token of [0, T) that ``runs`` do not hold exactly once, and its count.

    Args:
        runs: [K, 2], each inside [0, T), in any order.
        num_tokens: T.

    Returns:
        (token, times held), or (-1, 1) when the runs tile [0, T).
    """
    change = np.zeros(num_tokens + 1, dtype=np.int64)
    for row in range(len(runs)):
        change[runs[row, 0]] += 1
        change[runs[row, 0] + runs[row, 1]] -= 1
    held = 0
    for token in range(num_tokens):
        held += change[token]
        if held != 1:
            return token, held
    return -1, 1


@njit(cache=True, nogil=True)
def deal_runs(
    runs: Int64Array, ranks: Int64Array, order: Int64Array, num_ranks: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Sort runs by rank, keeping ``order`` within each, and merge adjacent ones.

    Args:
        runs: [K, 2], in any order.
        ranks: [K], the rank of each run.
        order: [K], the rows of ``runs`` in the order that every rank keeps.
        num_ranks: R.

    Returns:
        Rows [K, 2], and where each rank's merged runs begin [R] and end [R] among them.
    """
    firsts = np.zeros(num_ranks, dtype=np.int64)
    for row in range(len(ranks)):
        if ranks[row] + 1 < num_ranks:
            firsts[ranks[row] + 1] += 1
    for rank in range(1, num_ranks):
        firsts[rank] += firsts[rank - 1]
    ends = firsts.copy()
    dealt = np.empty((len(runs), 2), dtype=np.int64)
    for row in order:
        rank = ranks[row]
        ends[rank] = _append(dealt, firsts[rank], ends[rank], runs[row, 0], runs[row, 1])
    return dealt, firsts, ends


@njit(cache=True, nogil=True)
def dual_chunk_runs(
    offsets: Int64Array, cp_size: int, first_rank: int, num_ranks: int
) -> tuple[Int64Array, Int64Array, int]:
    """Return pieces r and 2R - 1 - r of every slot for each asked rank r.

    Args:
        offsets: [N + 1].
        cp_size: R; every slot is cut into 2R pieces.
        first_rank: the first rank that is asked for.
        num_ranks: how many ranks are asked for.

    Returns:
        The merged runs [K, 2], rank after rank; where each rank's rows end [num_ranks + 1],
        beginning with 0; and the first slot that is no multiple of 2R (or -1).
    """
    num_slots = len(offsets) - 1
    pieces = 2 * cp_size
    runs = np.empty((num_ranks * 2 * num_slots, 2), dtype=np.int64)
    ends = np.zeros(num_ranks + 1, dtype=np.int64)
    widths = np.empty(num_slots, dtype=np.int64)
    for slot in range(num_slots):
        length = offsets[slot + 1] - offsets[slot]
        widths[slot] = length // pieces
        if widths[slot] * pieces != length:
            return runs[:0], ends, slot
    end = 0
    for index in range(num_ranks):
        head = first_rank + index
        tail = pieces - 1 - head
        first = end
        for slot in range(num_slots):
            width = widths[slot]
            end = _append(runs, first, end, offsets[slot] + head * width, width)
            end = _append(runs, first, end, offsets[slot] + tail * width, width)
        ends[index + 1] = end
    return runs[:end], ends, -1
