"""Deal the chunks of a stream out to ranks: the result of MagiAttention's dispatch.

In:   slices (``slices.py``), a chunk rule (``chunking.py``), a solver (``solver.py``)
Out:  ``MagiPartition``: chunks per rank, index maps, positions, gather index

Shapes: T tokens in the stream, T' with padding, R ranks, N chunks, L local tokens.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from ringfeed.sharding.index_map import IndexMap, expand_runs
from ringfeed.sharding.layout_contract import check_ranks
from ringfeed.sharding.magi.areas import check_area_range
from ringfeed.sharding.magi.chunk_kernels import chunk_runs, first_without_chunk
from ringfeed.sharding.magi.chunking import ChunkGrid, ChunkRule
from ringfeed.sharding.magi.slices import MaskSlices
from ringfeed.sharding.magi.solver import ChunkWork, Solver
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["MAGI_VERSION", "MagiPartition", "partition_stream"]

MAGI_VERSION = "1.1.1"
"""The MagiAttention release whose dispatch this is."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MagiPartition:
    """Which chunks of a stream each rank holds, in rising order."""

    grid: ChunkGrid
    slices: MaskSlices
    """As they were given; last the padding's, if there is padding."""
    chunk_ranks: Int64Array
    """int64 [N], the rank that holds each chunk."""
    chunk_areas: Int64Array
    """int64 [N], query-key pairs of each chunk's queries."""
    rule: ChunkRule
    """How long chunks are."""
    solver: Solver
    """Who got which."""

    @property
    def made_by(self) -> dict[str, Any]:
        """Rule and solver as JSON-able values: algorithm and options, chunks per rank, uneven."""
        return {
            "algorithm": self.solver.name,
            **self.solver.options,
            "min_chunks_per_rank": self.rule.min_chunks_per_rank,
            "uneven": self.rule.uneven,
        }

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk by the rule; at cp 1 there is one chunk all the same."""
        return self.grid.chunk_size

    @property
    def pad_size(self) -> int:
        """Tokens that are appended to the stream: T' - T."""
        return self.grid.pad_size

    @property
    def padded_total(self) -> int:
        """T'."""
        return self.grid.padded_total

    @property
    def partitions(self) -> list[list[int]]:
        """The chunks of each rank, rising."""
        return [np.flatnonzero(self.chunk_ranks == rank).tolist() for rank in range(self.grid.cp_size)]

    @property
    def shard_lens(self) -> list[int]:
        """Tokens of each rank, L."""
        return self._per_rank(self.grid.runs()[:, 1])

    @property
    def rank_areas(self) -> list[int]:
        """Query-key pairs of each rank's queries, for one head."""
        return self._per_rank(self.chunk_areas)

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean; 1 is even."""
        areas = self.rank_areas
        return max(areas) * len(areas) / max(1, sum(areas))

    @property
    def max_valid_ids(self) -> int:
        """Where the last query that has keys ends."""
        return self.slices.query_end

    @property
    def index_maps(self) -> list[IndexMap]:
        """The share of every rank of the padded stream of T' tokens."""
        return self._maps(0, self.grid.cp_size)

    def index_map(self, rank: int) -> IndexMap:
        """Return the share of one rank, as ``index_maps`` has it.

        Raises:
            ValueError: if there is no such rank.
        """
        check_ranks(self.grid.cp_size, rank)
        return self._maps(rank, 1)[0]

    def _maps(self, first_rank: int, num_ranks: int) -> list[IndexMap]:
        grid = self.grid
        runs, bounds, lengths = chunk_runs(
            self.chunk_ranks, grid.stride, grid.padded_total, first_rank, num_ranks
        )
        runs.flags.writeable = False
        return [
            IndexMap.from_merged(runs[first:end], grid.padded_total, length)
            for (first, end), length in zip(pairwise(bounds.tolist()), lengths.tolist(), strict=True)
        ]

    def gather_index(self, rank: int) -> Int64Array:
        """Return the stream's token that each local token is, int64 [L]; -1 = padding.

        Raises:
            ValueError: if there is no such rank.
        """
        tokens = self._tokens(rank)
        return np.where(tokens < self.grid.total, tokens, -1)

    def position_ids(self, rank: int) -> Int64Array:
        """Return what MagiAttention's ``get_position_ids`` returns, int64 [L].

        Positions in the stream, not in the document, cut off at ``max_valid_ids - 1``: several tokens
        have the last one. To move tensors use ``index_maps`` or ``gather_index``.

        Raises:
            ValueError: if there is no such rank.
        """
        return np.minimum(self._tokens(rank), self.max_valid_ids - 1)

    @property
    def fingerprint(self) -> str:
        """32 hex digits over the mask, the rule and the result: equal on machines that agree."""
        grid = self.grid
        facts = {
            "magi": MAGI_VERSION,
            "total": grid.total,
            "pad_size": grid.pad_size,
            "cp_size": grid.cp_size,
            "chunk_size": grid.chunk_size,
            **self.made_by,
        }
        ordered = self.slices.by_query()
        digest = xxhash.xxh3_128(json.dumps(facts, sort_keys=True).encode())
        for array in (ordered.ranges, ordered.kinds, self.chunk_ranks):
            # Explicit lengths and byte order: nothing can move from one array to the next.
            digest.update(f"{len(array)};".encode() + np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()

    def _tokens(self, rank: int) -> Int64Array:
        check_ranks(self.grid.cp_size, rank)
        return expand_runs(self.grid.runs()[self.chunk_ranks == rank])

    def _per_rank(self, chunk_values: Int64Array) -> list[int]:
        sums = np.zeros(self.grid.cp_size, dtype=np.int64)
        np.add.at(sums, self.chunk_ranks, chunk_values)
        totals: list[int] = sums.tolist()
        return totals


def partition_stream(
    slices: MaskSlices, total: int, *, cp_size: int, rule: ChunkRule, solver: Solver
) -> MagiPartition:
    """Deal a stream out to ``cp_size`` ranks.

    Args:
        slices: the mask of the stream; tokens in no slice see nothing.
        total: T.
        cp_size: R.
        rule: how long chunks are.
        solver: who gets which.

    Raises:
        ValueError: if a slice does not lie in the stream, no query has a key, there is less than one chunk
            per rank, or the solver leaves a rank without a chunk.
    """
    check_ranks(cp_size)
    grid = rule.grid(total, cp_size=cp_size)
    slices.check_inside(total)
    check_area_range(slices)
    if not slices.query_end:
        raise ValueError(f"none of the {len(slices)} slices has both queries and keys; give at least one")
    if grid.pad_size:
        slices = slices.with_padding(total, grid.padded_total)
    work = ChunkWork.measure(grid, slices)
    ranks = solver.assign(work) if cp_size > 1 else np.zeros(1, dtype=np.int64)
    _check_all_hold_chunks(ranks, grid, solver)
    return MagiPartition(
        grid=grid, slices=slices, chunk_ranks=ranks, chunk_areas=work.areas, rule=rule, solver=solver
    )


def _check_all_hold_chunks(ranks: Int64Array, grid: ChunkGrid, solver: Solver) -> None:
    without = first_without_chunk(ranks, grid.cp_size)
    if without >= 0:
        raise ValueError(
            f"algorithm {solver.name!r} leaves rank {without} without one of {grid.num_chunks} "
            f"chunks of {grid.chunk_size} tokens; every one of cp_size={grid.cp_size} ranks needs one: use "
            "'sequential_select', or uneven=False"
        )
