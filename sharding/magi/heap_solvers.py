"""Solvers that give the heaviest chunk first, to a rank with little work so far.

In:   ``ChunkWork`` (``solver.py``)
Out:  the rank of every chunk; the loops are in ``heap_kernels.py``
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringfeed.sharding.magi.heap_kernels import Limits, fill_by_overlap, fill_lowest
from ringfeed.sharding.magi.segments import key_segments
from ringfeed.sharding.magi.solver import ChunkWork, Solver, check_ratio
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["BatchToppHeap", "MinHeap", "ToppHeap"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MinHeap(Solver):
    """Each chunk to the rank with the least work that has room. MagiAttention's default.

    Equally heavy chunks go larger id first: the other way round than in ``ToppHeap``.
    """

    name: ClassVar[str] = "min_heap"
    takes_uneven: ClassVar[bool] = True

    def assign(self, work: ChunkWork) -> Int64Array:
        order = np.argsort(work.areas, kind="stable")[::-1]
        ranks: Int64Array = fill_lowest(work.areas, order, work.grid.cp_size, work.chunks_per_rank)
        return ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class ToppHeap(Solver):
    """Each chunk to one of the ranks with the least work: the one whose keys overlap its own most.

    Raises:
        ValueError: if ``top_p`` is outside [0, 1].
    """

    name: ClassVar[str] = "topp_heap"

    top_p: float = 0.0
    """Part of the ranks that are looked at, at least one rank."""

    def __post_init__(self) -> None:
        check_ratio("top_p", self.top_p)

    def assign(self, work: ChunkWork) -> Int64Array:
        return _fill(work, top_p=self.top_p, batch=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchToppHeap(Solver):
    """As ``ToppHeap``, but the ranks are chosen once for ``num_of_select_chunk`` chunks.

    Raises:
        ValueError: if ``top_p`` is outside [0, 1], or ``num_of_select_chunk`` below 1.
    """

    name: ClassVar[str] = "batch_topp_heap"

    top_p: float = 0.0
    """Part of the ranks that are looked at, at least one rank."""
    num_of_select_chunk: int = 1
    """Chunks of a batch."""

    def __post_init__(self) -> None:
        check_ratio("top_p", self.top_p)
        batch = self.num_of_select_chunk
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise ValueError(f"num_of_select_chunk must be an integer of at least 1, got {batch!r}")

    def assign(self, work: ChunkWork) -> Int64Array:
        return _fill(work, top_p=self.top_p, batch=self.num_of_select_chunk)


def _fill(work: ChunkWork, *, top_p: float, batch: int) -> Int64Array:
    cp_size = work.grid.cp_size
    num_candidates = max(1, math.ceil(cp_size * top_p))
    limits = Limits(
        num_ranks=cp_size, capacity=work.chunks_per_rank, num_candidates=num_candidates, batch=batch
    )
    ranks: Int64Array = fill_by_overlap(
        work.areas,
        work.heaviest_first,
        limits,
        key_segments(work.pieces, num_chunks=work.grid.num_chunks),
    )
    return ranks
