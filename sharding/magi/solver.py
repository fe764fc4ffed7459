"""What a solver is: from the work of every chunk to the rank that gets it.

In:   ``ChunkWork``, the mask cut into chunks (``areas.py``)
Out:  the rank of every chunk, for ``partition.py``

Shapes: S slices, N chunks, R ranks, P pieces.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np

from ringfeed.sharding.magi.areas import chunk_areas, chunk_pieces, slice_areas
from ringfeed.sharding.magi.chunking import ChunkGrid
from ringfeed.sharding.magi.slices import MaskSlices
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["ChunkWork", "Solver", "check_ratio"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkWork:
    """The work of the chunks of one stream."""

    grid: ChunkGrid
    slices: MaskSlices
    """In query order (``MaskSlices.by_query``)."""
    areas: Int64Array
    """int64 [N], query-key pairs of each chunk."""

    @classmethod
    def measure(cls, grid: ChunkGrid, slices: MaskSlices) -> "ChunkWork":
        """Return the work of the chunks of ``grid`` under the mask ``slices``."""
        ordered = slices.by_query()
        areas = chunk_areas(ordered, chunk_size=grid.stride, num_chunks=grid.num_chunks)
        return cls(grid=grid, slices=ordered, areas=areas)

    @property
    def chunks_per_rank(self) -> int:
        """The most chunks that a rank may have."""
        return -(-self.grid.num_chunks // self.grid.cp_size)

    @property
    def heaviest_first(self) -> Int64Array:
        """Chunk ids by falling area, equal ones by rising id: int64 [N]."""
        order: Int64Array = np.argsort(-self.areas, kind="stable")
        return order

    @property
    def pieces(self) -> Int64Array:
        """int64 [P, 4], chunk, slice and key range of each piece with a pair (``areas.chunk_pieces``)."""
        return chunk_pieces(self.slices, chunk_size=self.grid.stride)

    @property
    def slice_areas(self) -> Int64Array:
        """int64 [S], query-key pairs of each slice."""
        return slice_areas(self.slices)


class Solver(Protocol):
    """Deals chunks out to ranks. A solver is a frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """MagiAttention's word for it."""
    takes_uneven: ClassVar[bool] = False
    """Whether it can deal out a number of chunks that the ranks do not divide."""

    def assign(self, work: ChunkWork) -> Int64Array:
        """Return the rank of each chunk, int64 [N].

        The number of chunks is a multiple of the ranks, unless the solver ``takes_uneven``.

        Raises:
            ValueError: if it finds no assignment.
        """
        ...

    @property
    def options(self) -> dict[str, Any]:
        """The options with which ``make_solver`` makes the same solver again."""
        return {option.name: getattr(self, option.name) for option in fields(self)}  # type: ignore[arg-type]


def check_ratio(name: str, value: object) -> None:
    """Refuse an option that is no part of 1.

    Raises:
        ValueError: if it is no number, or outside [0, 1].
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
