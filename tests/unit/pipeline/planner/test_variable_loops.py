"""The loops behind variable packs, one by one."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.variable_groups import choose_waiting, num_forced
from ringfeed.pipeline.planner.variable_places import find_pack, new_packs, place, place_in_order, put
from ringfeed.pipeline.planner.variable_rules import LEFT, PoolPieces, StepRules
from ringfeed.pipeline.planner.variable_steps import pack_steps


def rules(**changes):
    numbers = {
        "packs": 4,
        "ranks": 2,
        "capacity": 10,
        "budget": 1000,
        "target": 40,
        "delay": 8,
        "outlier": 50,
        "tolerance": 10,
        "buckets": ints([]),
        "final": False,
    }
    return StepRules(**{**numbers, **changes})


def ints(values):
    return np.array(values, dtype=np.int64)


def chosen(costs, *, forced=0, slots=None, **changes):
    slots = np.ones(len(costs), np.int64) if slots is None else ints(slots)
    return np.flatnonzero(choose_waiting(slots, ints(costs), forced, rules(**changes))).tolist()


@pytest.mark.parametrize(
    ("steps_left", "expected"),
    [
        ([], 0),
        ([1, 1], 0),
        ([0, 1], 1),
        ([0, 0, 5], 2),
        # Five places of two remain for six pieces of the next step on: one goes now.
        ([1, 1, 1], 1),
        ([1, 1, 2, 2, 2], 1),
    ],
)
def test_those_go_now_that_later_steps_have_no_place_for(steps_left, expected):
    assert num_forced(ints(steps_left), 2) == expected


def test_no_more_must_go_than_a_step_has_packs():
    assert num_forced(ints([0] * 7), 2) == 2
    assert num_forced(ints([0]), 2) == 1


def test_pieces_that_are_late_already_go_first_one_to_a_pack():
    pool = PoolPieces(ints([9] * 12), ints([200] * 12))
    packs, _, num_packs = pack_steps(pool, ints([0] * 12), rules(final=True))

    assert num_packs == 12
    assert (packs // 4).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_no_pack_stays_empty_beside_one_long_piece():
    # Rank 1 has less work all the way, and below the long piece's peak there is room for all of it.
    pool = PoolPieces(ints([5, 1, 1, 1]), ints([100, 1, 1, 1]))
    where, lacking = place(
        pool, np.arange(4), np.ones(4, np.bool_), new_packs(np.full(4, 10), rules()), rules()
    )

    assert lacking == 0
    assert sorted(where.tolist()) == [0, 1, 2, 3]


def test_a_group_goes_when_its_costs_are_alike():
    assert chosen([100, 300, 105, 400]) == [0, 2]
    assert chosen([100, 300, 120, 400]) == []


def test_the_closest_group_goes_first_and_others_while_there_is_room():
    costs = [100, 101, 200, 208, 300, 305]
    assert chosen(costs, packs=2) == [0, 1]
    assert chosen(costs) == [0, 1, 4, 5]
    # 300 and 305 come next, and would be too much for the step.
    assert chosen(costs, slots=[10, 10, 1, 1, 20, 20]) == [0, 1]


def test_a_piece_that_must_go_takes_the_one_nearest_to_it():
    assert chosen([200, 320, 170, 500], forced=1) == [0, 2]
    assert chosen([200], forced=1) == [0]


def test_pieces_that_only_lacked_room_go_at_once():
    assert chosen([40, 300]) == [0]


def test_groups_go_unlike_once_half_of_all_that_may_wait_do():
    costs = [100, 200, 320, 500]
    assert chosen(costs, delay=2) == []
    assert chosen([*costs, 900], delay=2) == [0, 1, 2, 3]


def test_a_piece_goes_to_the_rank_with_the_least_work():
    packs = new_packs(np.full(4, 10), rules())
    put(packs, 0, 5, 100)
    put(packs, 1, 5, 30)
    put(packs, 3, 5, 30)

    # Rank 0 has 100, rank 1 has 60, in packs of 30; the peaks of the rows are 100 and 30.
    assert find_pack(packs, 1, 10, 1000, 10) == 1
    put(packs, 3, 1, 50)
    assert find_pack(packs, 1, 10, 1000, 10) == 2
    assert find_pack(packs, 6, 10, 1000, 10) == 2


def test_a_piece_goes_where_there_is_room_and_budget():
    packs = new_packs(ints([10, 4, 4, 4]), rules())
    put(packs, 0, 5, 100)

    assert find_pack(packs, 5, 10, 1000, 10) == 0
    assert find_pack(packs, 6, 10, 1000, 10) == -1
    assert find_pack(packs, 5, 10, 105, 10) == -1
    assert find_pack(packs, 3, 10, 1000, 0) == 1


def test_in_order_the_first_get_a_pack_each_and_the_rest_what_is_left():
    pool = PoolPieces(ints([9, 8, 7, 6, 3, 4, 1]), ints([9, 8, 7, 6, 3, 4, 1]))
    where = place_in_order(pool, np.arange(7), new_packs(np.full(4, 10), rules()), rules())

    # 3 fits beside the 6, the 4 finds no room, and what comes after it waits.
    assert where.tolist() == [0, 1, 2, 3, 3, LEFT, LEFT]
