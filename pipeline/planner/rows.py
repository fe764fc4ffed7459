"""The rows of a window's steps: slates, costs, supervised counts, and sums for the report.

In:   a ``Window`` (``windows.py``)
Out:  ``PackRows`` (``pipeline/step_packs.py``) and one line of sums per step (``tally.py``)
"""

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.options import Overflow, PlanOptions
from ringfeed.pipeline.planner.packing import cut_slates
from ringfeed.pipeline.planner.tally import StepTally, count_distances
from ringfeed.pipeline.planner.windows import Window
from ringfeed.pipeline.step_packs import PackRows

__all__ = ["window_rows"]

Int64 = NDArray[np.int64]


def window_rows(window: Window, documents: DocumentTable, options: PlanOptions) -> tuple[PackRows, StepTally]:
    """Return the rows of all packs of ``window``, and sums per step.

    Raises:
        ValueError: if a step has no supervised token.
    """
    packing = window.packing
    pieces, offsets = packing.packed.pieces, packing.offsets
    num_packs = len(offsets) - 1
    within = np.repeat(np.arange(window.num_steps), np.diff(window.first_packs))
    packs = np.arange(num_packs) - window.first_packs[within]
    lengths_of_documents = documents.lengths(pieces.documents)
    costs = _sums(options.cost_model.piece_costs(pieces.lengths), offsets)
    tokens = _by_source(pieces.lengths, window, documents)
    slates = packing.slates
    if slates is None:
        slates = cut_slates(within, packs, costs, slate_size=options.packs_per_slate)
    rows = PackRows(
        within + window.start.first_step,
        packs,
        slates,
        costs,
        _supervised(window, documents, options),
        offsets,
        pieces,
        tokens,
    )
    first_pieces = offsets[window.first_packs]
    kept = lengths_of_documents
    if options.overflow is Overflow.TRUNCATE:
        kept = np.minimum(kept, options.longest_piece)
    late = np.abs(np.repeat(rows.steps, np.diff(offsets)) - packing.packed.arrival_steps)
    tally = StepTally(
        packs=np.diff(window.first_packs),
        pieces=np.diff(first_pieces),
        tokens=_sums(pieces.lengths, first_pieces),
        slots=_sums(packing.packed.slots, first_pieces),
        room=_sums(options.pack_lengths.of(_sums(packing.packed.slots, offsets)), window.first_packs),
        split=_sums(((pieces.starts == 0) & (pieces.lengths < kept)).astype(np.int64), first_pieces),
        displacement=_sums(late, first_pieces),
        displacement_max=np.maximum.reduceat(late, first_pieces[:-1]) if num_packs else late,
        displacement_counts=count_distances(
            np.repeat(within, np.diff(offsets)), late, num_steps=window.num_steps
        ),
    )
    return rows, tally


def _supervised(window: Window, documents: DocumentTable, options: PlanOptions) -> Int64 | None:
    """Return the supervised tokens per pack and source: int64 [K, S], None where masks are unknown."""
    if not documents.knows_masks:
        return None
    counts = documents.supervised(window.packing.packed.pieces, boundary=options.boundary_label)
    by_pack = _by_source(counts, window, documents)
    by_step = _sums(by_pack.sum(axis=1), window.first_packs)
    if len(by_step) and not by_step.all():
        step = window.start.first_step + int((by_step == 0).argmax())
        raise ValueError(
            f"step {step} would have no supervised token: nothing in it is trained on; plan with "
            "unsupervised=redraw, use more or larger packs per step, or leave such documents out"
        )
    return by_pack


def _by_source(values: Int64, window: Window, documents: DocumentTable) -> Int64:
    """Sum a value of each piece per pack and source: int64 [P] -> int64 [K, S]."""
    offsets = window.packing.offsets
    num_packs, num_sources = len(offsets) - 1, len(documents.sources)
    if num_sources == 1:
        return _sums(values, offsets)[:, None]
    cells = np.repeat(np.arange(num_packs) * num_sources, np.diff(offsets))
    cells += documents.source_of(window.packing.packed.pieces.documents)
    # Counted in doubles, which are exact up to 2^53.
    sums = np.bincount(cells, weights=values, minlength=num_packs * num_sources)
    return sums.astype(np.int64).reshape(num_packs, num_sources)


def _sums(values: Int64, offsets: Int64) -> Int64:
    """Return the sum of each group values[offsets[i]:offsets[i + 1]]; no group is empty."""
    if len(offsets) == 1:
        return np.empty(0, np.int64)
    return np.add.reduceat(values, offsets[:-1])
