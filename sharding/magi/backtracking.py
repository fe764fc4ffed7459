"""The solver that finds the best assignment, by trying all that may be it.

In:   ``ChunkWork`` (``solver.py``)
Out:  the rank of every chunk
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from numba import njit

from ringfeed.sharding.magi.solver import ChunkWork, Solver
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["BacktracingPruning"]

_MOST_TRIES = 2**28


@dataclass(frozen=True, kw_only=True, slots=True)
class BacktracingPruning(Solver):
    """The least possible work on the busiest rank. Exponential: for a few dozen chunks at most.

    Raises:
        ValueError: from ``assign``, when the search has not ended after 2**28 placements.
    """

    name: ClassVar[str] = "backtracing_pruning"

    def assign(self, work: ChunkWork) -> Int64Array:
        order = work.heaviest_first
        areas = work.areas[order].astype(np.float64)
        placed, finished = _search(areas, work.grid.cp_size, work.chunks_per_rank, _MOST_TRIES)
        if not finished:
            raise ValueError(
                f"algorithm {self.name!r} has not found the best assignment of {len(order)} chunks to "
                f"cp_size={work.grid.cp_size} ranks in {_MOST_TRIES} placements; use fewer chunks "
                "(min_chunks_per_rank), or algorithm 'min_heap'"
            )
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = placed
        return ranks


@njit(cache=True, nogil=True)
def _search(
    areas: npt.NDArray[np.float64], num_ranks: int, capacity: int, most_tries: int
) -> tuple[Int64Array, bool]:
    """Return the rank of each chunk [N] in the first best assignment, and whether the search ended.

    Depth first in chunk order, ranks in order. Only what lowers the busiest rank's work is followed, and
    after a rank that is empty the later ones, which are empty too, would give the same again.
    """
    num_chunks = len(areas)
    placed = np.full(num_chunks, -1, dtype=np.int64)
    best_placed = placed.copy()
    best = np.inf
    sums = np.zeros(num_ranks, dtype=np.float64)
    counts = np.zeros(num_ranks, dtype=np.int64)
    busiest = np.zeros(num_chunks + 1, dtype=np.float64)
    tries = 0
    chunk = 0
    while chunk >= 0:
        if chunk == num_chunks:
            if busiest[chunk] < best:
                best = busiest[chunk]
                best_placed[:] = placed
            chunk -= 1
        rank = placed[chunk]
        if rank >= 0:
            sums[rank] -= areas[chunk]
            counts[rank] -= 1
            if counts[rank] == 0:
                rank = num_ranks
        rank += 1
        while rank < num_ranks and (
            counts[rank] == capacity or max(busiest[chunk], sums[rank] + areas[chunk]) >= best
        ):
            rank += 1
        if rank >= num_ranks:
            placed[chunk] = -1
            chunk -= 1
            continue
        placed[chunk] = rank
        sums[rank] += areas[chunk]
        counts[rank] += 1
        busiest[chunk + 1] = max(busiest[chunk], sums[rank])
        chunk += 1
        tries += 1
        if tries > most_tries:
            return best_placed, False
    return best_placed, True
