"""Plans on disk: what a reader gets, and what it refuses."""

from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.chain import next_link
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_blocks import FOOTPRINT_MULTIPLES
from ringfeed.pipeline.planner.options import BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan

API_COLUMNS = ("pack", "slate", "cost", "supervised", "documents", "starts", "lengths", "epochs")
OPTIONS: dict[str, Any] = {
    "pack_tokens": 240,
    "packs_per_step": 4,
    "max_cp": 3,
    "balance": "best_fit",
    "slate_size": 2,
    "window": 2,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lengths = np.random.default_rng(3).integers(1, 300, size=300)
    write_corpus(folder / "c", [np.arange(n, dtype=np.int32) for n in lengths], name="c", pad_id=0)
    return folder / "c"


@pytest.fixture(scope="module")
def plan_path(corpus):
    output = corpus.parent / "plan"
    limits = BlockLimits(steps=5, pieces=10_000)
    run_plan(PlanOptions(corpora=[corpus], output=output, block_limits=limits, seed=1, **OPTIONS))
    return output


@pytest.fixture
def plan(plan_path):
    return Plan.open(plan_path)


@pytest.fixture
def damaged(plan_path, tmp_path):
    """A copy of the plan with one byte of its second block flipped."""
    copy = tmp_path / "plan"
    copy.mkdir()
    for file in plan_path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    content = bytearray((copy / "block-00001.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "block-00001.arrow").write_bytes(content)
    return Plan.open(copy)


def test_a_step_has_a_row_per_pack_with_the_fixed_columns(plan):
    table = plan.step(0)

    assert set(API_COLUMNS) <= set(table.column_names)
    assert table.column("pack").to_pylist() == [0, 1, 2, 3]
    assert set(table.column("step").to_pylist()) == {0}


def test_sizes_are_those_of_the_recipe(plan):
    assert (plan.packs_per_step, plan.pack_tokens, plan.pad_multiple, plan.slate_size) == (4, 240, 6, 2)
    assert plan.num_blocks > 2


def test_step_packs_are_the_rows_of_the_table(plan):
    for i in range(plan.num_steps):
        packs, rows = plan.step_packs(i), plan.step(i).to_pylist()
        for k, row in enumerate(rows):
            pieces = packs.pack(k)
            assert [
                getattr(pieces, name).tolist() for name in ("documents", "starts", "lengths", "epochs")
            ] == [row[name] for name in ("documents", "starts", "lengths", "epochs")]
        assert packs.costs.tolist() == [row["cost"] for row in rows]
        assert packs.slates.tolist() == [row["slate"] for row in rows]
        assert packs.supervised.sum(axis=1).tolist() == [row["supervised"] for row in rows]


def test_a_step_goes_through_a_table_and_back(plan):
    packs = plan.step_packs(7)
    back = type(packs).from_table(packs.to_table(), chain=packs.chain)

    assert packs.to_table().equals(plan.step(7))
    assert back.to_table().equals(packs.to_table())


def test_a_table_of_two_steps_is_no_step(plan):
    import pyarrow as pa

    with pytest.raises(ValueError, match=r"rows of steps \[0, 1\]"):
        type(plan.step_packs(0)).from_table(pa.concat_tables([plan.step(0), plan.step(1)]), chain="")


def test_the_chain_starts_with_the_recipe_and_covers_every_row(plan):
    chain = plan.chain(-1)
    assert chain == plan.recipe_fingerprint == plan.recipe.fingerprint
    for i in range(plan.num_steps):
        chain = next_link(chain, plan.step_packs(i))
        assert chain == plan.chain(i) == plan.step_packs(i).chain


@pytest.mark.parametrize("column", ["documents", "starts", "lengths", "epochs"])
def test_any_other_row_gives_another_chain(plan, column):
    packs = plan.step_packs(3)
    changed = np.array(getattr(packs.pieces, column))
    changed[-1] += 1
    pieces = type(packs.pieces)(
        **{name: getattr(packs.pieces, name) for name in ("documents", "starts", "lengths", "epochs")}
        | {column: changed}
    )
    other = type(packs)(
        packs.step, packs.slates, packs.costs, packs.supervised, packs.offsets, pieces, packs.chain
    )

    assert next_link(plan.chain(2), other) != next_link(plan.chain(2), packs)


def test_a_segment_that_starts_at_a_step_changes_its_chain(plan):
    packs = plan.step_packs(3)

    assert next_link(plan.chain(2), packs, segment="ab" * 16) != next_link(plan.chain(2), packs)


@pytest.mark.parametrize("step", [-1, 10_000])
def test_a_step_that_is_not_there_is_refused(plan, step):
    with pytest.raises(ValueError, match=rf"step {step} is not in .*steps 0 to {plan.num_steps - 1}"):
        plan.step(step)
    with pytest.raises(ValueError, match="is not in"):
        plan.chain(10_000)


def test_opening_reads_the_manifest_alone(damaged):
    assert damaged.num_steps > 10
    assert damaged.step(0).num_rows == 4


def test_a_flipped_byte_is_found_where_it_is_read(damaged):
    with pytest.raises(CorruptDataError, match=r"block-00001.arrow"):
        damaged.step(6)


def test_a_truncated_block_is_found(damaged):
    path = damaged.path / "block-00001.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match=r"block-00001.arrow has \d+ bytes"):
        damaged.step_packs(6)


def test_two_blocks_stay_in_memory(plan):
    for block in range(plan.num_blocks):
        plan.block(block)

    assert plan.block(plan.num_blocks - 1) is plan.block(plan.num_blocks - 1)
    assert len(plan._blocks) == 2


@pytest.mark.parametrize("multiple", FOOTPRINT_MULTIPLES)
def test_the_largest_footprint_is_stored_for_powers_of_two(plan, multiple):
    assert plan.largest_footprint(multiple) == max(footprints(plan, multiple))


@pytest.mark.parametrize("multiple", [6, 12, 2048])
def test_other_footprints_are_scanned(plan, multiple):
    sizes = footprints(plan, multiple)
    scan = plan.scan_footprints(multiple=multiple, budget=240)

    assert plan.largest_footprint(multiple) is None
    assert (scan.largest, scan.num_packs) == (max(sizes), len(sizes))
    assert scan.num_over == sum(size > 240 for size in sizes)


def footprints(plan, multiple):
    rows = [row for i in range(plan.num_steps) for row in plan.step(i).to_pylist()]
    return [sum(-(-n // multiple) * multiple for n in row["lengths"]) for row in rows]


def test_the_largest_pack_by_pieces_is_known(plan):
    rows = [row for i in range(plan.num_steps) for row in plan.step(i).to_pylist()]

    assert plan.largest_num_pieces == max(len(row["documents"]) for row in rows)


def test_corpora_are_found_again_when_both_folders_move(corpus, plan_path, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for folder in (corpus, plan_path):
        (moved / folder.name).mkdir()
        for file in folder.iterdir():
            (moved / folder.name / file.name).write_bytes(file.read_bytes())
    plan = Plan.open(moved / "plan")

    assert plan.corpus_paths() == [moved / "c"]
    assert plan.open_corpora().fingerprints == tuple(plan.corpus_fingerprints())


def test_other_corpora_are_refused_with_the_difference(plan, tmp_path):
    write_corpus(tmp_path / "c", [np.arange(7, dtype=np.int32)], name="c", pad_id=0)
    with pytest.raises(ValueError, match=r"was not planned from .*fingerprint.*pass the corpora"):
        plan.open_corpora(tmp_path / "c")


def test_a_plan_of_lengths_has_no_corpora(tmp_path):
    np.save(tmp_path / "x.npy", np.array([3, 4]))
    run_plan(PlanOptions(lengths=tmp_path / "x.npy", output=tmp_path / "plan", **OPTIONS))
    with pytest.raises(ValueError, match=r"planned from lengths alone .*plan a corpus instead"):
        Plan.open(tmp_path / "plan").open_corpora()


def test_a_half_written_plan_is_not_opened(tmp_path):
    (tmp_path / "plan.partial").mkdir()
    with pytest.raises(ValueError, match="half-written"):
        Plan.open(tmp_path / "plan")
