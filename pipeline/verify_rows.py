"""Check that a plan which keeps rows as they were packed did so: each pack is one row, whole and in order.

In:   a plan with ``balance: given``, the first document of each row (``planner/documents.py``)
Out:  findings

Which pieces of a document are there is checked for every plan (``verify_coverage.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.findings import Finding, shorten
from ringfeed.pipeline.planner.options import Balance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.planner.documents import DocumentTable
    from ringfeed.pipeline.step_packs import PackRows

__all__ = ["check_rows_kept", "row_faults"]


def check_rows_kept(plan: Plan, documents: DocumentTable) -> list[Finding]:
    """Return the packs that are no row; none for a plan of another balance."""
    if plan.recipe.balance != Balance.GIVEN:
        return []
    row_starts = documents.row_starts()
    faults = [fault for block in plan.blocks() for fault in row_faults(block.rows, row_starts)]
    return shorten([Finding(file=str(plan.path), problem=fault) for fault in faults], what="packs")


def row_faults(rows: PackRows, row_starts: NDArray[np.int64]) -> list[str]:
    """Return the packs of ``rows`` that are no row.

    Args:
        rows: packs, each of at least one piece.
        row_starts: int64 [R + 1].
    """
    documents, counts = rows.pieces.documents, np.diff(rows.offsets)
    firsts = documents[rows.offsets[:-1]]
    row = np.clip(np.searchsorted(row_starts, firsts, side="right") - 1, 0, len(row_starts) - 2)
    whole = (row_starts[row] == firsts) & (row_starts[row + 1] - firsts == counts)
    expected = np.repeat(firsts, counts) + np.arange(len(documents)) - np.repeat(rows.offsets[:-1], counts)
    in_order = np.logical_and.reduceat(documents == expected, rows.offsets[:-1])
    return [
        f"pack {rows.packs[k]} of step {rows.steps[k]} holds documents "
        f"{documents[rows.offsets[k] : rows.offsets[k + 1]].tolist()[:8]}, which is no row as it was packed"
        for k in np.flatnonzero(~(whole & in_order)).tolist()
    ]
