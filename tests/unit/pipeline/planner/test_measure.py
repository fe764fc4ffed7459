"""A finished plan measured: bounds beside figures, other dp sizes and cost models, shares of sources."""

from dataclasses import replace

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.manifest import read_manifest, write_manifest
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.balance import BalanceMeter
from ringfeed.pipeline.planner.cost import QuadraticCost, TokenCost
from ringfeed.pipeline.planner.measure import MeasureOptions, measure
from ringfeed.pipeline.planner.options import BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.ranks import assign_packs

WIDE = {"pack_tokens": 4096, "packs_per_step": 8, "slate_size": 4, "window": 2}


@pytest.fixture
def lengths():
    draw = np.random.default_rng(0)
    return np.concatenate([draw.integers(1, 700, size=500), draw.integers(1500, 4096, size=40)])


def without_bounds(plan):
    """Make the plan's manifest that of an earlier ringfeed, which stored no bounds."""

    def older(report):
        settled = None if report["settled"] is None else older({"settled": None, **report["settled"]})
        kept = {name: value for name, value in report.items() if not name.endswith("_bound")}
        return {**kept, "settled": settled}

    manifest = read_manifest(plan.path, format="ringfeed-plan")
    facts = {**manifest.facts, "report": older(manifest.facts["report"])}
    write_manifest(plan.path, replace(manifest, facts=facts))
    return Plan.open(plan.path)


def test_measured_by_its_own_dp_and_costs_a_plan_is_what_its_report_says(plan_lengths, lengths):
    planned = plan_lengths(lengths, **WIDE, block_limits=BlockLimits(steps=3))
    [own] = measure(planned.plan, MeasureOptions()).balances
    assert (own.dp_size, own.cost_model) == (4, "quadratic:linear_tokens=24576")
    for name in ("step_imbalance", "step_imbalance_p99_bound", "micro_batch_imbalance_bound"):
        assert getattr(own.whole, name) == getattr(planned.report, name)
        assert getattr(own.settled, name) == planned.report.settled[name]
    measured = measure(without_bounds(planned.plan), MeasureOptions())
    assert measured.balances == [own]


def test_what_was_measured_when_a_plan_was_made_is_not_measured_again(plan_lengths, lengths, monkeypatch):
    plan = plan_lengths(lengths, **WIDE).plan
    metered = set()
    add = BalanceMeter.add

    def noted(meter, *rows, **named):
        metered.add(meter.dp_size)
        add(meter, *rows, **named)

    monkeypatch.setattr(BalanceMeter, "add", noted)
    measure(plan, MeasureOptions(dp_sizes=(2, 4)))
    assert metered == {2}


def test_bounds_never_lie_beyond_what_was_reached(plan_lengths, lengths):
    planned = plan_lengths(lengths, **WIDE)
    options = MeasureOptions(dp_sizes=(1, 2, 8), cost_models=(TokenCost(), QuadraticCost(linear_tokens=64)))
    measured = measure(planned.plan, options)
    assert planned.report.fill <= measured.fill_bound <= 1
    assert measured.packs_bound <= planned.report.packs
    assert len(measured.balances) == 4 * 3
    for balance in measured.balances:
        whole = balance.whole
        assert balance.documents_bound is not None
        assert 1 <= balance.documents_bound <= whole.step_imbalance_bound <= whole.step_imbalance
        assert whole.step_imbalance_p99_bound <= whole.step_imbalance_p99
        assert whole.micro_batch_imbalance_bound <= whole.micro_batch_imbalance


def test_ranks_are_dealt_by_planned_costs_and_measured_by_others(plan_lengths, lengths):
    plan = plan_lengths(lengths, **WIDE).plan
    measured = measure(plan, MeasureOptions(dp_sizes=(2,), cost_models=(TokenCost(),)))
    [balance] = [b for b in measured.balances if (b.dp_size, b.cost_model) == (2, "tokens")]
    worst = total = 0
    for step in range(plan.num_steps):
        packs = plan.step_packs(step)
        table = assign_packs(packs.costs, packs.slates, packs_per_step=8, slate_size=4, dp_size=2)
        tokens = np.add.reduceat(packs.pieces.lengths, packs.offsets[:-1])
        loads = np.append(tokens, 0)[table].sum(axis=(0, 2))
        worst, total = worst + int(loads.max()), total + int(loads.sum())
    assert balance.whole.step_imbalance == pytest.approx(worst / (total / 2))


