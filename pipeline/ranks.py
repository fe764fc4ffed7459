"""Which packs of a step each dp rank gets in each micro-batch (DESIGN, Ranks).

In:   costs and slates of one step's packs (``pipeline/step_packs.py``)
Out:  a table of pack ids, int64 [M, dp, packs_per_chunk], that every rank computes alike

One pure function of the step's rows: a resize (another dp, other packs per chunk) re-cuts the same packs.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["MISSING", "assign_packs", "num_micro_batches"]

MISSING = -1
"""Stands where a step holds no pack: the loader puts an all-padding view there."""


def num_micro_batches(*, packs_per_step: int, dp_size: int, packs_per_chunk: int = 1) -> int:
    """Return M, the micro-batches of every step.

    Raises:
        ValueError: if dp_size * packs_per_chunk does not divide packs_per_step.
    """
    for name, value in (("dp_size", dp_size), ("packs_per_chunk", packs_per_chunk)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    group = dp_size * packs_per_chunk
    if packs_per_step % group:
        raise ValueError(
            f"dp_size={dp_size} * packs_per_chunk={packs_per_chunk} = {group} does not divide "
            f"packs_per_step={packs_per_step}; {_ways_out(packs_per_step, packs_per_chunk)}"
        )
    return packs_per_step // group


def assign_packs(
    costs: NDArray[np.int64],
    slates: NDArray[np.int32],
    *,
    packs_per_step: int,
    slate_size: int,
    dp_size: int,
    packs_per_chunk: int = 1,
) -> NDArray[np.int64]:
    """Deal the packs of one step to (micro-batch, dp rank).

    With k = dp_size * packs_per_chunk, group m is slate m if slates hold k packs; else the packs sorted by
    (-cost, pack) are cut into groups of k. In a group, in (-cost, pack) order, each pack goes to the rank
    with the least cost in this step so far that has room, ties to the lower rank. In a chunk, packs stand by
    pack id.

    Args:
        costs: int64 [K], K <= packs_per_step (the last step of a plan may hold fewer).
        slates: int [K], slate of each pack within the step.
        packs_per_step: packs in a full step.
        slate_size: packs in a slate, as planned.
        dp_size: data-parallel ranks.
        packs_per_chunk: packs in one micro-batch of one rank.

    Returns:
        int64 [M, dp_size, packs_per_chunk] pack ids; ``MISSING`` where there is no pack, last in its chunk.

    Raises:
        ValueError: if dp_size * packs_per_chunk does not divide packs_per_step, or K exceeds it.
    """
    num_groups = num_micro_batches(
        packs_per_step=packs_per_step, dp_size=dp_size, packs_per_chunk=packs_per_chunk
    )
    if len(costs) > packs_per_step:
        raise ValueError(f"the step holds {len(costs)} packs, packs_per_step={packs_per_step} allows no more")
    costs = np.ascontiguousarray(costs, dtype=np.int64)
    packs = np.arange(len(costs), dtype=np.int64)
    order = np.lexsort((packs, -costs))
    group_size = dp_size * packs_per_chunk
    if slate_size == group_size:
        groups = np.asarray(slates, dtype=np.int64)[order]
        order, groups = order[np.argsort(groups, kind="stable")], np.sort(groups)
    else:
        groups = packs // group_size
    table = np.full((num_groups, dp_size, packs_per_chunk), MISSING, dtype=np.int64)
    _deal(order, groups, costs, table)
    # Ascending pack ids; as unsigned numbers, MISSING is the largest.
    return np.sort(table.view(np.uint64), axis=2).view(np.int64)


@njit(cache=True)
def _deal(
    order: NDArray[np.int64], groups: NDArray[np.int64], costs: NDArray[np.int64], table: NDArray[np.int64]
) -> None:
    """Fill ``table`` [M, dp, c] greedily; ``order`` and ``groups`` [K] say pack and group of each turn."""
    _, dp_size, packs_per_chunk = table.shape
    loads = np.zeros(dp_size, np.int64)
    taken = np.zeros(dp_size, np.int64)
    group = np.int64(-1)
    for turn in range(len(order)):
        if groups[turn] != group:
            group = groups[turn]
            taken[:] = 0
        best = -1
        for rank in range(dp_size):
            if taken[rank] < packs_per_chunk and (best < 0 or loads[rank] < loads[best]):
                best = rank
        table[group, best, taken[best]] = order[turn]
        taken[best] += 1
        loads[best] += costs[order[turn]]


def _ways_out(packs_per_step: int, packs_per_chunk: int) -> str:
    if packs_per_step % packs_per_chunk:
        chunks = [c for c in range(1, packs_per_step + 1) if packs_per_step % c == 0]
        return f"packs_per_chunk must be one of {chunks}"
    per_chunk = packs_per_step // packs_per_chunk
    sizes = [dp for dp in range(1, per_chunk + 1) if per_chunk % dp == 0]
    return f"with packs_per_chunk={packs_per_chunk}, dp_size may be one of {sizes}"
