"""Slates: steps whose packs cost the same, from a look-ahead over steps."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.cost import cost_model_of
from ringfeed.pipeline.planner.measure import MeasureOptions, measure

PACK = 4096
SIZES = {"pack_tokens": PACK, "packs_per_step": 16, "slate_size": 4, "balance": "work", "window": 8}


def web(seed=0, num_documents=14_000):
    """Lengths like those of web pages, one of many thousand as long as a pack."""
    lengths = np.random.default_rng(seed).lognormal(np.log(60), 1.3, num_documents)
    return np.clip(lengths, 1, PACK).astype(np.int64)


def long_heavy(seed=0, num_documents=2_000):
    """Half of the documents are longer than half a pack: nearly all packs hold one of those."""
    return np.random.default_rng(seed).integers(4, PACK + 1, num_documents)


# A model for which a pack of one document costs six times what a pack of short ones does.
COSTS = "quadratic:linear_tokens=768"


@pytest.fixture
def plan_work(plan_lengths):
    def make(lengths, **asked):
        return plan_lengths(lengths, **{**SIZES, "cost_model": cost_model_of(COSTS), **asked})

    return make


def test_ranks_work_equally_where_best_fit_leaves_them_apart(plan_work):
    even = plan_work(web()).report.settled
    plain = plan_work(web(), balance="best_fit").report.settled

    assert plain["step_imbalance"] > 1.1
    assert even["step_imbalance"] < 1.005
    assert even["step_imbalance_p99"] < 1.03
    assert even["micro_batch_imbalance"] < 1.03
    assert even["fill"] > 0.999


def test_packs_of_long_documents_are_level_and_nearly_as_full_as_by_best_fit(plan_work):
    even = plan_work(long_heavy()).report.settled
    plain = plan_work(long_heavy(), balance="best_fit").report.settled

    assert even["step_imbalance"] < 1.01
    assert even["micro_batch_imbalance"] < 1.03
    assert even["fill"] > plain["fill"] - 0.015


@pytest.mark.parametrize("lengths", [web(), long_heavy()], ids=["web", "long"])
@pytest.mark.parametrize("window", [1, 2, 8])
def test_no_document_stands_further_than_the_window_from_its_arrival(plan_work, lengths, window):
    report = plan_work(lengths, window=window).report

    assert report.displacement_max <= window


@pytest.mark.parametrize(("packs_per_step", "slate_size", "window"), [(4, 1, 1), (4, 1, 2), (8, 4, 4)])
def test_nor_does_one_where_steps_are_of_like_cost(plan_work, packs_per_step, slate_size, window):
    sizes = {"packs_per_step": packs_per_step, "slate_size": slate_size, "window": window}
    report = plan_work(long_heavy(), schedule="homogeneous", **sizes).report

    assert report.displacement_max <= window


def test_nor_where_the_end_of_a_plan_would_take_fewer_packs_by_best_fit(plan_work):
    report = plan_work(web(), schedule="homogeneous", window=8).report

    assert report.displacement_max <= 8


@pytest.mark.parametrize("seed", range(3))
def test_the_end_of_a_plan_of_packs_with_one_document_each_is_planned_in_portions(plan_work, seed):
    # A pool of 16 steps' slots takes 21 steps to go.
    lengths = np.random.default_rng(seed).integers(PACK // 2 + 1, PACK + 1, 600)
    report = plan_work(lengths, window=16).report

    assert report.displacement_max <= 17


def test_short_documents_stay_near_their_arrival(plan_work):
    report = plan_work(web()).report

    assert report.displacement_mean < 1


def test_every_slate_of_a_full_step_has_its_packs(plan_work):
    plan = plan_work(web()).plan
    for step in range(plan.num_steps - 1):
        slates = plan.step(step).column("slate").to_numpy()
        assert np.bincount(slates).tolist() == [4, 4, 4, 4]


def test_homogeneous_steps_hold_packs_of_like_cost(plan_work):
    def spread_within_steps(schedule):
        plan = plan_work(web(), schedule=schedule).plan
        costs = np.array([plan.step(i).column("cost").to_numpy() for i in range(plan.num_steps - 10)])
        return float((costs.max(axis=1) / costs.mean(axis=1)).mean())

    assert spread_within_steps("homogeneous") < 1.15
    assert spread_within_steps("spread") > 1.3


@pytest.mark.parametrize("schedule", ["spread", "homogeneous"])
def test_a_short_document_that_must_go_leaves_no_hole_in_place_of_a_long_one(plan_work, schedule):
    rng = np.random.default_rng(0)
    short, long = np.minimum(web(num_documents=6000), PACK // 4), rng.integers(PACK // 4, PACK, 6000)
    lengths = np.where(rng.random(6000) < 0.2, long, short)
    plan = plan_work(lengths, schedule=schedule).plan
    filled = [
        sum(lengths)
        for i in range(plan.num_steps - 10)
        for lengths in plan.step(i).column("lengths").to_pylist()
    ]

    assert min(filled) > PACK / 2
    assert np.mean(filled) > 0.97 * PACK


def test_steps_of_the_spread_schedule_cost_much_the_same(plan_work):
    def variation(schedule):
        plan = plan_work(web(), schedule=schedule).plan
        totals = np.array([plan.step(i).column("cost").to_numpy().sum() for i in range(plan.num_steps - 10)])
        return float(totals.std() / totals.mean())

    assert variation("spread") < variation("homogeneous") / 2


@pytest.mark.parametrize("multiple", [1, 16])
def test_padded_footprints_are_what_is_packed(plan_work, multiple):
    plan = plan_work(web(), pad_multiple=multiple).plan
    for step in range(plan.num_steps):
        for lengths in plan.step(step).column("lengths").to_pylist():
            assert sum(-(-n // multiple) * multiple for n in lengths) <= PACK


def test_half_the_dp_is_as_even_and_twice_the_dp_waits_half_as_long_as_by_best_fit(plan_work):
    options = MeasureOptions(dp_sizes=(2, 8))
    waits = {}
    for balance in ("work", "best_fit"):
        measured = measure(plan_work(web(), balance=balance).plan, options).balances
        waits[balance] = {found.dp_size: found.whole.step_imbalance - 1 for found in measured}

    assert waits["work"][2] < 0.01
    assert waits["work"][8] < waits["best_fit"][8] / 2


@pytest.mark.parametrize("model", ["tokens", "7b", "attention:hidden=4096,heads=32,layers=32,ffn=11008"])
def test_costs_of_every_size_are_levelled(plan_work, model):
    report = plan_work(web(num_documents=6000), cost_model=cost_model_of(model)).report

    assert report.settled["step_imbalance"] < 1.01


def test_the_end_of_a_plan_takes_no_more_packs_than_best_fit(plan_work):
    for seed in range(5):
        lengths = long_heavy(seed, 150)
        packs = [plan_work(lengths, balance=b).plan.num_packs for b in ("work", "best_fit")]
        assert packs[0] <= packs[1]


def test_documents_of_one_length_fill_every_step(plan_work):
    planned = plan_work([PACK] * 100)

    assert [len(step) for step in planned.steps] == [16] * 6 + [4]
    assert planned.report.step_imbalance < 1.1


def test_tiny_documents_alone_are_packed_in_order(plan_work):
    planned = plan_work([1] * 3 * PACK, packs_per_step=1, slate_size=1, window=2)

    assert [len(pack) for pack in planned.packs] == [PACK] * 3
    assert planned.report.displacement_max == 0
