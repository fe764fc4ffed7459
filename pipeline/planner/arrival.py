"""Where a piece would stand if steps were filled in drawing order: what its displacement is measured from.

In:   the packs of some steps, the ``Pool`` that they were made from (``packing.py``)
Out:  the same, with the steps of arrival of all pieces that arrive in those steps
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.packing import Packing, Pool
from ringfeed.pipeline.planner.stream import UNKNOWN_STEP, StreamPieces

__all__ = ["note_arrival_steps"]

Int64 = NDArray[np.int64]


def note_arrival_steps(
    packing: Packing, first_packs: Int64, pool: Pool, *, step_slots: int
) -> tuple[Packing, int]:
    """Fill in which step holds each new piece's place in the stream; also return the slots of all packs.

    If the steps of the plan were filled in arrival order, to the slots they have, a piece would stand in that
    step: how far it is from it is its displacement. Steps to come count as full; a piece that is carried to
    them gets its step when that is planned.
    """
    before = np.concatenate([[0], np.cumsum(packing.packed.slots)])[packing.offsets]
    ends = pool.planned_slots + before[first_packs[1:]]
    end = pool.planned_slots + int(before[-1])

    def noted(pieces: StreamPieces) -> StreamPieces:
        steps = pool.first_step + np.searchsorted(ends, pieces.arrivals, side="right")
        steps += np.maximum(pieces.arrivals - end, 0) // step_slots
        known = pieces.arrival_steps != UNKNOWN_STEP
        return replace(pieces, arrival_steps=np.where(known, pieces.arrival_steps, steps))

    packed, carried = noted(packing.packed), noted(packing.carried)
    later = np.where(carried.arrivals < end, carried.arrival_steps, UNKNOWN_STEP)
    carried = replace(carried, arrival_steps=later)
    return replace(packing, packed=packed, carried=carried), int(before[-1])
