"""Least squares with coefficients of at least 0, against all choices of columns tried in turn."""

from itertools import combinations

import numpy as np
import pytest

from ringfeed.pipeline.planner.nonnegative import nonnegative_least_squares


def best_by_trying(columns, target):
    """The least error of all subsets whose plain solution has no negative coefficient."""
    best = float(target @ target)
    size = columns.shape[1]
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            found = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            if (found >= 0).all():
                best = min(best, float(np.square(columns[:, chosen] @ found - target).sum()))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_columns_is_closer(seed):
    draw = np.random.default_rng(seed)
    columns = draw.normal(size=(8, 5)) * 10.0 ** draw.integers(-6, 7, size=5)
    target = draw.normal(size=8)
    found = nonnegative_least_squares(columns, target)
    assert (found >= 0).all()
    assert np.square(columns @ found - target).sum() <= best_by_trying(columns, target) * (1 + 1e-9) + 1e-12


def test_columns_that_all_point_away_get_nothing():
    assert nonnegative_least_squares(-np.eye(3), np.ones(3)).tolist() == [0, 0, 0]


def test_two_equal_columns_still_end():
    columns = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 2.0]])
    found = nonnegative_least_squares(columns, np.array([3.0, 4.0, 5.0]))
    assert columns @ found == pytest.approx([3, 4, 5])


@pytest.mark.parametrize("wrong", [np.zeros((2, 1)), np.array([[np.nan], [1.0]])])
def test_columns_that_say_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="every column needs a value other than 0"):
        nonnegative_least_squares(wrong, np.ones(2))
