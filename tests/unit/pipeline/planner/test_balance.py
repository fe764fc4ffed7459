"""The balance of ranks for any dp, by any costs, against loads that are added up one by one."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.balance import BalanceMeter
from ringfeed.pipeline.ranks import assign_packs
from ringfeed.pipeline.step_packs import packs_before

PACKS, SLATE = 8, 4


def steps_of(seed, num_steps):
    """Costs, slates and steps of full steps, the last of which lacks three packs."""
    draw = np.random.default_rng(seed)
    count = num_steps * PACKS - 3
    steps = np.arange(count) // PACKS
    return steps, (np.arange(count) % PACKS // SLATE).astype(np.int32), draw.integers(1, 1000, size=count)


def loads_by_hand(steps, slates, planned, costs, dp_size):
    """Per step what each rank costs, and the sum of what micro-batches wait for."""
    loads, waits = [], []
    for step in np.unique(steps):
        inside = steps == step
        table = assign_packs(
            planned[inside], slates[inside], packs_per_step=PACKS, slate_size=SLATE, dp_size=dp_size
        )
        chunks = np.append(costs[inside], 0)[table].sum(axis=2)
        loads.append(chunks.sum(axis=0))
        waits.append(int(chunks.max(axis=1).sum()))
    return np.array(loads), np.array(waits)


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("other", [False, True])
def test_figures_are_those_of_the_loads(dp_size, other):
    steps, slates, planned = steps_of(0, 30)
    costs = np.random.default_rng(9).integers(1, 1000, size=len(steps)) if other else planned
    meter = BalanceMeter(packs_per_step=PACKS, slate_size=SLATE, dp_size=dp_size)
    # In two parts, as blocks come.
    for part in (steps < 10, steps >= 10):
        meter.add(steps[part], slates=slates[part], planned=planned[part], costs=costs[part])
    loads, waits = loads_by_hand(steps, slates, planned, costs, dp_size)
    found = meter.balance()
    assert found.step_imbalance == pytest.approx(loads.max(axis=1).sum() / loads.mean(axis=1).sum())
    ratios = loads.max(axis=1) / loads.mean(axis=1)
    assert found.step_imbalance_p99 == pytest.approx(np.percentile(ratios, 99))
    assert found.micro_batch_imbalance == pytest.approx(waits.sum() / (loads.sum() / dp_size))
    assert meter.work == int(costs.sum())


@pytest.mark.parametrize("seed", range(5))
def test_bounds_lie_between_1_and_the_figures(seed):
    steps, slates, planned = steps_of(seed, 20)
    meter = BalanceMeter(packs_per_step=PACKS, slate_size=SLATE, dp_size=4)
    meter.add(steps, slates=slates, planned=planned)
    found = meter.balance()
    assert 1 <= found.step_imbalance_bound <= found.step_imbalance
    assert 1 <= found.step_imbalance_p99_bound <= found.step_imbalance_p99
    assert 1 <= found.micro_batch_imbalance_bound <= found.micro_batch_imbalance


def test_slates_cut_by_cost_reach_the_bound_of_micro_batches():
    steps, _, planned = steps_of(3, 20)
    slates = np.empty(len(steps), np.int32)
    order = np.lexsort((np.arange(len(steps)), -planned, steps))
    slates[order] = np.arange(len(steps)) % PACKS // SLATE
    meter = BalanceMeter(packs_per_step=PACKS, slate_size=SLATE, dp_size=SLATE)
    meter.add(steps, slates=slates, planned=planned)
    found = meter.balance()
    assert found.micro_batch_imbalance == found.micro_batch_imbalance_bound


def test_the_first_steps_alone_can_be_asked_for():
    steps, slates, planned = steps_of(1, 20)
    whole, part = (BalanceMeter(packs_per_step=PACKS, slate_size=SLATE, dp_size=4) for _ in range(2))
    whole.add(steps, slates=slates, planned=planned)
    first = steps < 7
    part.add(steps[first], slates=slates[first], planned=planned[first])
    assert whole.balance(num_steps=7) == part.balance()


def test_a_dp_that_does_not_divide_the_packs_is_refused():
    with pytest.raises(ValueError, match=r"dp_size may be one of \[1, 2, 4, 8\]"):
        BalanceMeter(packs_per_step=PACKS, slate_size=SLATE, dp_size=3)


def test_packs_are_counted_before_each_step():
    assert packs_before(np.array([4, 4, 5, 7, 7])).tolist() == [0, 2, 3, 5]
    assert packs_before(np.array([], dtype=np.int64)).tolist() == [0]
