"""``run_plan`` as a whole: corpora, files of lengths, recipe, report."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.ranks import assign_packs

REPORT_KEYS = {
    *("fill", "step_imbalance", "step_imbalance_p99", "micro_batch_imbalance"),
    *("displacement_mean", "displacement_max", "dropped", "split", "truncated"),
}


def make_corpus(folder, name, lengths):
    documents = [np.arange(length, dtype=np.int32) for length in lengths]
    write_corpus(folder / name, documents, name=name, pad_id=0)
    return folder / name


def plan_corpora(output, corpora, **asked):
    defaults: dict[str, Any] = {
        "pack_tokens": 12,
        "packs_per_step": 2,
        "pad_multiple": 1,
        "balance": "in_order",
    }
    run_plan(PlanOptions(output=output, corpora=corpora, **{**defaults, **asked}))
    return Plan.open(output)


def test_supervised_tokens_are_counted_per_pack_and_source(tmp_path):
    corpora = [make_corpus(tmp_path, "prose", [5, 3]), make_corpus(tmp_path, "code", [4, 25])]
    plan = plan_corpora(tmp_path / "plan", corpora)
    rows = [row for i in range(plan.num_steps) for row in plan.step(i).to_pylist()]

    # 5 + 3 + 4 tokens; then 25 as 12 | 12 | 1, where every piece that goes on keeps its last label.
    assert [row["documents"] for row in rows] == [[0, 1, 2], [3], [3], [3]]
    assert [row["supervised_by_source"] for row in rows] == [[6, 3], [0, 12], [0, 12], [0, 0]]
    assert [row["supervised"] for row in rows] == [9, 12, 12, 0]
    assert plan.sources == ("prose", "code")


def test_ignored_boundary_labels_are_not_counted(tmp_path):
    corpora = [make_corpus(tmp_path, "code", [24])]
    plan = plan_corpora(tmp_path / "plan", corpora, boundary_label="ignore")

    assert plan.step(0).column("supervised").to_pylist() == [11, 11]


def test_a_truncated_document_keeps_the_label_of_its_last_token(tmp_path):
    corpora = [make_corpus(tmp_path, "code", [24])]
    plan = plan_corpora(tmp_path / "plan", corpora, overflow="truncate")

    assert plan.step(0).column("supervised").to_pylist() == [12]


def test_a_step_without_a_supervised_token_is_refused_and_leaves_nothing(tmp_path):
    corpora = [make_corpus(tmp_path, "tiny", [24, *[1] * 24, 5])]
    with pytest.raises(ValueError, match=r"step 1 would have no supervised token.*larger packs"):
        plan_corpora(tmp_path / "plan", corpora)

    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_lengths_alone_leave_supervised_unknown(plan_lengths):
    step = plan_lengths([1, 1]).plan.step(0)

    assert step.column("supervised").to_pylist() == [None]
    assert step.column("supervised_by_source").to_pylist() == [None]


def test_costs_are_integers_of_the_real_lengths(plan_lengths):
    step = plan_lengths([49_152, 100], pack_tokens=65_536, max_cp=8).plan.step(0)

    assert step.column("cost").to_pylist() == [49_152 + 98_304 + 100]


def test_slates_hold_packs_of_like_cost(plan_lengths):
    planned = plan_lengths([3, 9, 2, 8], packs_per_step=4, slate_size=2, balance="in_order")
    step = planned.plan.step(0).to_pydict()

    assert step["pack"] == [0, 1, 2, 3][: len(step["pack"])]
    assert list(zip(step["cost"], step["slate"], strict=True)) == [(3, 1), (9, 0), (10, 0)]


def test_the_report_is_what_the_table_says(plan_lengths):
    lengths = np.random.default_rng(0).integers(1, 60_000, size=400)
    planned = plan_lengths(lengths, pack_tokens=65_536, packs_per_step=8, slate_size=4, max_cp=2, window=2)
    plan, report = planned.plan, planned.report
    steps = []
    waits = 0
    for i in range(plan.num_steps):
        packs = plan.step_packs(i)
        table = assign_packs(packs.costs, packs.slates, packs_per_step=8, slate_size=4, dp_size=4)
        costs = np.append(packs.costs, 0)[table].sum(axis=2)
        steps.append(costs.sum(axis=0))
        waits += costs.max(axis=1).sum()
    loads = np.array(steps)

    assert report.fill == pytest.approx(lengths.sum() / (plan.num_packs * 65_536))
    assert report.step_imbalance == pytest.approx(loads.max(axis=1).sum() / loads.mean(axis=1).sum())
    assert report.step_imbalance_p99 == pytest.approx(
        np.percentile(loads.max(axis=1) / loads.mean(axis=1), 99)
    )
    assert report.micro_batch_imbalance == pytest.approx(waits / (loads.sum() / 4))
    assert set(report.as_dict()) >= REPORT_KEYS
    assert report.slot_padding + report.tail_padding + report.tokens == plan.num_packs * 65_536
    padded = -(-lengths // 4) * 4
    assert report.slot_waste == pytest.approx((padded - lengths).sum() / (plan.num_packs * 65_536))
    assert report.tail_waste == pytest.approx(1 - padded.sum() / (plan.num_packs * 65_536))


def test_displacement_is_measured_against_arrival_order(plan_lengths):
    # Steps take 10 and 9 slots. In arrival order the 9 begins at slot 6, in step 0, and the 4 at slot 15, in
    # step 1; best fit has them the other way round.
    planned = plan_lengths([6, 9, 4], window=2)

    assert planned.documents == [[0, 2], [1]]
    assert planned.report.displacement_max == 1
    assert planned.report.displacement_mean == pytest.approx(2 / 3)
    assert planned.report.displacement_counts[:3] == [1, 2, 0]
    assert sum(planned.report.displacement_counts) == 3


def test_in_order_displaces_nothing(plan_lengths):
    lengths = np.random.default_rng(0).integers(1, 11, size=500)
    report = plan_lengths(lengths, balance="in_order", packs_per_step=4, seed=1).report

    assert (report.displacement_mean, report.displacement_max) == (0, 0)


def test_a_finished_plan_is_left_as_it_is(plan_lengths, tmp_path):
    output = tmp_path / "plan"
    first = plan_lengths([3, 4, 5], output=output)
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    again = run_plan(PlanOptions(lengths=tmp_path / "lengths-1.npy", output=output, **SMALL))

    assert again == first.report
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before


SMALL: dict[str, Any] = {"pack_tokens": 10, "packs_per_step": 1, "balance": "best_fit", "pad_multiple": 1}


def test_the_manifest_says_once_what_was_asked_for(plan_lengths):
    manifest = plan_lengths([3, 4, 5]).plan.manifest

    assert manifest.request == {}
    assert manifest.made_from["segments"][0]["first_step"] == 0


def test_another_recipe_in_the_same_place_is_refused_with_the_difference(plan_lengths, tmp_path):
    plan_lengths([3, 4, 5], output=tmp_path / "plan")
    with pytest.raises(ValueError, match=r"seed: has None, asked for 7"):
        plan_lengths([3, 4, 5], output=tmp_path / "plan", seed=7)


def test_the_recipe_records_what_shaped_slates(plan_lengths):
    recipe = plan_lengths([3, 4], balance="work").plan.recipe
    other = plan_lengths([3, 4], balance="work", schedule="homogeneous", long_tokens=2).plan.recipe

    assert (recipe.balance, recipe.schedule, recipe.long_tokens) == ("work", "spread", 1)
    assert (other.schedule, other.long_tokens) == ("homogeneous", 2)
    assert recipe.fingerprint != other.fingerprint


def test_plans_without_slates_record_nothing_of_them(plan_lengths):
    recipe = plan_lengths([3, 4], balance="best_fit").plan.recipe

    assert (recipe.schedule, recipe.long_tokens) == (None, None)


def test_the_recipe_leaves_out_epochs_and_where_blocks_are_cut(plan_lengths):
    plans = [plan_lengths([3, 4, 5], epochs=epochs).plan for epochs in (1, 2)]

    assert plans[0].recipe_fingerprint == plans[1].recipe_fingerprint
    assert plans[0].manifest.fingerprint != plans[1].manifest.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"pack_tokens": 12},
        {"pad_multiple": 2},
        {"packs_per_step": 2},
        {"seed": 1},
        {"balance": "concat"},
        {"overflow": "drop"},
        {"window": 3},
        {"positions": "continue"},
        {"boundary_label": "ignore"},
    ],
    ids=str,
)
def test_every_option_that_shapes_a_plan_is_in_its_fingerprint(plan_lengths, change):
    no_change: dict[str, Any] = {}
    plans = [plan_lengths([3, 4, 5], **asked).plan for asked in (no_change, change)]

    assert plans[0].recipe_fingerprint != plans[1].recipe_fingerprint


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([3.5]), "float64"),
        (np.array([[3]]), r"\[1, 1\], needs integers in one dimension"),
        (np.array([3, -1]), "row 1 is -1"),
        (np.array([], dtype=int), "has no document"),
        (np.array([0, 0]), "no pack to plan"),
    ],
    ids=["floats", "2-d", "negative", "none", "all-empty"],
)
def test_lengths_that_are_none_are_refused(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=message):
        run_plan(PlanOptions(lengths=tmp_path / "x.npy", output=tmp_path / "plan", **SMALL))


def test_a_file_that_is_no_array_is_refused(tmp_path):
    (tmp_path / "x.npy").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"x.npy is no .npy file of integers"):
        run_plan(PlanOptions(lengths=tmp_path / "x.npy", output=tmp_path / "plan", **SMALL))


def test_a_missing_file_of_lengths_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no.npy: there is no such file"):
        run_plan(PlanOptions(lengths=Path("no.npy"), output=tmp_path / "plan", **SMALL))
