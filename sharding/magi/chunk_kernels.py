"""From the rank of each chunk to runs of tokens, compiled by numba on first use.

In:   the rank of every chunk (``partition.py``), how long chunks are (``chunking.py``)
Out:  merged runs of the ranks that are asked for

Shapes: N chunks, R ranks, K runs.
"""

import numpy as np
from numba import njit

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["chunk_runs", "first_without_chunk"]


@njit(cache=True, nogil=True)
def chunk_runs(
    chunk_ranks: Int64Array, stride: int, num_tokens: int, first_rank: int, num_ranks: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the runs of chunks in rising order, neighbours joined, for each asked rank.

    Args:
        chunk_ranks: int64 [N], the rank of each chunk.
        stride: tokens of a chunk.
        num_tokens: where the last chunk, which may be shorter, ends.
        first_rank: the first rank that is asked for.
        num_ranks: how many are.

    Returns:
        Runs [K, 2], rank after rank; where each rank's begin and end, [num_ranks + 1]; and the tokens of
        each rank, [num_ranks].
    """
    bounds = np.zeros(num_ranks + 1, dtype=np.int64)
    lengths = np.zeros(num_ranks, dtype=np.int64)
    before = np.full(num_ranks, -2, dtype=np.int64)
    for chunk in range(len(chunk_ranks)):
        rank = chunk_ranks[chunk] - first_rank
        if 0 <= rank < num_ranks:
            bounds[rank + 1] += chunk > before[rank] + 1
            before[rank] = chunk
    for rank in range(num_ranks):
        bounds[rank + 1] += bounds[rank]
    runs = np.empty((bounds[num_ranks], 2), dtype=np.int64)
    ends = bounds[:-1].copy()
    before[:] = -2
    for chunk in range(len(chunk_ranks)):
        rank = chunk_ranks[chunk] - first_rank
        if not 0 <= rank < num_ranks:
            continue
        start = chunk * stride
        length = min(stride, num_tokens - start)
        if chunk > before[rank] + 1:
            runs[ends[rank], 0] = start
            runs[ends[rank], 1] = 0
            ends[rank] += 1
        runs[ends[rank] - 1, 1] += length
        lengths[rank] += length
        before[rank] = chunk
    return runs, bounds, lengths


@njit(cache=True, nogil=True)
def first_without_chunk(chunk_ranks: Int64Array, num_ranks: int) -> int:
    """Return the first rank of [0, R) that has no chunk, or -1."""
    has_one = np.zeros(num_ranks, dtype=np.bool_)
    for rank in chunk_ranks:
        has_one[rank] = True
    for rank in range(num_ranks):
        if not has_one[rank]:
            return rank
    return -1
