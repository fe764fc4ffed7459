"""Variable packs of like work: short documents even out what long ones cost.

In:   a ``Pool`` (``packing.py``), the sizes of a plan
Out:  a ``Packing`` of whole steps with their slates; the rest is carried to the next window

The idea is that of WLB-LLM (Wang et al. 2025, "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language
Model Training"): packs of a step may differ in length, so that they cost the same, and documents that alone
cost more than a pack should wait, a bounded time, until there are enough of them. Here work is evened out
over the ranks that a slate is meant for, and pieces that wait go in groups of one for each of them.

All numbers are integers, and a window follows from its pool alone: plans do not depend on workers or
machines. No piece is drawn out of turn: a step takes a stretch of the stream, but for those that wait.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.pack_lengths import PackLengths
from ringfeed.pipeline.planner.cost import CostModel
from ringfeed.pipeline.planner.packing import Packing, Pool, group_by_pack
from ringfeed.pipeline.planner.stream import UNKNOWN_STEP
from ringfeed.pipeline.planner.variable_options import VariableWork
from ringfeed.pipeline.planner.variable_rules import LEFT, PoolPieces, StepRules
from ringfeed.pipeline.planner.variable_steps import UNDRAWN, pack_steps

__all__ = ["VariableShape", "pack_variable"]

Int64 = NDArray[np.int64]

_NO_BUDGET = 1 << 62
_OUTLIER = (4, 5)
"""Pieces that cost more than this part of what a pack should wait for others like them."""
_TOLERANCE = 50
"""Pieces of a group may differ by this part of the work of a rank in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariableShape:
    """The sizes that packing works with."""

    packs_per_step: int
    slate_size: int
    lengths: PackLengths
    cost_model: CostModel
    work: VariableWork


def pack_variable(pool: Pool, shape: VariableShape) -> Packing:
    """Pack the whole steps of a pool; see the module's first lines."""
    stream = pool.stream
    costs = shape.cost_model.piece_costs(stream.pieces.lengths)
    known = stream.arrival_steps != UNKNOWN_STEP
    # Never before the pool: a piece may be late where steps were changed afterwards (``redraw.py``).
    last = np.maximum(stream.arrival_steps - pool.first_step + shape.work.max_delay, 0)
    dues = np.where(known, last, UNDRAWN)
    packs, rows, num_packs = pack_steps(PoolPieces(stream.slots, costs), dues, _rules(pool, costs, shape))
    # One more stands for those that are left.
    ranks = np.append(np.arange(num_packs), -1)
    order, offsets, left = group_by_pack(np.where(packs == LEFT, num_packs, packs), ranks, num_packs)
    return Packing(stream.take(order), offsets, stream.take(left), rows[:num_packs].astype(np.int32))


def _rules(pool: Pool, costs: Int64, shape: VariableShape) -> StepRules:
    target = shape.work.mean_tokens * shape.packs_per_step
    # What a pack costs if the pool's work is spread evenly over its slots. Python's integers are exact.
    even = int(costs.sum()) * shape.work.mean_tokens // max(1, int(pool.stream.slots.sum()))
    budget = shape.work.work_budget
    part, parts = _OUTLIER
    return StepRules(
        packs=shape.packs_per_step,
        ranks=shape.slate_size,
        capacity=shape.lengths.budget,
        budget=_NO_BUDGET // shape.packs_per_step if budget is None else budget,
        target=target,
        delay=shape.work.max_delay,
        outlier=even * part // parts,
        tolerance=even * (shape.packs_per_step // shape.slate_size) // _TOLERANCE,
        buckets=shape.lengths.bucket_lengths(),
        final=pool.final,
    )
