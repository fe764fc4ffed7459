"""Cut one rank's queries into blocks that need only a short, contiguous range of keys.

In:   for each local token the keys it may see, as a range of chunk positions
Out:  ``QueryBlock``s for ``block_attention.py``, in local order

A document's mask, causal or with a window, leaves a token one stretch of its document.
Neighbouring local tokens have nearly the same one, so a block of them reads one slice of the
keys, and no mask is ever larger than ``MASK_BUDGET`` elements.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MASK_BUDGET", "QueryBlock", "plan_query_blocks"]

MASK_BUDGET = 1 << 22
"""Elements in one block's mask: 16 MiB as the float32 mask that SDPA makes of it."""
_MAX_ROWS = 256
# A call costs about as much as this many query-key pairs, so joining two blocks may waste that.
_CALL_COST = 1 << 16


class QueryBlock(NamedTuple):
    """Local rows ``[row_start, row_stop)`` and the chunk's keys they may see."""

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    last_start: int
    """From here on no row's keys begin: every earlier key is hidden from some row."""
    first_stop: int
    """Up to here no row's keys end. Rows without keys count in neither."""

    @property
    def rows(self) -> slice:
        """The block's local rows."""
        return slice(self.row_start, self.row_stop)

    @property
    def keys(self) -> slice:
        """The block's keys, as chunk positions."""
        return slice(self.key_start, self.key_stop)

    @property
    def num_pairs(self) -> int:
        """Elements in this block's mask."""
        return (self.row_stop - self.row_start) * (self.key_stop - self.key_start)


def plan_query_blocks(key_starts: NDArray[np.int64], key_stops: NDArray[np.int64]) -> tuple[QueryBlock, ...]:
    """Group L local rows into blocks; rows that see no key belong to no block or ride along.

    Args:
        key_starts: int64 [L], first chunk position that the row may see.
        key_stops: int64 [L], one past the last; at most ``key_starts`` for a row without keys.

    Returns:
        Blocks in local order that cover every row with a key. One row may pass
        ``MASK_BUDGET`` alone; a block of several never does.
    """
    sees_any = key_stops > key_starts
    rows = np.flatnonzero(sees_any)
    if len(rows) == 0:
        return ()
    return tuple(_joined(_granules(rows, key_starts[rows], key_stops[rows])))


def _granules(
    rows: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> Iterator[QueryBlock]:
    """Yield the smallest blocks: cut where the keys jump, and where the budget ends."""
    widest = int((stops - starts).max())
    granule = max(1, min(_MAX_ROWS // 4, MASK_BUDGET // (2 * widest)))
    is_cut = np.ones(len(rows), dtype=np.bool_)
    # From a token of a document to the next, an end of the range stays or grows by one, window or not.
    is_cut[1:] = _jumps(starts) | _jumps(stops) | (np.diff(rows) != 1)
    run_starts = np.flatnonzero(is_cut)
    in_run = np.arange(len(rows)) - np.repeat(run_starts, np.diff(run_starts, append=len(rows)))
    cuts = np.flatnonzero(in_run % granule == 0)
    ends = np.append(cuts[1:], len(rows)) - 1
    columns = (rows[cuts], rows[ends] + 1, starts[cuts], stops[ends], starts[ends], stops[cuts])
    yield from map(QueryBlock, *(column.tolist() for column in columns))


def _jumps(ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    steps = np.diff(ends)
    return (steps < 0) | (steps > 1)


def _joined(granules: Iterator[QueryBlock]) -> Iterator[QueryBlock]:
    """Yield ``granules`` with neighbours joined wherever one call is cheaper than two."""
    block = next(granules)
    waste = 0
    for granule in granules:
        union = QueryBlock(
            block.row_start,
            granule.row_stop,
            min(block.key_start, granule.key_start),
            max(block.key_stop, granule.key_stop),
            max(block.last_start, granule.last_start),
            min(block.first_stop, granule.first_stop),
        )
        extra = union.num_pairs - block.num_pairs - granule.num_pairs
        fits = union.row_stop - union.row_start <= _MAX_ROWS and union.num_pairs <= MASK_BUDGET
        if fits and waste + extra <= max(_CALL_COST, block.num_pairs // 4):
            block, waste = union, waste + extra
        else:
            yield block
            block, waste = granule, 0
    yield block
