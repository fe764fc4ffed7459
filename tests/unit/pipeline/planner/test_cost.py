"""Cost models: exact whole numbers, and names that say everything about them."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.cost import (
    DEFAULT_COST_MODEL,
    QuadraticCost,
    TokenCost,
    check_costs,
    cost_model_of,
)


def costs(model, *lengths):
    return model.piece_costs(np.array(lengths, dtype=np.int64)).tolist()


def test_at_the_linear_length_attention_costs_as_much_as_all_else():
    assert costs(QuadraticCost(linear_tokens=1000), 1000, 2000, 1) == [2000, 6000, 1]


def test_the_longest_piece_that_offsets_allow_is_counted_exactly():
    longest = 2**31 - 1
    assert costs(DEFAULT_COST_MODEL, longest) == [longest + longest**2 // 24_576]


def test_token_costs_are_the_lengths_and_no_view_of_them():
    lengths = np.array([3, 5], dtype=np.int64)
    TokenCost().piece_costs(lengths)[0] = 7
    assert lengths.tolist() == [3, 5]
    assert costs(TokenCost(), 3, 5) == [3, 5]


@pytest.mark.parametrize(("preset", "linear_tokens"), [("7b", 24_576), ("70b", 49_152)])
def test_presets_have_the_lengths_that_the_documentation_says(preset, linear_tokens):
    assert cost_model_of(preset) == QuadraticCost(linear_tokens=linear_tokens)


@pytest.mark.parametrize("spec", ["7b", "70b", "tokens", "quadratic:linear_tokens=512"])
def test_a_name_describes_its_model(spec):
    model = cost_model_of(spec)
    assert cost_model_of(model.name) == model


@pytest.mark.parametrize("spec", ["", "8b", "table", "table:", "linear:3"])
def test_what_describes_no_model_is_refused_with_those_that_are_there(spec):
    with pytest.raises(ValueError, match="is no cost model; give one of 7b, 70b, tokens"):
        cost_model_of(spec)


def test_a_linear_length_of_zero_is_refused():
    with pytest.raises(ValueError, match="linear_tokens must be an integer of at least 1, got 0"):
        cost_model_of("quadratic:linear_tokens=0")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("quadratic", "needs linear_tokens=N"),
        ("quadratic:linear_tokens=-3", "'linear_tokens=-3' is neither a whole number nor true or false"),
        ("quadratic:l0=5", "'l0=5' is no field, or is there twice; fields: linear_tokens"),
    ],
)
def test_settings_of_a_model_are_checked_one_by_one(spec, told):
    with pytest.raises(ValueError, match=told):
        cost_model_of(spec)


def test_costs_whose_sums_leave_int64_are_refused():
    check_costs(QuadraticCost(linear_tokens=1), pack_tokens=2**20, packs_per_step=64)
    with pytest.raises(ValueError, match="more than int64 holds"):
        check_costs(QuadraticCost(linear_tokens=1), pack_tokens=2**31 - 1, packs_per_step=64)
