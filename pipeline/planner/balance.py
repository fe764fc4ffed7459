"""How evenly the ranks of a given dp would work, by a given cost model, beside what is possible.

In:   costs of packs, step by step, dealt to ranks as the loader does (``pipeline/ranks.py``)
Out:  ``BalanceFigures``

Packs go to ranks by the costs that the plan holds, whatever they are measured by: a plan made for one model
and measured by another shows what the difference would cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.bounds import least_rank_loads, least_waits
from ringfeed.pipeline.ranks import MISSING, assign_steps, num_micro_batches
from ringfeed.pipeline.step_packs import packs_before

__all__ = ["BalanceFigures", "BalanceMeter"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceFigures:
    """How long ranks wait for each other, and how long they have to at least."""

    step_imbalance: float
    """Sum over steps of the most expensive rank, over the sum of the mean rank."""
    step_imbalance_p99: float
    """99th percentile over steps of the most expensive rank over the mean one."""
    micro_batch_imbalance: float
    """As ``step_imbalance``, over micro-batches: ranks wait for each other in each of them."""
    step_imbalance_bound: float
    """No deal of the same packs of each step has less."""
    step_imbalance_p99_bound: float
    micro_batch_imbalance_bound: float


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Costs of some steps, int64 [S] each."""

    total: Int64
    largest: Int64
    """Of the most expensive rank."""
    waits: Int64
    """Sum over micro-batches of the most expensive pack."""
    least_largest: Int64
    least_waits: Int64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BalanceMeter:
    """Measures blocks one after the other, then tells the balance.

    Raises:
        ValueError: if ``dp_size`` does not divide ``packs_per_step``; names those that do.
    """

    packs_per_step: int
    slate_size: int
    dp_size: int
    _parts: list[_Steps] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_micro_batches(packs_per_step=self.packs_per_step, dp_size=self.dp_size)

    def add(
        self, steps: Int64, *, slates: NDArray[np.int32], planned: Int64, costs: Int64 | None = None
    ) -> None:
        """Measure packs of whole steps.

        Args:
            steps: int64 [K], rising.
            slates: int32 [K], within the step.
            planned: int64 [K], the costs that packs are dealt by.
            costs: int64 [K], what they are measured by; by default the same.
        """
        packs = self.deal(steps, slates=slates, planned=planned, costs=costs)
        loads = packs.sum(axis=1)
        flat = packs.reshape(len(packs), -1)
        self._parts.append(
            _Steps(
                total=loads.sum(axis=1),
                largest=loads.max(axis=1),
                waits=packs.max(axis=2).sum(axis=1),
                least_largest=least_rank_loads(flat, dp_size=self.dp_size),
                least_waits=least_waits(flat, dp_size=self.dp_size),
            )
        )

    def deal(
        self, steps: Int64, *, slates: NDArray[np.int32], planned: Int64, costs: Int64 | None = None
    ) -> Int64:
        """Return what each pack costs where it is dealt to, int64 [S, M, dp]; arguments as of ``add``."""
        first_packs = packs_before(steps)
        shape = (self.packs_per_step // self.dp_size, self.dp_size, 1)
        dealt = assign_steps(planned, slates, first_packs, slate_size=self.slate_size, shape=shape)
        costs = planned if costs is None else costs
        places = np.where(dealt == MISSING, 0, dealt + first_packs[:-1, None, None, None])
        # One pack per chunk. A missing pack costs nothing, so that a short last step counts against the plan.
        return np.asarray(np.where(dealt == MISSING, 0, costs[places])[..., 0], dtype=np.int64)

    def balance(self, *, num_steps: int | None = None) -> BalanceFigures:
        """Return the balance of all steps that were measured, or of the first ``num_steps``."""
        steps = _first(self._parts, num_steps)
        # Of Python integers: exact, however long the plan is.
        work = sum(steps.total.tolist()) / self.dp_size
        worst, worst_bound = (
            float(np.percentile(costs / steps.total * self.dp_size, 99))
            for costs in (steps.largest, steps.least_largest)
        )
        return BalanceFigures(
            step_imbalance=sum(steps.largest.tolist()) / work,
            step_imbalance_p99=worst,
            micro_batch_imbalance=sum(steps.waits.tolist()) / work,
            step_imbalance_bound=sum(steps.least_largest.tolist()) / work,
            step_imbalance_p99_bound=worst_bound,
            micro_batch_imbalance_bound=sum(steps.least_waits.tolist()) / work,
        )

    @property
    def work(self) -> int:
        """Cost of all packs that were measured."""
        return sum(sum(part.total.tolist()) for part in self._parts)


def _first(parts: Sequence[_Steps], num_steps: int | None) -> _Steps:
    names = ("total", "largest", "waits", "least_largest", "least_waits")
    return _Steps(*(np.concatenate([getattr(part, name) for part in parts])[:num_steps] for name in names))
