"""A planner works when readers come near its end, a block at a time, and rests when it is far enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.workers.plan_ahead import PlanAhead


def test_the_first_block_is_planned_before_anybody_asks():
    ahead = PlanAhead(steps_ahead=10)

    assert ahead.until_step == 1
    ahead.planned(4, is_finished=False)
    assert ahead.until_step == 5
    ahead.planned(10, is_finished=False)
    assert ahead.until_step is None


def test_the_fastest_rank_counts():
    ahead = PlanAhead(steps_ahead=10)
    ahead.planned(20, is_finished=False)
    for step in (-1, 9, 3):
        ahead.asked(step)
    assert ahead.until_step is None
    ahead.asked(10)
    ahead.asked(2)

    assert ahead.until_step == 21


def test_a_finished_plan_needs_nothing():
    ahead = PlanAhead(steps_ahead=10)
    ahead.planned(5, is_finished=True)
    ahead.asked(4)

    assert ahead.until_step is None


def test_a_planner_that_lost_a_block_is_asked_for_it_again():
    ahead = PlanAhead(steps_ahead=5)
    ahead.planned(20, is_finished=False)
    ahead.asked(14)
    assert ahead.until_step is None
    ahead.planned(16, is_finished=False)

    assert ahead.until_step == 17


@given(st.integers(1, 50), st.integers(1, 50), st.lists(st.integers(0, 5), max_size=60))
def test_readers_never_wait_for_a_planner_that_is_fast_enough_and_it_never_runs_away(ahead, block, moves):
    policy = PlanAhead(steps_ahead=ahead)
    planned = reader = 0
    for move in moves:
        while (until := policy.until_step) is not None:
            # As a planner does: whole blocks.
            planned += -(-(until - planned) // block) * block
            policy.planned(planned, is_finished=False)
        reader += move
        policy.asked(min(reader, planned - 1))
        reader = min(reader, planned - 1)
        assert planned > reader
        assert planned <= max(0, reader) + ahead + block + 1


def test_no_steps_ahead_is_refused():
    with pytest.raises(ValueError, match="steps_ahead=0 must be at least 1"):
        PlanAhead(steps_ahead=0)