def test_pieces_that_cannot_share_packs_lower_the_fill_that_is_possible(plan_lengths):
    planned = plan_lengths([60] * 20, pack_tokens=100, packs_per_step=4)
    measured = measure(planned.plan, MeasureOptions())
    assert (measured.packs_bound, measured.fill_bound) == (20, 0.6)
    assert measured.source_supervised is None
    assert planned.report.fill == 0.6


def test_waste_is_told_for_every_multiple_below(plan_lengths):
    planned = plan_lengths([5, 7, 20], pack_tokens=48, max_cp=6)
    measured = measure(planned.plan, MeasureOptions())
    assert list(measured.waste_by_multiple) == [1, 3, 6, 12]
    assert measured.waste_by_multiple[1] == 0
    assert measured.waste_by_multiple[12] == pytest.approx(1 - 32 / 48)
    assert planned.report.slot_waste == pytest.approx(16 / 48)


def test_tokens_are_counted_per_source(tmp_path):
    for name, lengths in (("web", [5, 6, 7]), ("code", [20])):
        documents = [np.zeros(length, np.uint16) for length in lengths]
        write_corpus(tmp_path / name, documents, name=name, pad_id=0)
    corpora = [tmp_path / "web", tmp_path / "code"]
    output = tmp_path / "plan"
    run_plan(PlanOptions(corpora=corpora, output=output, pack_tokens=20, packs_per_step=2, pad_multiple=1))
    measured = measure(Plan.open(tmp_path / "plan"), MeasureOptions())
    assert measured.source_tokens == {"web": 18, "code": 20}
    assert measured.source_supervised == {"web": 15, "code": 19}
    assert measured.as_dict()["source_shares"] == pytest.approx({"web": 18 / 38, "code": 20 / 38})


def test_a_cost_model_that_is_only_known_by_name_has_no_bound_of_documents(plan_lengths):
    class Odd:
        name = "odd"

        def piece_costs(self, lengths):
            return lengths * 2 + 1

    planned = plan_lengths([5, 6, 7], cost_model=Odd())
    assert measure(planned.plan, MeasureOptions()).balances[0].documents_bound is None
    known = measure(planned.plan, MeasureOptions(cost_models=(Odd(),)))
    assert known.balances[0].documents_bound == 1
    assert len(known.balances) == 1


def test_a_series_has_a_fill_and_loads_for_each_step(plan_lengths, lengths):
    planned = plan_lengths(lengths, **WIDE, block_limits=BlockLimits(steps=2))
    series = measure(planned.plan, MeasureOptions()).series
    plan = planned.plan
    assert series.loads.shape == (plan.num_steps, 4)
    tokens = [plan.step_packs(step).pieces.lengths.sum() for step in range(plan.num_steps)]
    packs = [plan.step_packs(step).num_packs for step in range(plan.num_steps)]
    assert series.fill == pytest.approx(np.array(tokens) / (np.array(packs) * 4096), rel=1e-6)
    assert series.loads.sum() == pytest.approx(sum(int(b.rows.costs.sum()) for b in plan.blocks()), rel=1e-6)


def test_variable_packs_could_have_no_tail_at_all(plan_lengths, lengths):
    planned = plan_lengths(lengths, **WIDE, pack_shape="variable", length_buckets="powers_of_two", max_cp=2)
    measured = measure(planned.plan, MeasureOptions())
    assert planned.report.fill < measured.fill_bound < 1
    padded = -(-lengths // 4) * 4
    assert measured.fill_bound == pytest.approx(lengths.sum() / padded.sum())
    slots = planned.report.tokens + planned.report.slot_padding + planned.report.tail_padding
    assert 0.9 < measured.series.fill.mean() / (planned.report.tokens / slots) < 1.1
