"""Which tokens of a document are trained on: runs of targets, with the sum of those before each.

In:   one flag per token (``sources/masks.py``)
Out:  ``MaskRuns``; ``mask_runs.arrow``, whose columns are memory-mapped arrays (``paged_table.py``)

A target is a token that the label of the token before it asks for. A document's first token is none. Runs of
a document rise and do not touch, so that they say the same for the same flags.

Shapes: D documents, R runs, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.paged_table import Columns, ColumnTypes

__all__ = ["RUN_COLUMNS", "MaskRuns", "count_targets", "rows_of_documents", "runs_from_flags"]

Int64 = NDArray[np.int64]

RUN_COLUMNS: ColumnTypes = {name: np.dtype(np.int64) for name in ("start", "stop", "before")}
"""start, stop: token offsets in the document, stop not included. before: its targets before start."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskRuns:
    """The targets of D documents."""

    counts: Int64
    """int64 [D], runs of each document; 0 where nothing is trained on."""
    starts: Int64
    """int64 [R], token offsets in their document."""
    stops: Int64
    """int64 [R], not included."""

    def slice(self, first: int, last: int) -> "MaskRuns":
        """Return the runs of documents ``first`` to ``last`` (not included)."""
        low, high = int(self.counts[:first].sum()), int(self.counts[:last].sum())
        return MaskRuns(
            counts=self.counts[first:last], starts=self.starts[low:high], stops=self.stops[low:high]
        )

    @classmethod
    def concat(cls, parts: Sequence["MaskRuns"]) -> "MaskRuns":
        """Return the runs of one or more ``parts``, one after another."""
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__}
        )

    @property
    def before(self) -> Int64:
        """int64 [R], targets of the document before each run."""
        ends = np.cumsum(self.stops - self.starts)
        # What had been counted when the document began.
        base = np.concatenate([[0], ends])[np.cumsum(self.counts) - self.counts]
        return np.asarray(ends - (self.stops - self.starts) - np.repeat(base, self.counts), dtype=np.int64)

    @property
    def targets(self) -> Int64:
        """int64 [D], targets of each document."""
        ends = np.concatenate([[0], np.cumsum(self.stops - self.starts)])
        bounds = np.concatenate([[0], np.cumsum(self.counts)])
        return np.asarray(np.diff(ends[bounds]), dtype=np.int64)

    def columns(self) -> Columns:
        """Return the rows of ``mask_runs.arrow``."""
        return {"start": self.starts, "stop": self.stops, "before": self.before}


def runs_from_flags(flags: NDArray[np.bool_], lengths: Int64) -> MaskRuns:
    """Return the runs of documents whose flags lie end to end.

    Args:
        flags: bool [sum of lengths], True: the token is a target. That of a first token does not count.
        lengths: int64 [D], each at least 1.
    """
    firsts = np.cumsum(lengths) - lengths
    targets = flags.copy()
    targets[firsts] = False
    # The first token is no target, so that a document's end also ends a run.
    edges = np.diff(np.concatenate([[False], targets, [False]]).astype(np.int8))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    owners = np.searchsorted(firsts, starts, side="right") - 1
    return MaskRuns(
        counts=np.bincount(owners, minlength=len(lengths)).astype(np.int64),
        starts=starts - firsts[owners],
        stops=stops - firsts[owners],
    )


def rows_of_documents(first_runs: Int64, counts: Int64) -> Int64:
    """Return the rows of the runs of documents, one document after another: int64 [D] twice -> int64 [R]."""
    skipped = first_runs - (np.cumsum(counts) - counts)
    return np.asarray(np.repeat(skipped, counts) + np.arange(int(counts.sum())), dtype=np.int64)


@njit(nogil=True, cache=True)
def count_targets(
    first_runs: Int64,
    num_runs: Int64,
    runs: tuple[Int64, Int64, Int64],
    lows: Int64,
    highs: Int64,
) -> Int64:
    """Count the targets at offsets ``lows`` to ``highs`` (not included) of each piece's document.

    Args:
        first_runs: int64 [P], first run of the piece's document.
        num_runs: int64 [P]
        runs: start, stop and before of all runs, int64 [R] each.
        lows: int64 [P]
        highs: int64 [P], no lower; may lie beyond the document.

    Returns:
        int64 [P]
    """
    starts, stops, before = runs
    counts = np.zeros(len(lows), np.int64)
    for piece in range(len(lows)):
        for sign, offset in ((1, highs[piece]), (-1, lows[piece])):
            # The last run that begins before the offset.
            low, high = first_runs[piece], first_runs[piece] + num_runs[piece]
            while low < high:
                middle = (low + high) // 2
                if starts[middle] < offset:
                    low = middle + 1
                else:
                    high = middle
            if low > first_runs[piece]:
                run = low - 1
                counts[piece] += sign * (before[run] + min(stops[run], offset) - starts[run])
    return counts
