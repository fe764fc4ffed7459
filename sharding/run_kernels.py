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
    "expand",
    "first_falling_offset",
    "first_wrong_token",
    "merge_adjacent",
    "te_runs",
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
    count = 0
    total = 0
    for row in range(len(runs)):
        start = runs[row, 0]
        length = runs[row, 1]
        if start < 0 or length < 0 or start > num_tokens - length:
            return merged[:0], 0, row
        if length == 0:
            continue
        total += length
        if count and merged[count - 1, 0] + merged[count - 1, 1] == start:
            merged[count - 1, 1] += length
        else:
            merged[count, 0] = start
            merged[count, 1] = length
            count += 1
    return merged[:count].copy(), total, -1


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
def te_runs(offsets: Int64Array, cp_size: int, first_rank: int, num_ranks: int) -> tuple[Int64Array, int]:
    """Return pieces r and 2R - 1 - r of every slot for each asked rank r.

    Args:
        offsets: [N + 1].
        cp_size: R > 1; every slot is cut into 2R pieces.
        first_rank: the first rank that is asked for.
        num_ranks: how many ranks are asked for.

    Returns:
        Raw runs [num_ranks, 2N, 2], and the first slot that is no multiple of 2R (or -1).
    """
    num_slots = len(offsets) - 1
    pieces = 2 * cp_size
    runs = np.empty((num_ranks, 2 * num_slots, 2), dtype=np.int64)
    for slot in range(num_slots):
        start = offsets[slot]
        length = offsets[slot + 1] - start
        width = length // pieces
        if width * pieces != length:
            return runs, slot
        for index in range(num_ranks):
            rank = first_rank + index
            runs[index, 2 * slot, 0] = start + rank * width
            runs[index, 2 * slot, 1] = width
            runs[index, 2 * slot + 1, 0] = start + (pieces - 1 - rank) * width
            runs[index, 2 * slot + 1, 1] = width
    return runs, -1
