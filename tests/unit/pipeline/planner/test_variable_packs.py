"""Variable packs of like work: small plans worked out by hand, and one as large as a real window."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.cost import QuadraticCost, TokenCost

VARIABLE = {"balance": "work", "pack_shape": "variable", "cost_model": QuadraticCost(linear_tokens=8)}


def planned(plan_lengths, lengths, **asked):
    return plan_lengths(lengths, **{**VARIABLE, "pack_tokens": 32, **asked})


def sizes(planned):
    return [sum(piece[2] for piece in pack) for pack in planned.packs]


def test_a_long_document_is_alone_and_short_ones_share_a_longer_pack(plan_lengths):
    # 16 costs 16 + 32 = 48, each 4 costs 6: eight of them, twice the tokens, cost as much.
    made = planned(plan_lengths, [16, *[4] * 8], packs_per_step=2)

    assert sizes(made) == [16, 32]
    assert made.plan.step(0)["cost"].to_pylist() == [48, 48]
    assert made.report.fill == 1.0


def test_documents_do_not_share_a_pack_beyond_its_cap(plan_lengths):
    made = planned(plan_lengths, [16, *[4] * 8], packs_per_step=2, pack_tokens=24, mean_tokens=24)

    assert sorted(sizes(made)) == [24, 24]


def test_no_pack_costs_more_than_the_budget(plan_lengths):
    # Eight documents of 4 cost 48 in all; a budget of 24 lets four of them share a pack.
    made = planned(plan_lengths, [4] * 8, packs_per_step=1, piece_tokens=8, work_budget=24)

    assert sizes(made) == [16, 16]
    assert made.plan.num_steps == 2


def test_documents_beyond_the_longest_piece_are_cut_there(plan_lengths):
    made = planned(plan_lengths, [20], packs_per_step=3, piece_tokens=8)

    assert sorted(piece for pack in made.packs for piece in pack) == [
        (0, 0, 8, 0),
        (0, 8, 8, 0),
        (0, 16, 4, 0),
    ]
    assert made.report.split == 1


def test_work_is_evened_out_over_ranks_and_not_only_over_packs(plan_lengths):
    # A document of 16 costs 48. Its rank's other pack gets less, so that both ranks have 60.
    lengths = [16, *[4] * 12]
    made = planned(plan_lengths, lengths, packs_per_step=4, slate_size=2, mean_tokens=16, max_delay=0)
    costs = made.plan.step(0)["cost"].to_pylist()

    assert costs[0] + costs[2] == costs[1] + costs[3] == 60
    assert made.plan.step(0)["slate"].to_pylist() == [0, 0, 1, 1]
    assert made.report.step_imbalance == 1.0


@pytest.mark.parametrize("max_delay", [0, 4])
def test_long_documents_wait_for_others_like_them(plan_lengths, max_delay):
    lengths = np.full(360, 2)
    # Twenty-four of them are a step: the second one comes three steps after the first.
    lengths[[30, 100]] = 20
    asked = {"packs_per_step": 2, "pack_tokens": 40, "mean_tokens": 24, "window": 5, "max_delay": max_delay}
    made = planned(plan_lengths, lengths, **asked)
    steps = [i for i, step in enumerate(made.steps) if any(piece[2] == 20 for pack in step for piece in pack)]

    assert len(steps) == (1 if max_delay else 2)
    assert made.report.displacement_max <= max(1, max_delay)


def test_a_long_document_goes_when_its_time_is_up(plan_lengths):
    lengths = np.full(240, 2)
    lengths[30] = 20
    made = planned(plan_lengths, lengths, packs_per_step=2, mean_tokens=16, window=5, max_delay=3)
    without = planned(plan_lengths, lengths, packs_per_step=2, mean_tokens=16, window=5, max_delay=0)

    assert step_of(made, 30) == step_of(without, 30) + 3


def step_of(made, document):
    return next(
        i for i, step in enumerate(made.steps) if any(p[0] == document for pack in step for p in pack)
    )


def test_buckets_are_filled(plan_lengths):
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(1, 40, 9000), rng.integers(500, 1025, 180)])
    rng.shuffle(lengths)
    asked = {"packs_per_step": 8, "slate_size": 4, "pack_tokens": 2048, "piece_tokens": 1024, "window": 8}
    costs = {"cost_model": QuadraticCost(linear_tokens=256)}
    made = planned(plan_lengths, lengths, **asked, **costs, length_buckets="powers_of_two")

    # Of a footprint between two powers, three quarters of the larger one would be full on average.
    assert made.report.settled["fill"] > 0.97
    assert {made.plan.pack_lengths.of_pack(n) for n in sizes(made)[:-8]} <= {512, 1024, 2048}


def test_eighths_are_filled_and_even(plan_lengths):
    lengths = np.clip(np.random.default_rng(1).lognormal(3.0, 1.2, size=20_000), 1, 1024).astype(int)
    asked = {"pack_tokens": 1024, "packs_per_step": 32, "slate_size": 8, "window": 8}
    costs = {"cost_model": QuadraticCost(linear_tokens=192)}
    made = planned(plan_lengths, lengths, **asked, **costs, length_buckets="eighths")

    assert made.report.settled["fill"] > 0.99
    assert made.report.settled["step_imbalance"] < 1.03
    assert len({made.plan.pack_lengths.of_pack(n) for n in sizes(made)}) <= 8


def test_ten_thousand_documents_cost_all_ranks_the_same(plan_lengths):
    lengths = np.clip(np.random.default_rng(1).lognormal(3.0, 1.2, size=20_000), 1, 1024).astype(int)
    asked = {"pack_tokens": 1024, "packs_per_step": 32, "slate_size": 8, "window": 8}
    report = planned(plan_lengths, lengths, **asked, cost_model=QuadraticCost(linear_tokens=192)).report

    assert report.fill == 1.0
    assert report.settled["step_imbalance"] < 1.002
    assert report.settled["micro_batch_imbalance"] < 1.1
    assert report.displacement_max <= 8
    assert report.displacement_mean < 0.5


def test_documents_as_long_as_the_cap_have_a_pack_each(plan_lengths):
    made = planned(plan_lengths, [32] * 9, packs_per_step=4, slate_size=2)

    assert sizes(made) == [32] * 9
    assert [len(step) for step in made.steps] == [4, 4, 1]


def test_a_cost_by_tokens_gives_packs_of_like_length(plan_lengths):
    lengths = np.random.default_rng(2).integers(1, 9, size=4000)
    asked = {"pack_tokens": 128, "packs_per_step": 8, "cost_model": TokenCost()}
    made = planned(plan_lengths, lengths, **asked)
    spread = [max(n) - min(n) for n in np.reshape(sizes(made)[: len(made.packs) // 8 * 8], (-1, 8))]

    assert max(spread[:-1]) <= 8
    assert np.mean(sizes(made)[:-8]) == pytest.approx(112, rel=0.02)
