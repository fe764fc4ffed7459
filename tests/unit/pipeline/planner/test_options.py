"""What a user may ask for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.planner.mixture import Mixture, MixtureSource
from ringfeed.pipeline.planner.options import Balance, BlockLimits, Overflow, PlanOptions, Schedule


def options(**asked):
    defaults = {"output": Path("p"), "corpora": [Path("c")], "pack_tokens": 8192, "packs_per_step": 8}
    if "pad_multiple" not in asked:
        defaults["max_cp"] = 2
    return PlanOptions(**{**defaults, **asked})


def test_max_cp_pads_to_twice_itself():
    assert options(max_cp=8).document_multiple == 16


def test_pack_tokens_between_two_multiples_names_both():
    with pytest.raises(ValueError, match=r"pack_tokens=8193 is not a multiple of 16 .*\[8192, 8208\]"):
        options(pack_tokens=8193, max_cp=8)


def test_pack_tokens_below_the_multiple_names_the_only_neighbour():
    with pytest.raises(ValueError, match=r"pack_tokens=5 is not a multiple of 12 \(pad_multiple\).*\[12\]"):
        options(pack_tokens=5, pad_multiple=12)


@pytest.mark.parametrize("multiple", [1, 3, 12, 1000])
def test_any_multiple_is_legal(multiple):
    assert options(pack_tokens=3000, pad_multiple=multiple).document_multiple == multiple


def test_a_slate_that_does_not_divide_the_step_names_those_that_do():
    with pytest.raises(ValueError, match=r"slate_size=3 .*packs_per_step=8; valid: \[1, 2, 4, 8\]"):
        options(slate_size=3)


@pytest.mark.parametrize(
    "asked",
    [
        {"pack_tokens": 0},
        {"packs_per_step": 0},
        {"window": 0},
        {"epochs": 0},
        {"max_cp": 0},
        {"slate_size": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"pack_tokens": 2**31},
        {"balance": "random"},
        {"overflow": "cut"},
        {"positions": "start"},
        {"boundary_label": "none"},
        {"corpora": []},
        {"lengths": Path("x.npy")},
        {"max_cp": None},
        {"pad_multiple": 2, "max_cp": 2},
    ],
    ids=str,
)
def test_senseless_options_are_refused_with_their_name(asked):
    name = {"corpora": "corpora", "lengths": "corpora", "max_cp": "max_cp|pad_multiple"}.get(
        next(iter(asked)), next(iter(asked))
    )
    with pytest.raises(ValueError, match=name):
        options(**asked)


def test_words_become_choices():
    asked = options(balance="concat", overflow="drop")

    assert (asked.balance, asked.overflow) == (Balance.CONCAT, Overflow.DROP)


def test_work_is_the_default_and_spreads_slates():
    assert options().balance is Balance.WORK
    assert options().schedule_of_steps is Schedule.SPREAD
    assert options(schedule="homogeneous").schedule_of_steps is Schedule.HOMOGENEOUS


def test_an_unknown_schedule_names_those_there_are():
    with pytest.raises(ValueError, match="schedule='even': must be one of spread, homogeneous"):
        options(schedule="even")


def test_long_documents_are_a_sixteenth_of_a_pack_by_default():
    assert options(pack_tokens=8192).tokens_of_long == 512
    assert options(pack_tokens=8192, long_tokens=100).tokens_of_long == 100


def test_long_documents_beyond_a_pack_are_refused_with_ways_out():
    with pytest.raises(ValueError, match=r"long_tokens=8193 is more than a pack.*pack_tokens=8192.*best_fit"):
        options(pack_tokens=8192, long_tokens=8193)


@pytest.mark.parametrize("asked", [{"schedule": "spread"}, {"long_tokens": 4}])
@pytest.mark.parametrize("other", [{"balance": "best_fit"}, {"pack_shape": "variable"}])
def test_what_belongs_to_slates_is_refused_where_there_are_none(asked, other):
    with pytest.raises(ValueError, match=r"only for balance=work with pack_shape=fixed.*leave it out"):
        options(**asked, **other)


def test_a_block_holds_at_least_one_step():
    with pytest.raises(ValueError, match="steps must be at least 1"):
        BlockLimits(steps=0)


NUMBERS = {"pack_tokens": 16, "packs_per_step": 4, "window": 2, "slate_size": 2, "long_tokens": 4, "seed": 3}


def test_whole_numbers_of_numpy_are_as_good_as_pythons():
    asked = {name: np.int64(value) for name, value in NUMBERS.items()}

    assert options(**asked) == options(**NUMBERS)
    assert {type(getattr(options(**asked), name)) for name in NUMBERS} == {int}


@pytest.mark.parametrize("value", [2.5, 2.0, "2", np.float64(2)])
@pytest.mark.parametrize("name", NUMBERS)
def test_fractions_and_text_are_no_whole_numbers(name, value):
    with pytest.raises(ValueError, match=rf"{name}=.*must be a whole number"):
        options(**{**NUMBERS, name: value})


def test_a_mixture_of_numpy_numbers_has_the_json_of_pythons():
    plain = Mixture(sources=(MixtureSource(name="a", weight=0.5, epochs=2),))
    numbers: dict[str, Any] = {"weight": np.float32(0.5), "epochs": np.int64(2)}
    other = Mixture(sources=(MixtureSource(name="a", **numbers),))

    assert other.to_json() == plain.to_json()
