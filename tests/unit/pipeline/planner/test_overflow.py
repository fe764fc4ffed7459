"""Documents longer than a pack, and documents without a token."""

import numpy as np
import pyarrow as pa
import pytest

from ringfeed.pipeline.plan import Plan


def losses_of(plan: Plan):
    names = [entry.path for entry in plan.manifest.files if entry.path.startswith("losses-")]
    tables = [pa.ipc.open_file(pa.OSFile(str(plan.path / name))).read_all() for name in names]
    return [row for table in tables for row in table.to_pylist()]


def test_split_cuts_a_long_document_into_packs_and_loses_nothing(plan_lengths):
    planned = plan_lengths([25, 3], overflow="split", packs_per_step=3)

    assert sorted(planned.packs) == [[(0, 0, 10, 0)], [(0, 10, 10, 0)], [(0, 20, 5, 0), (1, 0, 3, 0)]]
    assert planned.report.split == 1
    assert planned.report.tokens == 28


def test_truncate_keeps_the_first_pack_and_names_what_it_lost(plan_lengths):
    planned = plan_lengths([3, 25, 10], overflow="truncate")

    assert sorted(planned.packs) == [[(0, 0, 3, 0)], [(1, 0, 10, 0)], [(2, 0, 10, 0)]]
    assert (planned.report.truncated, planned.report.truncated_tokens, planned.report.split) == (1, 15, 0)
    assert losses_of(planned.plan) == [{"document": 1, "epoch": 0, "tokens": 15}]


def test_drop_leaves_out_and_names_long_documents_each_epoch(plan_lengths):
    planned = plan_lengths([3, 25, 10], overflow="drop", epochs=2)

    assert planned.report.tokens == 26
    assert (planned.report.dropped, planned.report.dropped_tokens, planned.report.truncated) == (2, 50, 0)
    assert losses_of(planned.plan) == [{"document": 1, "epoch": epoch, "tokens": 25} for epoch in (0, 1)]


def test_error_names_the_document_and_the_way_out(plan_lengths, tmp_path):
    with pytest.raises(ValueError, match=r"document 1 has 11 tokens, more than pack_tokens=10.*split"):
        plan_lengths([3, 11], overflow="error", output=tmp_path / "plan")

    assert not list(tmp_path.glob("plan*"))


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop", "error"])
def test_a_document_of_exactly_a_pack_is_no_long_one(plan_lengths, overflow):
    planned = plan_lengths([10, 9], overflow=overflow)

    assert sorted(planned.documents) == [[0], [1]]
    assert planned.report.split == planned.report.dropped == planned.report.truncated == 0


def test_a_plan_whose_documents_are_all_dropped_is_refused(plan_lengths):
    with pytest.raises(ValueError, match=r"no pack to plan.*overflow=drop"):
        plan_lengths([25, 0], overflow="drop")


@pytest.mark.parametrize("balance", ["work", "best_fit", "in_order", "concat"])
def test_empty_documents_are_counted_and_keep_their_ids(plan_lengths, balance):
    planned = plan_lengths([0, 4, 0, 5, 0], balance=balance)

    assert planned.documents == [[1, 3]]
    assert planned.report.empty == 3


def test_documents_that_were_lost_after_the_last_pack_are_counted(plan_lengths):
    lengths = np.full(100, 10)
    planned = plan_lengths([*lengths, 99, 0, 98], overflow="drop", window=2)

    assert (planned.report.packs, planned.report.dropped, planned.report.empty) == (100, 2, 1)


def test_concat_counts_each_cut_document_once(plan_lengths):
    # Packs end at 10, 20, 30: inside the first document, at its end, nowhere else.
    planned = plan_lengths([25, 5, 10, 6, 6], balance="concat")

    assert planned.report.split == 2
