"""Which packs of a step each dp rank gets in each micro-batch (DESIGN, Ranks).

In:   costs and slates of one step's packs (``pipeline/step_packs.py``)
Out:  a table of pack ids, int64 [M, dp, packs_per_chunk], that every rank computes alike

One pure function of the step's rows: a resize (another dp, other packs per chunk) re-cuts the same packs.
With k = dp_size * packs_per_chunk, group m is slate m if slates hold k packs; else the packs sorted by
(-cost, pack) are cut into groups of k. In a group, in (-cost, pack) order, each pack goes to the rank with
the least cost in this step so far that has room, ties to the lower rank. In a chunk, packs stand by pack id.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["MISSING", "RankPlace", "assign_packs", "assign_steps", "num_micro_batches"]

MISSING = -1
"""Stands where a step holds no pack: the loader puts an all-padding view there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Which share of a step one trainer rank gets.

    Raises:
        ValueError: if a rank is not below its size.
    """

    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    packs_per_chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_size", "cp_size", "packs_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for axis in ("dp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank={rank} is not in 0 to {size - 1} ({axis}_size={size})")


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
    """Deal the packs of one step to (micro-batch, dp rank) by the rule above.

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
        ValueError: if dp_size * packs_per_chunk does not divide packs_per_step, K exceeds it, or a slate has
            more packs than ``slate_size``.
    """
    num_groups = num_micro_batches(
        packs_per_step=packs_per_step, dp_size=dp_size, packs_per_chunk=packs_per_chunk
    )
    if len(costs) > packs_per_step:
        raise ValueError(f"the step holds {len(costs)} packs, packs_per_step={packs_per_step} allows no more")
    table = assign_steps(
        np.ascontiguousarray(costs, dtype=np.int64),
        np.asarray(slates),
        np.array([0, len(costs)], dtype=np.int64),
        slate_size=slate_size,
        shape=(num_groups, dp_size, packs_per_chunk),
    )
    return table.reshape(table.shape[1:])


def assign_steps(
    costs: NDArray[np.int64],
    slates: NDArray[np.int32],
    first_packs: NDArray[np.int64],
    *,
    slate_size: int,
    shape: tuple[int, int, int],
) -> NDArray[np.int64]:
    """Deal the packs of S steps at once, each step as ``assign_packs`` does.

    Args:
        costs: int64 [K], of all packs in (step, pack) order.
        slates: int [K], within the step.
        first_packs: int64 [S + 1], packs before each step.
        slate_size: as planned. Where a group has as many packs, groups are slates; else they are cut from the
            sorted packs.
        shape: (M, dp_size, packs_per_chunk).

    Returns:
        int64 [S, M, dp_size, packs_per_chunk], pack ids within the step.

    Raises:
        ValueError: if a group has more packs than ranks have room for, or is none of M: the plan is damaged.
    """
    num_groups, dp_size, packs_per_chunk = shape
    counts = np.diff(first_packs)
    steps = np.repeat(np.arange(len(counts)), counts)
    packs = np.arange(len(costs)) - first_packs[steps]
    by_slate = slate_size == dp_size * packs_per_chunk
    keys = (packs, -costs, slates, steps) if by_slate else (packs, -costs, steps)
    order = np.lexsort(keys)
    # Steps stay together in the order, so that ``packs`` is also the place of each turn in its step.
    within = slates[order].astype(np.int64) if by_slate else packs // (dp_size * packs_per_chunk)
    _check_groups(steps, within, shape)
    table = np.full((len(counts) * num_groups, dp_size, packs_per_chunk), MISSING, dtype=np.int64)
    _deal(packs[order], costs[order], steps, steps * num_groups + within, table)
    # Ascending pack ids; as unsigned numbers, MISSING is the largest.
    return np.sort(table.view(np.uint64), axis=2).view(np.int64).reshape(len(counts), *shape)


def _check_groups(steps: NDArray[np.int64], groups: NDArray[np.int64], shape: tuple[int, int, int]) -> None:
    num_groups, dp_size, packs_per_chunk = shape
    size = dp_size * packs_per_chunk
    wrong = np.flatnonzero((groups < 0) | (groups >= num_groups))
    if not len(wrong):
        cells = steps * num_groups + groups
        wrong = np.flatnonzero(np.bincount(cells)[cells] > size) if len(cells) else wrong
    if len(wrong):
        raise ValueError(
            f"slate {groups[wrong[0]]} does not fit: a step has at most {num_groups} slates of {size} packs; "
            "the plan is damaged or was made by a faulty version, plan again"
        )


@njit(cache=True, nogil=True)
def _deal(
    packs: NDArray[np.int64],
    costs: NDArray[np.int64],
    steps: NDArray[np.int64],
    groups: NDArray[np.int64],
    table: NDArray[np.int64],
) -> None:
    """Fill ``table`` [groups, dp, c] greedily; the others say pack, cost, step and group of each turn."""
    _, dp_size, packs_per_chunk = table.shape
    loads = np.zeros(dp_size, np.int64)
    taken = np.zeros(dp_size, np.int64)
    for turn in range(len(packs)):
        if turn and steps[turn] != steps[turn - 1]:
            loads[:] = 0
        if turn and groups[turn] != groups[turn - 1]:
            taken[:] = 0
        best = -1
        for rank in range(dp_size):
            if taken[rank] < packs_per_chunk and (best < 0 or loads[rank] < loads[best]):
                best = rank
        table[groups[turn], best, taken[best]] = packs[turn]
        taken[best] += 1
        loads[best] += costs[turn]


def _ways_out(packs_per_step: int, packs_per_chunk: int) -> str:
    if packs_per_step % packs_per_chunk:
        chunks = [c for c in range(1, packs_per_step + 1) if packs_per_step % c == 0]
        return f"packs_per_chunk must be one of {chunks}"
    per_chunk = packs_per_step // packs_per_chunk
    sizes = [dp for dp in range(1, per_chunk + 1) if per_chunk % dp == 0]
    return f"with packs_per_chunk={packs_per_chunk}, dp_size may be one of {sizes}"
