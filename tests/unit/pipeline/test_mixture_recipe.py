"""Whole-number weights and limits at any step."""

import pytest

from ringfeed.pipeline.mixture_recipe import (
    WEIGHT_UNIT,
    Interpolation,
    LengthLimit,
    LongDocuments,
    MixtureRecipe,
    WeightPoint,
    apportion,
)
from ringfeed.pipeline.recipe import Recipe, SourceRef

HALF = WEIGHT_UNIT // 2


def recipe(*points, limits=(), **asked):
    return MixtureRecipe(
        points=tuple(WeightPoint(step=step, weights=weights) for step, weights in points),
        drops_after=(None,) * len(points[0][1]),
        limits=tuple(LengthLimit(step=step, max_tokens=tokens) for step, tokens in limits),
        **asked,
    )


@pytest.mark.parametrize("weights", [[7, 3], [0.7, 0.3], [70.0, 30]], ids=str)
def test_proportional_weights_are_one_recipe(weights):
    assert apportion(weights) == (11744051, 5033165)


@pytest.mark.parametrize("weights", [[1, 1, 1], [1e-12, 1], [0.1] * 7, [0, 5, 0], [1e300, 1e-300]], ids=str)
def test_shares_sum_to_the_whole_and_none_above_zero_vanishes(weights):
    shares = apportion(weights)

    assert sum(shares) == WEIGHT_UNIT
    assert [share > 0 for share in shares] == [weight > 0 for weight in weights]


def test_the_largest_remainders_get_what_is_left_over():
    assert apportion([1, 1, 1], 4) == (2, 1, 1)
    assert apportion([5, 3, 3], 4) == (2, 1, 1)


def test_more_shares_than_units_still_sum_to_them():
    assert sum(apportion([1, 1, 1, 1], 2)) == 2


def test_no_weight_gives_no_share():
    assert apportion([0, 0]) == (0, 0)


def test_constant_weights_hold_until_the_next_point():
    asked = recipe((0, (HALF, HALF)), (10, (WEIGHT_UNIT, 0)))

    assert asked.weights_at(9) == (HALF, HALF)
    assert asked.weights_at(10) == asked.weights_at(10**9) == (WEIGHT_UNIT, 0)
    assert [asked.next_change(step) for step in (0, 9, 10)] == [10, 10, None]


def test_linear_weights_go_straight_from_point_to_point():
    asked = recipe((0, (WEIGHT_UNIT, 0)), (8, (HALF, HALF)), interpolation=Interpolation.LINEAR)

    assert asked.weights_at(2) == (WEIGHT_UNIT - HALF // 4, HALF // 4)
    assert asked.weights_at(8) == asked.weights_at(99) == (HALF, HALF)
    assert all(sum(asked.weights_at(step)) == WEIGHT_UNIT for step in range(10))
    assert [asked.next_change(step) for step in (0, 7, 8)] == [1, 8, None]


def test_limits_hold_from_their_step_on():
    asked = recipe((0, (WEIGHT_UNIT,)), limits=[(2, 100), (5, 300), (9, None)])

    assert [asked.limit_at(step) for step in (0, 1, 2, 4, 5, 9)] == [None, None, 100, 100, 300, None]
    assert [asked.next_change(step) for step in (0, 2, 5, 9)] == [2, 5, 9, None]
    assert asked.bucket_edges() == (100, 300)


def test_cut_documents_wait_in_no_bucket():
    asked = recipe((0, (WEIGHT_UNIT,)), limits=[(0, 100)], long_documents=LongDocuments.CUT)

    assert asked.bucket_edges() == ()


def test_a_recipe_with_a_mixture_comes_back_from_json():
    mixture = recipe((0, (HALF, HALF)), (3, (WEIGHT_UNIT, 0)), limits=[(1, 5), (2, None)])
    sources = (SourceRef(kind="corpus", name="a", fingerprint="f", num_documents=3),)
    made = Recipe(
        pack_tokens=8, pack_shape="fixed", length_buckets="none", pad_multiple=1,
        packs_per_step=1, slate_size=1, balance="best_fit", window=1,
        overflow="split", seed=None, positions="restart", boundary_label="next", unsupervised="refuse",
        mean_tokens=None, piece_tokens=None, work_budget=None, max_delay=None,
        cost_model="7b", sources=sources, mixture=mixture,
    )  # fmt: skip

    back = Recipe.from_json(made.to_json())
    assert back == made
    assert back.fingerprint == made.fingerprint
