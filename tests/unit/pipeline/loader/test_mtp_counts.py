"""Counts of a step at each depth, from a real loader, against the pieces of its plan."""

import pytest

from ringfeed.pipeline.mtp_counts import global_supervised_by_depth


def by_pieces(run, step, num_depths):
    """Labels at each depth, from the lengths of the plan's pieces alone."""
    counts = [0] * num_depths
    for row in run.step_rows(step):
        for document, start, length in zip(row["documents"], row["starts"], row["lengths"], strict=True):
            goes_on = start + length < len(run.documents[document])
            for depth in range(num_depths):
                counts[depth] += max(0, length - 1 + goes_on - depth)
    return tuple(counts)


@pytest.mark.parametrize("layout", ["te", "identity"])
def test_the_micro_batches_of_a_step_count_what_its_pieces_have(run, layout):
    loader = run.load(layout=layout)
    batches = [next(iter(loader))]
    num_batches = batches[0].info.num_micro_batches
    batches = [batch for batch, _ in zip(run.load(layout=layout), range(num_batches), strict=False)]

    counts = global_supervised_by_depth(batches, num_depths=5)

    assert counts == by_pieces(run, 0, 5)
    assert counts[0] == batches[0].info.global_supervised


def test_a_whole_step_counts_as_its_micro_batches(run):
    loader = run.load()
    for step, batch in zip(range(2), loader.steps(), strict=False):
        assert global_supervised_by_depth(batch, num_depths=4) == by_pieces(run, step, 4)


def test_part_of_a_step_is_refused(run):
    batch = next(iter(run.load()))
    with pytest.raises(ValueError, match=r"\(step, micro-batch\) \[\(0, 0\)\]; pass all \d+ micro-batches"):
        global_supervised_by_depth([batch], num_depths=2)
    with pytest.raises(ValueError, match="batches is empty"):
        global_supervised_by_depth([], num_depths=2)


def test_ranks_without_a_group_are_refused(run):
    with pytest.raises(ValueError, match=r"over 2 ranks: pass group=, all dp \* cp"):
        global_supervised_by_depth(next(iter(run.load(cp_size=2).steps())), num_depths=2)


def test_a_step_without_labels_is_refused(run):
    step = next(iter(run.load(columns=["input_ids"]).steps()))
    with pytest.raises(ValueError, match="needs the tensor 'labels'"):
        global_supervised_by_depth(step, num_depths=2)
