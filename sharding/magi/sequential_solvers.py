"""Solvers that keep neighbouring chunks together.

In:   ``ChunkWork`` (``solver.py``)
Out:  the rank of every chunk; the longer loop is in ``heap_kernels.py``
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringfeed.sharding.magi.heap_kernels import fill_by_slice
from ringfeed.sharding.magi.solver import ChunkWork, Solver, check_ratio
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["SequentialSelect", "SortedSequentialSelect"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SequentialSelect(Solver):
    """Contiguous blocks of chunks in rank order; the first ranks get one more where it does not divide."""

    name: ClassVar[str] = "sequential_select"
    takes_uneven: ClassVar[bool] = True

    def assign(self, work: ChunkWork) -> Int64Array:
        cp_size = work.grid.cp_size
        blocks = np.full(cp_size, work.grid.num_chunks // cp_size)
        blocks[: work.grid.num_chunks % cp_size] += 1
        return np.repeat(np.arange(cp_size), blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedSequentialSelect(Solver):
    """Slice after slice, the largest first, its chunks from the last on to the rank with the least work.

    Raises:
        ValueError: if ``allocation_ratio`` is outside [0, 1].
    """

    name: ClassVar[str] = "sorted_sequential_select"

    allocation_ratio: float = 1.0
    """Part of a slice's chunks that a rank gets before the next rank's turn; 1: until it is full."""

    def __post_init__(self) -> None:
        check_ratio("allocation_ratio", self.allocation_ratio)

    def assign(self, work: ChunkWork) -> Int64Array:
        pieces = work.pieces
        firsts = np.searchsorted(pieces[:, 1], np.arange(len(work.slices) + 1))
        largest_first = np.argsort(-work.slice_areas, kind="stable")
        chunks = np.ascontiguousarray(pieces[:, 0])
        ranks: Int64Array = fill_by_slice(
            work.areas, largest_first, chunks, firsts, work.grid.cp_size, float(self.allocation_ratio)
        )
        return ranks
