"""Steps without a supervised token: packs change places until every step has one (law L7).

In:   the packs of a window in plan order (``packing.py``), how many of their tokens are supervised
Out:  the same packs in another order

Without a supervised token a step has no loss to train on. Where the user asks for it (``unsupervised:
redraw``), such a step gives one of its packs to the nearest step that has supervised packs to spare, and gets
one of them. Of the pairs it could change, it takes the one whose costs are closest, so that balance is kept.
Where no step has one to spare, the rest of the look-ahead gives single pieces (``redraw_ahead.py``).
Which packs change depends on the window alone: a plan that is resumed or extended changes the same ones.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.pack_lengths import PackShape
from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.options import Balance, PlanOptions, Unsupervised
from ringfeed.pipeline.planner.packing import Packing
from ringfeed.pipeline.planner.redraw_ahead import bring_in

__all__ = ["Redraw", "redraw_steps"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Redraw:
    """Redraws the steps of one window after the other."""

    documents: DocumentTable
    options: PlanOptions

    @classmethod
    def wanted_for(cls, documents: DocumentTable, options: PlanOptions) -> "Redraw | None":
        """Return what redraws steps, if the user asks for it and it is known what is supervised."""
        wanted = options.unsupervised is Unsupervised.REDRAW and documents.knows_masks
        return cls(documents, options) if wanted else None

    def __call__(self, packing: Packing, first_packs: Int64, *, first_step: int) -> Packing:
        """Return the packs of a window in an order in which every step has a supervised token.

        Raises:
            ValueError: as ``redraw_steps``.
        """
        pieces, offsets = packing.packed.pieces, packing.offsets
        if len(pieces) == 0:
            return packing
        counts = self.documents.supervised(pieces, boundary=self.options.boundary_label)
        num_steps = len(first_packs) - 1
        if (np.add.reduceat(counts, offsets[:-1]) > 0).sum() < num_steps and self._may_exchange:
            ahead = self.documents.supervised(packing.carried.pieces, boundary=self.options.boundary_label)
            packing, counts = bring_in(
                packing,
                wanted=num_steps,
                packed=counts,
                carried=ahead,
                pack_tokens=self.options.pack_tokens,
            )
        costs = self.options.cost_model.piece_costs(packing.packed.pieces.lengths)
        supervised, costs = (np.add.reduceat(values, offsets[:-1]) for values in (counts, costs))
        return redraw_steps(packing, first_packs, supervised=supervised, costs=costs, first_step=first_step)

    @property
    def _may_exchange(self) -> bool:
        """Return whether single pieces may change places: not where packs are in order, cut, or variable."""
        kept = self.options.balance in (Balance.WORK, Balance.BEST_FIT)
        return kept and self.options.pack_shape is PackShape.FIXED


def redraw_steps(
    packing: Packing, first_packs: Int64, *, supervised: Int64, costs: Int64, first_step: int
) -> Packing:
    """Return the packs in an order in which every step has a supervised token.

    Args:
        packing: of whole steps.
        first_packs: int64 [S + 1], packs before each step.
        supervised: int64 [K], supervised tokens of each pack.
        costs: int64 [K]
        first_step: number of the first step, for errors.

    Raises:
        ValueError: if there are fewer packs with a supervised token than steps.
    """
    num_steps = len(first_packs) - 1
    has_some = supervised > 0
    steps = np.repeat(np.arange(num_steps), np.diff(first_packs))
    spare = np.bincount(steps[has_some], minlength=num_steps) - 1
    if (spare >= 0).all():
        return packing
    if int(has_some.sum()) < num_steps:
        raise ValueError(
            f"steps {first_step} to {first_step + num_steps - 1} have {int(has_some.sum())} packs with a "
            f"supervised token, {num_steps} steps need one each; raise window, use fewer or larger steps, or "
            "leave documents without a supervised token out of the corpus"
        )
    order = np.arange(len(supervised))
    for step in np.flatnonzero(spare < 0).tolist():
        donors = np.flatnonzero(spare > 0)
        # The nearest one, and of two the earlier one. There is one, as there are packs enough.
        donor = int(donors[np.abs(donors - step).argmin()])
        ours = np.arange(*first_packs[step : step + 2])
        theirs = np.arange(*first_packs[donor : donor + 2])
        theirs = theirs[has_some[order[theirs]]]
        gaps = np.abs(costs[order[ours]][:, None] - costs[order[theirs]][None, :])
        mine, other = np.unravel_index(int(gaps.argmin()), gaps.shape)
        order[[ours[mine], theirs[other]]] = order[[theirs[other], ours[mine]]]
        spare[step], spare[donor] = spare[step] + 1, spare[donor] - 1
    return _reordered(packing, order)


def _reordered(packing: Packing, order: Int64) -> Packing:
    """Return the packs in ``order``; pieces of a pack stay as they are."""
    sizes = np.diff(packing.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    pieces = np.repeat(packing.offsets[:-1][order] - offsets[:-1], sizes) + np.arange(int(offsets[-1]))
    # A pack takes the slate of the one whose place it takes: their costs are close.
    return replace(packing, packed=packing.packed.take(pieces), offsets=offsets)
