"""Lower bounds against every arrangement of small cases: never above the best, and often equal to it."""

from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.planner.bounds import (
    PieceSums,
    least_packs,
    least_rank_loads,
    least_waits,
    least_work,
)


def summed(pieces):
    """Pieces (slots, cost), where equal slots have equal costs."""
    table = sorted({slots: (cost, sum(s == slots for s, _ in pieces)) for slots, cost in pieces}.items())
    return PieceSums(
        slots=np.array([slots for slots, _ in table], np.int64),
        costs=np.array([cost for _, (cost, _) in table], np.int64),
        counts=np.array([count for _, (_, count) in table], np.int64),
    )


def fewest_packs(sizes, capacity):
    """The best packing, by trying every pack for every piece."""

    @cache
    def search(index, loads):
        if index == len(sizes):
            return len(loads)
        size = sizes[index]
        options = [search(index + 1, tuple(sorted((*loads, size))))]
        for pack, load in enumerate(loads):
            if load + size <= capacity:
                options.append(
                    search(index + 1, tuple(sorted((*loads[:pack], load + size, *loads[pack + 1 :]))))
                )
        return min(options)

    return search(0, ())


def partitions(items, size):
    """All ways to put ``items`` into groups of ``size``."""
    if not items:
        yield []
        return
    for order in permutations(items[1:], size - 1):
        if list(order) == sorted(order):
            rest = list(items[1:])
            for item in order:
                rest.remove(item)
            for others in partitions(rest, size):
                yield [(items[0], *order), *others]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(12, 20))
def test_no_packing_takes_fewer_packs_than_the_bound(sizes, capacity):
    bound = least_packs(summed([(size, 1) for size in sizes]), pack_tokens=capacity)
    assert -(-sum(sizes) // capacity) <= bound <= fewest_packs(tuple(sizes), capacity)


@pytest.mark.parametrize(
    ("sizes", "packs"),
    [
        # Six of a little more than half: none share, though their sum would fit into four.
        ([6] * 6, 6),
        # Threes do not go with eights: they need packs of their own.
        ([8, 8, 3, 3, 3, 3], 4),
        ([5, 5, 5, 5], 2),
        ([10], 1),
    ],
)
def test_the_bound_knows_which_pieces_never_share_a_pack(sizes, packs):
    assert least_packs(summed([(size, 1) for size in sizes]), pack_tokens=10) == packs


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([(2, 1), (3, 1), (2, 2), (2, 3), (3, 2)]), st.data())
def test_no_deal_beats_the_bounds_of_a_step(shape, data):
    dp_size, per_rank = shape
    count = dp_size * per_rank
    costs = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    loads = [max(sum(costs[i] for i in rank) for rank in deal) for deal in partitions(range(count), per_rank)]
    waits = [sum(max(costs[i] for i in group) for group in cut) for cut in partitions(range(count), dp_size)]
    matrix = np.array([costs, costs], np.int64)
    assert least_rank_loads(matrix, dp_size=dp_size).tolist() <= [min(loads)] * 2
    assert least_waits(matrix, dp_size=dp_size).tolist() == [min(waits)] * 2


@pytest.mark.parametrize(
    ("costs", "least"),
    [
        # The dearest pack has a companion: 90 + 1.
        ([90, 2, 1, 1], 91),
        # One of two ranks gets two of the three dear ones.
        ([50, 50, 50, 0], 100),
        ([4, 4, 4, 4], 8),
    ],
)
def test_the_bound_of_a_step_is_what_the_best_deal_reaches(costs, least):
    assert least_rank_loads(np.array([costs]), dp_size=2).tolist() == [least]


def best_work(pieces, capacity, packs_per_step, dp_size):
    """The least sum over steps of the most expensive rank: every piece to every pack of every step."""
    per_rank = packs_per_step // dp_size
    num_steps = len(pieces)
    best = [np.inf]

    def search(index, packs):
        if index == len(pieces):
            loads = np.zeros((num_steps, dp_size), np.int64)
            for (step, rank, _), (_, cost) in packs.items():
                loads[step, rank] += cost
            best[0] = min(best[0], int(loads.max(axis=1).sum()))
            return
        slots, cost = pieces[index]
        # Steps, ranks and packs are alike: the next unused one stands for all of them.
        last = max((step for step, _, _ in packs), default=-1)
        for step in range(min(last + 2, num_steps)):
            for rank in range(dp_size):
                for pack in range(per_rank):
                    used, spent = packs.get((step, rank, pack), (0, 0))
                    if used + slots <= capacity:
                        search(index + 1, {**packs, (step, rank, pack): (used + slots, spent + cost)})

    search(0, {})
    return best[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from([(2, 2), (2, 1), (3, 3), (4, 2)]),
    st.integers(1, 8),
)
def test_no_plan_beats_the_bound_of_its_documents(sizes, shape, linear):
    packs_per_step, dp_size = shape
    pieces = [(size, size + size * size // linear) for size in sizes]
    bound = least_work(summed(pieces), pack_tokens=6, packs_per_step=packs_per_step, dp_size=dp_size)
    mean = -(-sum(cost for _, cost in pieces) // dp_size)
    assert mean <= bound <= best_work(pieces, 6, packs_per_step, dp_size)


def test_one_document_that_outweighs_a_whole_rank_makes_the_others_wait():
    # Costs 100; the other rank gets four of 2 slots and cost 3 into its one pack, and waits for the rest.
    pieces = summed([(8, 100), *[(2, 3)] * 8])
    assert least_work(pieces, pack_tokens=8, packs_per_step=2, dp_size=2) == -(-(100 + 24 + 100 - 12) // 2)


def test_documents_of_more_than_half_a_pack_come_a_few_to_a_step():
    pieces = summed([(6, 50)] * 6)
    assert least_work(pieces, pack_tokens=10, packs_per_step=2, dp_size=2) == 150
    assert least_work(pieces, pack_tokens=10, packs_per_step=2, dp_size=1) == 300


def test_several_large_documents_on_a_rank_count_no_more_than_their_best_deal():
    # Two ranks of three packs in one step: 3 + 3 on one, 2 + 2 + 2 on the other.
    pieces = summed([(8, 3), (8, 3), (7, 2), (7, 2), (7, 2)])
    assert least_work(pieces, pack_tokens=10, packs_per_step=6, dp_size=2) == 6
