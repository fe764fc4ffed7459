"""Rows that were packed before: what a plan that keeps them must not ask for, and whether they fit its packs.

In:   ``PlanOptions`` with ``balance=given``, the first document of each row (``documents.py``)
Out:  nothing, or an error that names the way out; the pack of each piece, for ``strategies.py``

Rows are drawn whole, in corpus order or shuffled; the documents of a row stay in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringfeed.sharding.padding import slot_lengths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringfeed.pipeline.planner.documents import DocumentTable
    from ringfeed.pipeline.planner.options import PlanOptions
    from ringfeed.pipeline.step_packs import Pieces

__all__ = ["check_given", "check_rows_fit", "packs_of_rows", "row_documents"]

_ROWS_AT_ONCE = 1 << 18
_LOSING = ("truncate", "drop")


def check_given(options: PlanOptions, *, is_given: bool) -> None:
    """Refuse options that would break rows up.

    Args:
        options: of a plan.
        is_given: does its balance keep rows as they are?

    Raises:
        ValueError: with what would do.
    """
    if not is_given:
        return
    if options.mixture is not None:
        raise ValueError(
            "balance=given draws whole rows, one corpus after the other or shuffled over all; leave mixture "
            "and weights out, or use another balance"
        )
    if options.overflow in _LOSING:
        raise ValueError(
            f"balance=given keeps rows as they are, overflow={options.overflow} would change them; leave it "
            "out: a row that is too long is refused"
        )


def check_rows_fit(documents: DocumentTable, options: PlanOptions, row_starts: NDArray[np.int64]) -> None:
    """Refuse rows that take more slots than a pack has.

    Args:
        documents: of the plan.
        options: of the plan.
        row_starts: int64 [R + 1].

    Raises:
        ValueError: names the first one, and the smallest budget that would do for all.
    """
    first, num_long, most = -1, 0, 0
    for low in range(0, len(row_starts) - 1, _ROWS_AT_ONCE):
        bounds = row_starts[low : low + _ROWS_AT_ONCE + 1]
        ids = np.arange(int(bounds[0]), int(bounds[-1]), dtype=np.int64)
        slots = slot_lengths(documents.lengths(ids), multiple=options.document_multiple)
        taken = np.diff(np.concatenate([[0], np.cumsum(slots)])[bounds - bounds[0]])
        long = np.flatnonzero(taken > options.pack_tokens)
        if len(long) and first < 0:
            first = low + int(long[0])
        num_long += len(long)
        most = max(most, int(taken.max(initial=0)))
    if num_long:
        raise ValueError(
            f"{num_long} rows do not fit into pack_tokens={options.pack_tokens} with documents padded to a "
            f"multiple of {options.document_multiple}: the first one is documents {row_starts[first]} to "
            f"{row_starts[first + 1] - 1}; use pack_tokens={most} or more, or a smaller multiple"
        )


def row_documents(rows: NDArray[np.int64], row_starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the documents of rows, row after row: int64 [K] -> int64 [D]."""
    counts = row_starts[rows + 1] - row_starts[rows]
    before = np.cumsum(counts) - counts
    return np.asarray(np.repeat(row_starts[rows] - before, counts) + np.arange(int(counts.sum())))


def packs_of_rows(pieces: Pieces, row_starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pack of each piece, int64 [P]: a new one with each row, and with each epoch."""
    rows = np.searchsorted(row_starts, pieces.documents, side="right")
    changes = (np.diff(rows) != 0) | (np.diff(pieces.epochs) != 0)
    return np.concatenate([[0], np.cumsum(changes)])[: len(rows)].astype(np.int64)
