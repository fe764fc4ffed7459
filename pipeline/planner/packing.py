"""A pool of pieces made into packs, and what every strategy gives back.

In:   ``StreamPieces`` (``stream.py``): pieces carried over from the window before, then new ones
Out:  ``Packing``: pieces in pack order, and those to carry on

Packs of a window stand near the order in which documents arrived, never sorted by length: steps cut from
them are alike.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.cost import CostModel
from ringfeed.pipeline.planner.options import PlanOptions, Schedule
from ringfeed.pipeline.planner.stream import StreamPieces

__all__ = ["Packing", "Pool", "PoolSources", "Shape", "cut_slates", "group_by_pack"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that packing works with."""

    pack_tokens: int
    multiple: int
    packs_per_step: int
    window: int
    slate_size: int
    schedule: Schedule
    long_tokens: int
    cost_model: CostModel

    @classmethod
    def of(cls, options: PlanOptions) -> "Shape":
        """Return the shape that ``options`` ask for."""
        return cls(
            pack_tokens=options.pack_tokens,
            multiple=options.document_multiple,
            packs_per_step=options.packs_per_step,
            window=options.window,
            slate_size=options.packs_per_slate,
            schedule=options.schedule_of_steps,
            long_tokens=options.tokens_of_long,
            cost_model=options.cost_model,
        )

    @property
    def window_packs(self) -> int:
        return self.window * self.packs_per_step

    @property
    def pool_slots(self) -> int:
        """Slots that a pool holds while the stream goes on: a window, and one pack to choose from."""
        return (self.window_packs + 1) * self.pack_tokens

    @property
    def steps_at_once(self) -> int:
        """Steps that are planned from one pool where what is not in them is carried on."""
        return max(1, self.window // 4)

    @property
    def run_packs(self) -> int:
        """Packs of like cost that are chosen together."""
        return self.packs_per_step if self.schedule is Schedule.HOMOGENEOUS else self.slate_size


@dataclass(frozen=True, slots=True, eq=False)
class PoolSources:
    """Which sources of a mixture the pieces of a pool come from."""

    sources: Int64
    """int64 [P]"""
    places: Int64
    """int64 [B + 1], slots of the stream before each stretch of it, from where steps have come to on; and
    all that were drawn."""
    drawn: Int64
    """int64 [B, S], tokens that were drawn in each stretch, whether the pool has them or steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Pieces to pack in one window, in arrival order."""

    stream: StreamPieces
    num_carried: int
    """The first so many were carried over from the window before."""
    final: bool
    """Nothing comes after: every piece must be packed now."""
    first_step: int
    """The step that is planned next."""
    planned_slots: int
    """Slots of all pieces in steps so far."""
    mixed: PoolSources | None = None
    """None where all pieces come from one source."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Packs of whole steps, in plan order."""

    packed: StreamPieces
    """Pieces in (pack, slot) order."""
    offsets: Int64
    """int64 [K + 1], pack k owns pieces offsets[k] to offsets[k + 1]."""
    carried: StreamPieces
    """Pieces left for the next window, in arrival order."""
    slates: NDArray[np.int32] | None = None
    """int32 [K], slate of each pack in its step; None leaves them to their costs (``rows.py``)."""


@njit(cache=True, nogil=True)
def group_by_pack(packs: Int64, ranks: Int64, num_kept: int) -> tuple[Int64, Int64, Int64]:
    """Sort pieces by the place of their pack; pieces of a pack stay in arrival order.

    Args:
        packs: int64 [P], pack of each piece.
        ranks: int64 [B], place of each pack in the plan, or -1 to carry its pieces on.
        num_kept: K, how many packs have a place.

    Returns:
        int64 [Q] indices of placed pieces; int64 [K + 1] offsets of the packs; int64 [P - Q] the others.
    """
    offsets = np.zeros(num_kept + 1, np.int64)
    num_left = 0
    for pack in packs:
        if ranks[pack] >= 0:
            offsets[ranks[pack] + 1] += 1
        else:
            num_left += 1
    for k in range(num_kept):
        offsets[k + 1] += offsets[k]
    ends = offsets[:-1].copy()
    order = np.empty(len(packs) - num_left, np.int64)
    left = np.empty(num_left, np.int64)
    num_left = 0
    for i in range(len(packs)):
        rank = ranks[packs[i]]
        if rank >= 0:
            order[ends[rank]] = i
            ends[rank] += 1
        else:
            left[num_left] = i
            num_left += 1
    return order, offsets, left


def cut_slates(steps: Int64, packs: Int64, costs: Int64, *, slate_size: int) -> NDArray[np.int32]:
    """Return the slate of each pack: in a step, packs sorted by (-cost, pack) are cut into groups.

    Args:
        steps: int64 [K], rising; which packs belong together.
        packs: int64 [K], order in the step.
        costs: int64 [K].
        slate_size: packs in a slate.
    """
    order = np.lexsort((packs, -costs, steps))
    slates = np.empty(len(packs), np.int32)
    # Steps stay where they are, so the place in a step is the pack number that stands there unsorted.
    slates[order] = packs // slate_size
    return slates
