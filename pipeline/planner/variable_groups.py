"""Long pieces wait for others like them: which of those that wait go into the next step.

In:   slots, costs and deadlines of the pieces that wait, oldest first (``variable_steps.py``)
Out:  which of them the step takes

A piece that costs about as much as a pack should, or more, makes its step uneven, unless each rank gets one
that costs as much. So such pieces wait until there is a group of them, one for each rank, or until their time
is up.

Shapes: H pieces that wait, K packs of a step, R ranks.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ringfeed.pipeline.planner.variable_rules import Int64, StepRules

__all__ = ["choose_waiting", "num_forced"]

Flags = NDArray[np.bool_]


@njit(cache=True, nogil=True)
def num_forced(steps_left: Int64, packs: int) -> int:
    """Return how many of those that wait, the oldest first, must go now so that all go in time.

    Each step has room for K of them, one for each pack: K * (steps left + 1) places for the first i + 1. At
    most K * D wait when one begins to, and have that many places after this step, so that K are enough. Where
    steps were changed after they were made (``redraw.py``), some may be late: K go, the others after them.

    Args:
        steps_left: int64 [H], steps that each may still let pass, never falling.
        packs: K.
    """
    least = 0
    for i in range(len(steps_left)):
        least = max(least, i + 1 - packs * steps_left[i])
    return min(least, packs)


@njit(cache=True, nogil=True)
def choose_waiting(slots: Int64, costs: Int64, forced: int, rules: StepRules) -> Flags:
    """Choose the pieces that must go, with others like them, then groups that are alike: bool [H].

    Args:
        slots: int64 [H]
        costs: int64 [H]
        forced: the first so many must go.
        rules: R, the slots and packs of a step, and how far a group's costs may lie apart.
    """
    # Those that cost little only lacked room, and go at once.
    chosen = costs <= rules.outlier
    chosen[:forced] = False
    order = np.argsort(costs, kind="mergesort")
    for i in range(forced):
        if not chosen[i]:
            chosen[i] = True
            free = order[~chosen[order] | (order == i)]
            _, first = _closest(costs[free], rules.ranks, int(np.flatnonzero(free == i)[0]))
            if first >= 0:
                _add_group(chosen, free[first : first + rules.ranks], slots, forced, rules)
    # Once half of all that may wait do, groups go whether they are alike or not.
    is_crowded = 2 * len(costs) > rules.packs * rules.delay
    while True:
        free = order[~chosen[order]]
        spread, first = _closest(costs[free], rules.ranks, -1)
        if first < 0 or (spread > rules.tolerance and not is_crowded):
            return chosen
        if not _add_group(chosen, free[first : first + rules.ranks], slots, forced, rules):
            return chosen


@njit(cache=True, nogil=True)
def _closest(costs: Int64, size: int, inside: int) -> tuple[int, int]:
    """Return the least spread of ``size`` consecutive costs, and where they begin; -1 if there are too few.

    Args:
        costs: int64 [N], rising.
        size: of a group.
        inside: place that the group must hold, or -1.
    """
    spread, best = 0, -1
    low = 0 if inside < 0 else max(0, inside - size + 1)
    high = len(costs) - size if inside < 0 else min(inside, len(costs) - size)
    for first in range(low, high + 1):
        found = int(costs[first + size - 1] - costs[first])
        if best < 0 or found < spread:
            spread, best = found, first
    return spread, best


@njit(cache=True, nogil=True)
def _add_group(chosen: Flags, group: Int64, slots: Int64, forced: int, rules: StepRules) -> bool:
    """Add a group if the step has slots and packs for it; say whether it was added."""
    before = chosen[group].copy()
    chosen[group] = True
    is_in = chosen.copy()
    is_in[:forced] = True
    if is_in.sum() <= rules.packs and slots[is_in].sum() <= rules.target:
        return True
    chosen[group] = before
    return False
