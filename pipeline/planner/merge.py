"""Which source the next document comes from: the one that is owed most.

In:   documents of each lane in its own order, weights, and what each lane is owed (credits)
Out:  the lane of each document drawn, and the credits after it

Each document of amount a adds weight * a to every lane's credit and takes WEIGHT_UNIT * a from the lane that
it came from, so credits sum to a constant, and no lane is ever further from its share than a few of the
largest documents. There is no chance in it: the same credits and documents give the same order.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["NOT_DRY", "merge_lanes"]

Int64 = NDArray[np.int64]

NOT_DRY = -1


@njit(cache=True, nogil=True)
def merge_lanes(  # noqa: PLR0913, PLR0917 - a kernel takes arrays, not objects
    amounts: Int64, slots: Int64, bounds: Int64, weights: Int64, credits: Int64, wanted: int, unit: int
) -> tuple[Int64, Int64, int]:
    """Draw documents until they have ``wanted`` slots, or the lane whose turn it is has none left.

    Args:
        amounts: int64 [K], what each document counts for; the lanes' documents one lane after the other.
        slots: int64 [K], slots of each document.
        bounds: int64 [R + 1], lane r has the documents bounds[r] to bounds[r + 1].
        weights: int64 [R], above 0; they sum to ``unit``.
        credits: int64 [R], changed in place.
        wanted: slots to draw; the document that reaches them is the last one.
        unit: what a whole share is.

    Returns:
        int64 [n], lane of each document drawn, in order; int64 [R], documents drawn from each lane;
        the lane that ran dry, or ``NOT_DRY``.
    """
    num_lanes = len(weights)
    lanes = np.empty(len(amounts), np.int64)
    counts = np.zeros(num_lanes, np.int64)
    drawn = 0
    while wanted > 0:
        lane = 0
        for r in range(1, num_lanes):
            if credits[r] > credits[lane]:
                lane = r
        document = bounds[lane] + counts[lane]
        if document == bounds[lane + 1]:
            return lanes[:drawn], counts, lane
        amount = amounts[document]
        for r in range(num_lanes):
            credits[r] += weights[r] * amount
        credits[lane] -= unit * amount
        counts[lane] += 1
        lanes[drawn] = lane
        drawn += 1
        wanted -= slots[document]
    return lanes[:drawn], counts, NOT_DRY
