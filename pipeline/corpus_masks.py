"""Which tokens of pieces are trained on, over corpora with masks and corpora without.

In:   pieces, by global document ids; the mask runs of their corpora (``mask_runs.py``)
Out:  exact supervised counts (``planner/``, ``plan_source.py``), and the runs that labels are masked with
      (``mask_kernels.py``)

Shapes: P pieces, R runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.corpus_set import CorpusSet
from ringfeed.pipeline.documents_table import MASK_COLUMNS
from ringfeed.pipeline.mask_runs import RUN_COLUMNS, count_targets, rows_of_documents
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.supervision import target_range

__all__ = ["PieceMasks", "piece_masks", "piece_supervised"]

Int64 = NDArray[np.int64]

_NO_END = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PieceMasks:
    """The targets of the documents behind P pieces."""

    offsets: Int64
    """int64 [P + 1], piece p has runs ``offsets[p]`` to ``offsets[p + 1]``."""
    starts: Int64
    """int64 [R], token offsets in the document, rising within a piece."""
    stops: Int64
    """int64 [R], not included."""

    def as_tuple(self) -> tuple[Int64, Int64, Int64]:
        """Return the arrays as kernels take them."""
        return self.offsets, self.starts, self.stops


def piece_supervised(corpora: CorpusSet, pieces: Pieces, *, boundary: str) -> Int64:
    """Count the supervised tokens of pieces exactly: int64 [P].

    The tables are read, not checked (``CorpusSet.check_rows``).

    Raises:
        IndexError: if there is no such document.
        ValueError: for another ``boundary`` than ``supervision.target_range`` knows.
    """
    ids = pieces.documents
    lows, highs = target_range(corpora.lengths(ids), pieces.starts, pieces.lengths, boundary=boundary)
    counts = highs - lows
    for inside, runs, (first, count) in _masked(corpora, ids):
        counts[inside] = count_targets(first, count, runs, lows[inside], highs[inside])
    return counts


def piece_masks(corpora: CorpusSet, ids: Int64) -> PieceMasks | None:
    """Return the mask runs of the documents of P pieces; None where none of them has a mask.

    Raises:
        IndexError: if there is no such document.
        CorruptDataError: if a byte of what the tables say of them changed.
    """
    parts = list(_masked(corpora, ids))
    if not parts:
        return None
    # Also those of skipped documents, which nobody else checks: they say where to read.
    corpora.check_rows(ids)
    # A document without a mask is one run without an end.
    counts = np.ones(len(ids), dtype=np.int64)
    for inside, _, (_, count) in parts:
        counts[inside] = count
    offsets = np.concatenate([[0], np.cumsum(counts)])
    starts = np.zeros(int(offsets[-1]), dtype=np.int64)
    stops = np.full(int(offsets[-1]), _NO_END)
    for inside, runs, (first, count) in parts:
        places = rows_of_documents(offsets[:-1][inside], count)
        rows = rows_of_documents(first, count)
        starts[places], stops[places] = runs[0][rows], runs[1][rows]
    return PieceMasks(offsets=offsets, starts=starts, stops=stops)


def _masked(
    corpora: CorpusSet, ids: Int64
) -> Iterator[tuple[NDArray[np.bool_], tuple[Int64, Int64, Int64], tuple[Int64, Int64]]]:
    """Yield per corpus with masks which ``ids`` are its own, its runs, and the first and number of theirs."""
    if all(corpus.mask_runs is None for corpus in corpora.corpora):
        return
    sources = corpora.source_of(ids)
    for source, corpus in enumerate(corpora.corpora):
        inside = sources == source
        if corpus.mask_runs is None or not inside.any():
            continue
        rows = ids[inside] - corpora.bounds[source]
        first, count = (corpus.documents[name][rows].view(np.int64) for name in MASK_COLUMNS)
        start, stop, before = (corpus.mask_runs[name].view(np.int64) for name in RUN_COLUMNS)
        yield inside, (start, stop, before), (first, count)
