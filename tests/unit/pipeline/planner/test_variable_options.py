"""What a user may ask of variable packs of like work."""

from pathlib import Path

import pytest

from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.variable_options import VariableWork


def options(**asked):
    defaults = {
        "output": Path("p"),
        "corpora": [Path("c")],
        "pack_tokens": 4096,
        "packs_per_step": 8,
        "max_cp": 2,
        "pack_shape": "variable",
    }
    return PlanOptions(**{**defaults, **asked})


def test_the_defaults_are_an_eighth_of_room_and_a_wait_within_the_window():
    assert options(window=5).variable == VariableWork(
        mean_tokens=3584, piece_tokens=4096, work_budget=None, max_delay=4
    )
    assert options().longest_piece == 4096


def test_other_balances_have_variable_packs_without_these_numbers():
    asked = options(balance="best_fit")

    assert (asked.variable, asked.longest_piece) == (None, 4096)


@pytest.mark.parametrize("field", ["mean_tokens", "piece_tokens", "work_budget", "max_delay"])
@pytest.mark.parametrize("shape", [{"pack_shape": "fixed"}, {"balance": "in_order"}])
def test_numbers_that_have_nothing_to_do_are_refused(field, shape):
    with pytest.raises(ValueError, match=f"{field}=4: only for pack_shape=variable with balance=work.*leave"):
        options(**{field: 4}, **shape)


def test_a_budget_that_the_longest_piece_breaks_names_both_ways_out():
    # 4096 + 4096 * 4096 // 24576 = 4778, 3436 + 3436 * 3436 // 24576 = 3916.
    with pytest.raises(
        ValueError, match=r"work_budget=3920 is below 4778.*work_budget=4778.*piece_tokens=3436"
    ):
        options(work_budget=3920)
    assert options(work_budget=4778).variable.work_budget == 4778
    assert options(work_budget=3920, piece_tokens=3436).longest_piece == 3436
    with pytest.raises(ValueError, match="work_budget=3920 is below 3921"):
        options(work_budget=3920, piece_tokens=3440)


def test_a_budget_below_any_piece_names_the_only_way_out():
    with pytest.raises(ValueError, match=r"work_budget=3 is below 4778.*pass work_budget=4778 at least$"):
        options(work_budget=3)


@pytest.mark.parametrize("field", ["mean_tokens", "piece_tokens"])
def test_lengths_beyond_the_pack_are_refused(field):
    with pytest.raises(
        ValueError, match=f"{field}=4100 must be .* at most pack_tokens=4096.*raise pack_tokens"
    ):
        options(**{field: 4100})
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        options(**{field: 0})


def test_a_longest_piece_between_two_multiples_names_both():
    with pytest.raises(ValueError, match=r"piece_tokens=1001 is not a multiple of 4.*\[1000, 1004\]"):
        options(piece_tokens=1001)


@pytest.mark.parametrize("max_delay", [-1, 4, 5])
def test_a_wait_beyond_the_window_is_refused(max_delay):
    with pytest.raises(ValueError, match=f"max_delay={max_delay} must be .* below window=4.*raise window"):
        options(window=4, max_delay=max_delay)
    assert options(window=4, max_delay=3).variable.max_delay == 3
