"""What no planner can beat: lower bounds of packs, and of the waiting of ranks, with their proofs.

In:   sizes and costs of a plan's pieces and packs (``measure.py``)
Out:  whole numbers, each at most the best that is possible; the report prints them beside what was reached

A bound may lie below the best that can be reached; it never lies above. Tests hold all of them against every
possible arrangement of small cases.

Shapes: S steps, K packs per step, R = dp ranks, M = K / R packs of one rank in one step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PieceSums", "least_packs", "least_rank_loads", "least_waits", "least_work"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PieceSums:
    """All pieces of a plan by length."""

    slots: Int64
    """int64 [D], never falling: what a piece of each length takes."""
    costs: Int64
    """int64 [D]"""
    counts: Int64
    """int64 [D], pieces of each length, at least 1."""


def least_packs(pieces: PieceSums, *, pack_tokens: int) -> int:
    """Return how many packs any packing of these pieces needs at least.

    This is bound L2 of Martello and Toth (1990, "Lower bounds and reduction procedures for the bin packing
    problem"). Take any a from 0 to C/2, where C is the slots of a pack. A piece above C/2 shares its pack
    with no other such piece: together they make N1 + N2 packs, N1 of them with a piece above C - a. With
    those, no piece of at least a shares a pack. So the pieces of a to C/2, of sum3 slots, find room only in
    the N2 packs, which have N2 * C - sum2 left, and in further packs of C each. The largest bound of all a
    counts; a = 0 gives the sum of all slots over C. Between the sizes of two pieces the bound does not rise
    with a, so that only those sizes are tried.
    """
    sizes, capacity = pieces.slots, pack_tokens
    numbers = np.concatenate([[0], np.cumsum(pieces.counts)])
    sums = np.concatenate([[0], np.cumsum(sizes * pieces.counts)])
    half = int(np.searchsorted(sizes, capacity // 2, side="right"))
    smallest = np.append(0, sizes[:half])
    first = np.append(0, np.arange(half))
    alone = np.searchsorted(sizes, capacity - smallest, side="right")
    room = (numbers[alone] - numbers[half]) * capacity - (sums[alone] - sums[half])
    further = -(-(sums[half] - sums[first] - room) // capacity)
    return int(numbers[-1] - numbers[half] + np.maximum(further, 0).max())


def least_rank_loads(costs: Int64, *, dp_size: int) -> Int64:
    """Return what the most expensive rank of each step costs at least, however its packs are dealt out.

    Every rank gets M packs. The most expensive rank costs at least the mean, rounded up. And for every j from
    1 to M: of the (j - 1) * R + 1 most expensive packs, some rank gets j or more. They cost no less than the
    j cheapest of those, and its other M - j packs no less than the M - j cheapest of all.

    Args:
        costs: int64 [S, K], 0 where a step has no pack.
        dp_size: R, which divides K.

    Returns:
        int64 [S].
    """
    num_packs = costs.shape[1]
    per_rank = num_packs // dp_size
    falling = -np.sort(-costs, axis=1)
    sums = np.concatenate([np.zeros((len(costs), 1), np.int64), np.cumsum(falling, axis=1)], axis=1)
    total = sums[:, -1]
    least = -(-total // dp_size)
    for j in range(1, per_rank + 1):
        top = (j - 1) * dp_size + 1
        others = total - sums[:, num_packs - (per_rank - j)]
        np.maximum(least, sums[:, top] - sums[:, top - j] + others, out=least)
    return least


def least_waits(costs: Int64, *, dp_size: int) -> Int64:
    """Return the least sum over micro-batches of their most expensive pack, however packs are put together.

    The j-th largest of the M most expensive packs is at least the ((j - 1) * R + 1)-th most expensive pack of
    the step: j - 1 groups hold only (j - 1) * R packs. Sorting by cost and cutting reaches this sum.

    Args:
        costs: int64 [S, K], 0 where a step has no pack.
        dp_size: R, which divides K; one pack per rank and micro-batch.

    Returns:
        int64 [S].
    """
    falling = -np.sort(-costs, axis=1)
    return np.asarray(falling[:, ::dp_size].sum(axis=1), dtype=np.int64)


def least_work(pieces: PieceSums, *, pack_tokens: int, packs_per_step: int, dp_size: int) -> int:
    """Return the least sum over steps of the most expensive rank, however pieces are packed and grouped.

    The largest of three bounds, for any number of steps of up to K packs:

    - the sum of all costs over R;
    - two pieces of more than half a pack are never in one pack, so that a step has at most K of them. As in
      ``least_waits``, the j-th most expensive of the steps that have any costs a rank at least the
      ((j - 1) * K + 1)-th most expensive such piece;
    - take the k < R pieces of the highest cost per slot, and let q be the highest cost per slot of all
      others. In the step of the most expensive of the k, of cost g, at least R - k ranks hold none of the k.
      Each has M packs and so costs at most q * M * C: it waits for g - q * M * C or more, and the sum of all
      costs plus all waiting, over R, is the bound.

    Args:
        pieces: all pieces.
        pack_tokens: C, slots of a pack.
        packs_per_step: K.
        dp_size: R, which divides K.
    """
    # Of Python integers, which do not wrap around.
    total: int = sum(c * n for c, n in zip(pieces.costs.tolist(), pieces.counts.tolist(), strict=True))
    large = 2 * pieces.slots > pack_tokens
    falling = -np.sort(-np.repeat(pieces.costs[large], pieces.counts[large]))
    by_large: int = sum(falling[::packs_per_step].tolist())
    room = packs_per_step // dp_size * pack_tokens
    waiting = _least_waiting(pieces, room=room, dp_size=dp_size)
    return max(-(-(total + waiting) // dp_size), by_large)


def _least_waiting(pieces: PieceSums, *, room: int, dp_size: int) -> int:
    """Return the waiting that the few densest pieces force; ``room`` is M * C."""
    density = pieces.costs / pieces.slots
    order = np.argsort(-density, kind="stable")
    most = num_taken = dearest = 0
    for place, index in enumerate(order.tolist()):
        num_taken += int(pieces.counts[index])
        if num_taken >= dp_size:
            break
        dearest = max(dearest, int(pieces.costs[index]))
        # Rounded up, as a bound of what others cost has to be.
        rest = density[order[place + 1]] * (1 + 1e-9) if place + 1 < len(order) else 0.0
        most = max(most, (dp_size - num_taken) * (dearest - int(np.ceil(rest * room))))
    return most
