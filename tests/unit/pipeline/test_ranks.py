"""Packs to ranks: worked out by hand, and what holds for any step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.pipeline.planner.packing import cut_slates
from ringfeed.pipeline.ranks import MISSING, assign_packs


def deal(costs, *, slate_size=None, packs_per_step=None, **asked):
    costs = np.array(costs, dtype=np.int64)
    packs_per_step = packs_per_step or len(costs)
    slate_size = slate_size or packs_per_step
    slates = cut_slates(np.zeros(len(costs), np.int64), np.arange(len(costs)), costs, slate_size=slate_size)
    table = assign_packs(costs, slates, packs_per_step=packs_per_step, slate_size=slate_size, **asked)
    return table.tolist()


def test_the_most_expensive_pack_goes_to_the_rank_with_the_least_so_far():
    # Slates {9, 8}, {5, 1}: 9 -> rank 0, 8 -> rank 1; then 5 -> rank 1 (8 < 9), 1 -> rank 0.
    assert deal([1, 9, 5, 8], slate_size=2, dp_size=2) == [[[1], [3]], [[0], [2]]]


def test_equal_costs_go_to_the_lower_rank_and_the_lower_pack_first():
    assert deal([5, 5, 5, 5], slate_size=2, dp_size=2) == [[[0], [1]], [[2], [3]]]


def test_another_dp_cuts_the_sorted_packs_again():
    # Sorted: packs 1 (9), 3 (8), 2 (5), 0 (1).
    assert deal([1, 9, 5, 8], slate_size=2, dp_size=4) == [[[1], [3], [2], [0]]]
    assert deal([1, 9, 5, 8], slate_size=2, dp_size=1) == [[[1]], [[3]], [[2]], [[0]]]


def test_in_a_chunk_packs_stand_by_pack_id():
    # One group of 4: 9 -> rank 0, 8 -> rank 1, 5 -> rank 1 (8 < 9), 1 -> rank 0 (rank 1 has no room).
    assert deal([1, 9, 5, 8], dp_size=2, packs_per_chunk=2) == [[[0, 1], [2, 3]]]


def test_loads_count_over_the_whole_step():
    # Groups {9, 2}, {2, 2}, {1, 1}: rank 1 stays behind and gets the first of every later group.
    assert deal([9, 2, 2, 2, 1, 1], slate_size=2, dp_size=2) == [[[0], [1]], [[3], [2]], [[5], [4]]]


def test_a_short_step_leaves_places_empty():
    assert deal([4, 7, 2], packs_per_step=8, slate_size=2, dp_size=2) == [
        [[1], [0]],
        [[MISSING], [2]],
        [[MISSING], [MISSING]],
        [[MISSING], [MISSING]],
    ]


def test_in_a_short_chunk_the_missing_pack_stands_last():
    assert deal([4, 7, 2], packs_per_step=4, dp_size=1, packs_per_chunk=4) == [[[0, 1, 2, MISSING]]]


def test_slates_are_used_as_they_are_where_they_hold_a_group():
    costs, slates = np.array([9, 8, 2, 1]), np.array([1, 0, 0, 1], dtype=np.int32)
    table = assign_packs(costs, slates, packs_per_step=4, slate_size=2, dp_size=2)

    # Slate 0 is packs 1 and 2; slate 1 is packs 0 and 3.
    assert table.tolist() == [[[1], [2]], [[3], [0]]]


@pytest.mark.parametrize("slates", [[0, 0, 0, 1], [0, 0, 1, 2], [-1, 0, 0, 1]])
def test_slates_that_ranks_have_no_room_for_are_refused(slates):
    costs = np.array([9, 8, 2, 1])
    with pytest.raises(ValueError, match=r"at most 2 slates of 2 packs; .* plan again"):
        assign_packs(costs, np.array(slates, np.int32), packs_per_step=4, slate_size=2, dp_size=2)


@pytest.mark.parametrize(("dp_size", "packs_per_chunk"), [(3, 1), (16, 1), (4, 4)])
def test_a_dp_that_does_not_divide_names_those_that_do(dp_size, packs_per_chunk):
    with pytest.raises(
        ValueError, match=rf"= {dp_size * packs_per_chunk} does not divide packs_per_step=8.*\[1, 2"
    ) as e:
        deal([1] * 8, dp_size=dp_size, packs_per_chunk=packs_per_chunk)

    assert f"dp_size may be one of {[1, 2] if packs_per_chunk == 4 else [1, 2, 4, 8]}" in str(e.value)


def test_packs_per_chunk_that_do_not_divide_are_the_mistake_to_name():
    with pytest.raises(ValueError, match=r"packs_per_chunk must be one of \[1, 2, 4, 8\]"):
        deal([1] * 8, dp_size=1, packs_per_chunk=3)


@pytest.mark.parametrize("asked", [{"dp_size": 0}, {"dp_size": 2, "packs_per_chunk": 0}])
def test_sizes_below_one_are_refused(asked):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        deal([1] * 8, **asked)


steps = st.tuples(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 50), min_size=1, max_size=48),
)


@given(step=steps, by_slate=st.booleans())
def test_every_pack_is_dealt_once(step, by_slate):
    num_groups, dp_size, packs_per_chunk, costs = step
    packs_per_step = num_groups * dp_size * packs_per_chunk
    costs = costs[:packs_per_step]
    slate_size = dp_size * packs_per_chunk if by_slate else 1

    table = np.array(
        deal(
            costs,
            packs_per_step=packs_per_step,
            slate_size=slate_size,
            dp_size=dp_size,
            packs_per_chunk=packs_per_chunk,
        )
    )

    assert table.shape == (num_groups, dp_size, packs_per_chunk)
    assert sorted(table[table != MISSING].tolist()) == list(range(len(costs)))


@given(step=steps)
def test_the_deal_is_that_of_the_plain_rule(step):
    num_groups, dp_size, packs_per_chunk, costs = step
    k = dp_size * packs_per_chunk
    costs = costs[: num_groups * k]
    order = sorted(range(len(costs)), key=lambda pack: (-costs[pack], pack))
    loads = [0] * dp_size
    expected = []
    for first in range(0, num_groups * k, k):
        chunks: list[list[int]] = [[] for _ in range(dp_size)]
        for pack in order[first : first + k]:
            rank = min(
                (r for r in range(dp_size) if len(chunks[r]) < packs_per_chunk), key=lambda r: (loads[r], r)
            )
            chunks[rank].append(pack)
            loads[rank] += costs[pack]
        expected.append([sorted(c) + [MISSING] * (packs_per_chunk - len(c)) for c in chunks])

    asked = {"packs_per_step": num_groups * k, "dp_size": dp_size, "packs_per_chunk": packs_per_chunk}
    assert deal(costs, slate_size=1, **asked) == expected
