"""Solvers that keep neighbouring chunks together.

In:   ``ChunkWork`` (``solver.py``)
Out:  the rank of every chunk
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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
        shares = _Shares(work)
        for chunks in _chunks_by_slice(work):
            at_once = max(1, math.ceil(self.allocation_ratio * len(chunks)))
            shares.take_lowest()
            for chunk in chunks:
                if shares.ranks[chunk] < 0:
                    shares.give(chunk)
                    if self.allocation_ratio < 1 and shares.num_given == at_once:
                        shares.rotate()
            shares.put_back()
            if not shares.has_room:
                break
        shares.fill_up(np.flatnonzero(work.areas == 0))
        return np.array(shares.ranks, dtype=np.int64)


class _Shares:
    """The ranks' shares while they fill: one in the hand, the others in a heap by (work, rank)."""

    def __init__(self, work: ChunkWork) -> None:
        self.ranks = [-1] * work.grid.num_chunks
        self.num_given = 0
        self._areas = work.areas.tolist()
        self._room = [work.chunks_per_rank] * work.grid.cp_size
        self._heap = [(0.0, rank) for rank in range(work.grid.cp_size)]
        self._sum, self._rank = 0.0, 0

    @property
    def has_room(self) -> bool:
        return bool(self._heap)

    def take_lowest(self) -> None:
        """Take the share with the least work into the hand."""
        self._sum, self._rank = heapq.heappop(self._heap)
        self.num_given = 0

    def give(self, chunk: int) -> None:
        """Give a chunk to the share in the hand; when that is full, go on with the next one."""
        self.ranks[chunk] = self._rank
        self._room[self._rank] -= 1
        self._sum += self._areas[chunk]
        self.num_given += 1
        if self._room[self._rank] == 0 and self._heap:
            self.take_lowest()

    def rotate(self) -> None:
        """Put the share in the hand back and take the lowest one, which may be the same."""
        self._sum, self._rank = heapq.heappushpop(self._heap, (self._sum, self._rank))
        self.num_given = 0

    def put_back(self) -> None:
        """Put the share in the hand back, unless it is full."""
        if self._room[self._rank]:
            heapq.heappush(self._heap, (self._sum, self._rank))

    def fill_up(self, chunks: Int64Array) -> None:
        """Give chunks without a pair, in this order, to the shares that have room, the lowest first."""
        left = iter(chunks.tolist())
        while self._heap:
            _, rank = heapq.heappop(self._heap)
            for _ in range(self._room[rank]):
                self.ranks[next(left)] = rank


def _chunks_by_slice(work: ChunkWork) -> Iterator[list[int]]:
    """Yield the chunks of each slice from the last to the first, the largest slice first."""
    pieces = work.pieces
    firsts = np.searchsorted(pieces[:, 1], np.arange(len(work.slices) + 1)).tolist()
    for number in np.argsort(-work.slice_areas, kind="stable").tolist():
        yield pieces[firsts[number] : firsts[number + 1], 0][::-1].tolist()
