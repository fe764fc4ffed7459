"""Packs of their own lengths through the loader: T varies from batch to batch, alike on every rank."""

from itertools import islice

import numpy as np
import pytest
import torch

from ringfeed.pipeline.pack_lengths import PackShape
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.ranks import assign_packs

from .conftest import PACK_TOKENS, Run, make_shards

NAMES = ("input_ids", "labels", "position_ids", "padding_mask")


@pytest.fixture(scope="module", params=["none", "powers_of_two"])
def variable_run(request, run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("variable")
    options = PlanOptions(
        output=folder / "plan",
        corpora=Plan.open(run.plan).corpus_paths(),
        pack_tokens=PACK_TOKENS,
        packs_per_step=8,
        max_cp=4,
        # Packs end where the next document does not fit: footprints of all kinds.
        balance=Balance.IN_ORDER,
        pack_shape=PackShape.VARIABLE,
        length_buckets=request.param,
        slate_size=4,
        seed=3,
    )
    run_plan(options)
    return Run(plan=folder / "plan", documents=run.documents, num_prose=run.num_prose)


def pack_length(plan, row, *, slot, multiple):
    """T of one pack, by a loop."""
    footprint = sum(-(-length // slot) * slot for length in row["lengths"])
    buckets = [64, 96, PACK_TOKENS] if multiple % 3 == 0 else [2**power for power in range(8)]
    wanted = [t for t in range(multiple, PACK_TOKENS + 1, multiple) if t >= footprint]
    if plan.recipe.length_buckets == "powers_of_two":
        wanted = [t for t in wanted if t in buckets]
    return wanted[0]


def dealt(plan, step, dp_size, packs_per_chunk):
    rows = plan.step(step).to_pylist()
    return rows, assign_packs(
        np.array([row["cost"] for row in rows]),
        np.array([row["slate"] for row in rows], dtype=np.int32),
        packs_per_step=8,
        slate_size=4,
        dp_size=dp_size,
        packs_per_chunk=packs_per_chunk,
    )


@pytest.mark.parametrize(
    ("layout", "cp_size", "slot", "multiple", "changes"),
    [
        ("te", 2, 4, 4, {}),
        ("te", 4, 8, 8, {"packs_per_chunk": 2}),
        ("te", 2, 4, 32, {"tp_size": 2, "unit": 8}),
        ("head_tail", 4, 1, 8, {}),
        ("identity", 2, 1, 2, {"packs_per_chunk": 4}),
        ("contiguous", 2, 1, 2, {}),
    ],
)
def test_every_rank_has_the_length_of_its_own_packs(variable_run, layout, cp_size, slot, multiple, changes):
    plan = Plan.open(variable_run.plan)
    packs_per_chunk = changes.get("packs_per_chunk", 1)
    asked = {"dp_rank": 1, "dp_size": 2, "cp_size": cp_size, "layout": layout, **changes}
    ranks = [list(variable_run.load(cp_rank=rank, **asked)) for rank in range(cp_size)]
    smallest = pack_length(plan, {"lengths": []}, slot=slot, multiple=multiple)

    for batches in zip(*ranks, strict=True):
        info = batches[0].info
        rows, table = dealt(plan, info.step, 2, packs_per_chunk)
        packs = table[info.micro_batch, 1].tolist()
        expected = sum(
            smallest if pack < 0 else pack_length(plan, rows[pack], slot=slot, multiple=multiple)
            for pack in packs
        )
        assert {int(batch.tensors["cu_seqlens_padded"][-1]) for batch in batches} == {expected}
        local = expected if layout == "identity" else expected // cp_size
        assert {len(batch.tensors[name]) for batch in batches for name in NAMES} == {local}
    assert len({int(batch.tensors["cu_seqlens_padded"][-1]) for batch in ranks[0]}) > 1


def test_a_chunk_is_its_packs_end_to_end(variable_run):
    singles = list(variable_run.load(cp_rank=1, cp_size=2))
    for batch in variable_run.load(cp_rank=1, cp_size=2, packs_per_chunk=4):
        rows, table = dealt(Plan.open(variable_run.plan), batch.info.step, 1, 4)
        packs = table[batch.info.micro_batch, 0].tolist()
        order = dealt(Plan.open(variable_run.plan), batch.info.step, 1, 1)[1].reshape(-1).tolist()
        parts = [one for one in singles if one.info.step == batch.info.step]
        # Missing packs of a short step: any of its all-padding batches.
        chosen = [parts[order.index(pack)] for pack in packs]
        for name in NAMES:
            assert torch.equal(batch.tensors[name], torch.cat([one.tensors[name] for one in chosen]))
        assert len(rows) == sum(pack >= 0 for pack in order)


def test_packs_that_a_short_step_lacks_are_the_shortest(variable_run):
    plan = Plan.open(variable_run.plan)
    last = plan.num_steps - 1
    assert plan.step(last).num_rows < 8
    empty = [b for b in variable_run.load(cp_size=2) if b.info.step == last and not b.info.num_documents]

    assert len(empty) == 8 - plan.step(last).num_rows
    for batch in empty:
        assert batch.tensors["cu_seqlens_padded"].tolist() == [0, 4]
        assert batch.tensors["padding_mask"].tolist() == [True, True]


@pytest.mark.parametrize(("layout", "cp_size"), [("te", 2), ("whole_document", 4)])
@pytest.mark.parametrize("skipped", [(), (0, 3, 9)])
def test_shards_give_the_same_batches(variable_run, tmp_path, layout, cp_size, skipped):
    shards = make_shards(variable_run.plan, tmp_path / "s", layout=layout, cp_size=cp_size, skipped=skipped)
    skip = tmp_path / "skip.txt"
    skip.write_text("".join(f"{document}\n" for document in skipped))
    asked = {"cp_rank": 1, "cp_size": cp_size, "dp_size": 2, "layout": layout, "skip": skip}
    ours, theirs = variable_run.load(**asked), variable_run.load(source=shards, **asked)

    for batch, other in zip(ours, theirs, strict=True):
        assert batch.info == other.info
        for name, tensor in batch.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name


def test_a_run_goes_on_from_any_state_at_another_cp_size(variable_run):
    loader = variable_run.load(cp_size=2, dp_size=2)
    before = [batch.info.step for batch in islice(loader, 6)]
    state = loader.state_dict()
    after = [b.info.documents for b in loader]
    other = variable_run.load(cp_size=4, dp_size=2, layout="head_tail")
    other.load_state_dict(state)

    assert [b.info.documents for b in other] == after
    assert before == [0, 0, 0, 0, 1, 1]


def test_whole_steps_are_refused(variable_run):
    loader = variable_run.load()

    with pytest.raises(ValueError, match=r"pack_shape=variable.*iterate over the loader.*--pack-shape fixed"):
        loader.steps()
    assert next(iter(loader)).info.step == 0


def test_shards_cut_for_smaller_units_are_refused(variable_run, tmp_path):
    shards = make_shards(variable_run.plan, tmp_path / "shards", layout="te", cp_size=2)

    with pytest.raises(ValueError, match=r"multiples of 4; tp_size=2, unit=4 need multiples of 16.*--unit 4"):
        variable_run.load(source=shards, cp_size=2, tp_size=2, unit=4)
    assert variable_run.load(source=shards, cp_size=2, tp_size=2).num_steps


def test_what_is_built_ahead_counts_the_largest_batch(variable_run):
    per_token, offsets = 8 * 3 + 1, 2 * 4
    loader = variable_run.load(cp_size=2, prefetch_bytes=10 * PACK_TOKENS // 2 * per_token)
    largest = max(len(batch.tensors["input_ids"]) for batch in loader)

    assert largest <= PACK_TOKENS // 2
    slots = Plan.open(variable_run.plan).largest_num_pieces + 2
    expected = 10 * PACK_TOKENS // 2 * per_token // (PACK_TOKENS // 2 * per_token + slots * offsets)
    assert loader._prefetch == expected
