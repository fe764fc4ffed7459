"""A planner in the style of WLB-LLM, to compare with: written from the paper's description, not from code.

Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training": the documents
of one global batch are spread over its packs so that their work is even. Longest first, each goes to the pack
with the least work, or where that has no room below a cap to the shortest pack, or else it remains for the
next batch. Outliers wait in queues by length until a queue has one for every pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["WlbPlan", "plan_wlb_style"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WlbPlan:
    """Where each document went."""

    steps: Int64
    """int64 [D], -1 for those still waiting or remaining at the end."""
    packs: Int64
    """int64 [D], within the step."""
    drawn: Int64
    """int64 [D], the step whose batch drew the document."""
    num_steps: int


def plan_wlb_style(
    lengths: Int64,
    costs: Int64,
    *,
    pack_tokens: int,
    packs_per_step: int,
    cap: float,
    thresholds: Sequence[int],
) -> WlbPlan:
    """Plan documents in order.

    Args:
        lengths: int64 [D]
        costs: int64 [D]
        pack_tokens: tokens of a pack on average: a step draws so many for each.
        packs_per_step: micro-batches of a global batch.
        cap: the longest pack, in ``pack_tokens``.
        thresholds: rising lengths from which documents wait; one queue from each to the next.
    """
    levels = np.searchsorted(np.array(thresholds, dtype=np.int64), lengths, side="right")
    steps, packs = np.full(len(lengths), -1, np.int64), np.zeros(len(lengths), np.int64)
    drawn = np.zeros(len(lengths), np.int64)
    queues: list[list[int]] = [[] for _ in thresholds]
    remained = np.empty(0, np.int64)
    ends = np.cumsum(lengths)
    batch_tokens = pack_tokens * packs_per_step
    num_steps = int(ends[-1]) // batch_tokens
    borders = np.searchsorted(ends, np.arange(num_steps + 1) * batch_tokens, side="right")
    for step in range(num_steps):
        batch = np.arange(borders[step], borders[step + 1])
        drawn[batch] = step
        chosen = [batch[levels[batch] == 0]]
        for level, queue in enumerate(queues, start=1):
            queue.extend(batch[levels[batch] == level].tolist())
            if len(queue) >= packs_per_step:
                chosen.append(np.array(queue[:packs_per_step], dtype=np.int64))
                del queue[:packs_per_step]
        new = np.concatenate(chosen)
        # What remained of the batch before goes first.
        order = np.concatenate([remained, new[np.argsort(-lengths[new], kind="stable")]])
        where = _spread(lengths[order], costs[order], packs_per_step, int(pack_tokens * cap))
        placed = order[where >= 0]
        steps[placed], packs[placed] = step, where[where >= 0]
        remained = order[where < 0]
    return WlbPlan(steps=steps, packs=packs, drawn=drawn, num_steps=num_steps)


@njit(cache=True, nogil=True)
def _spread(lengths: Int64, costs: Int64, num_packs: int, most: int) -> Int64:
    """Return the pack of each document, -1 where none has room."""
    works, used = np.zeros(num_packs, np.int64), np.zeros(num_packs, np.int64)
    where = np.full(len(lengths), -1, np.int64)
    for i in range(len(lengths)):
        pack = works.argmin()
        if used[pack] + lengths[i] > most:
            pack = used.argmin()
        if used[pack] + lengths[i] <= most:
            where[i] = pack
            works[pack] += costs[i]
            used[pack] += lengths[i]
    return where
