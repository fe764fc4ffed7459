"""``Loader`` over pre-sharded files: the same batches, and what it refuses to mix."""

import pytest
import torch


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert batch.info == other.info
        assert list(batch.tensors) == list(other.tensors)
        for name, tensor in batch.tensors.items():
            assert tensor.dtype == other.tensors[name].dtype
            assert torch.equal(tensor, other.tensors[name]), name
        assert batch.sharder.index_map.runs.tolist() == other.sharder.index_map.runs.tolist()


@pytest.mark.parametrize("layout", ["te", "head_tail", "contiguous", "whole_document", "identity"])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_same_batches_as_from_the_plan(run, shards, layout, cp_rank):
    place = {"dp_rank": 1, "dp_size": 2, "cp_rank": cp_rank, "cp_size": 2}

    files = run.load(source=shards(layout), **{**place, "layout": None})

    assert_same(files, run.load(**place, layout=layout))


def test_same_chunks_of_several_packs(run, shards):
    asked = {"cp_rank": 1, "cp_size": 2, "packs_per_chunk": 4}

    assert_same(run.load(source=shards(), **asked), run.load(**asked))


def test_same_whole_steps(run, shards):
    ours = run.load(source=shards(), dp_size=2, cp_size=2).steps()
    theirs = run.load(dp_size=2, cp_size=2).steps()

    for step, other in zip(ours, theirs, strict=True):
        assert step.info == other.info
        assert all(torch.equal(step.tensors[name], other.tensors[name]) for name in other.tensors)


def test_same_batches_with_a_skip_list(run, shards, tmp_path):
    skipped = [0, 7, run.num_prose + 1]
    path = tmp_path / "skip.txt"
    path.write_text("".join(f"{document}\n" for document in skipped))
    source = shards(skipped=skipped)

    for skip in (None, path):
        assert_same(run.load(source=source, cp_size=2, skip=skip), run.load(cp_size=2, skip=path))


def test_another_skip_list_is_refused(run, shards, tmp_path):
    path = tmp_path / "skip.txt"
    path.write_text("3\n")

    with pytest.raises(ValueError, match=r"was cut with skip list none, .*skip\.txt has \w{16}; leave skip"):
        run.load(source=shards(), cp_size=2, skip=path)
    path.write_text("# none\n")
    with pytest.raises(ValueError, match=r"was cut with skip list \w{16}, .*skip\.txt has none"):
        run.load(source=shards(skipped=[0, 7, run.num_prose + 1]), cp_size=2, skip=path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_size": 4}, r"was cut for cp_size=2, this loader has cp_size=4; .* again with --cp 4, or load"),
        (
            {"layout": "contiguous"},
            r"another layout \(layout: expected 'te', found 'contiguous'\); leave layout",
        ),
        ({"slot_budget": 256}, r"slot_budget=256, but .* holds packs of 128 slots; leave it out"),
        ({"dp_size": 3}, r"dp_size=3 .* does not divide packs_per_step=8"),
        ({"tp_size": 3}, r"tp_size=3.* multiple of"),
    ],
)
def test_refuses_what_it_was_not_cut_for(run, shards, changes, message):
    with pytest.raises(ValueError, match=message):
        run.load(source=shards(), **{"cp_size": 2, **changes})


def test_more_packs_per_chunk_are_refused_where_the_layout_takes_one(run, shards):
    with pytest.raises(ValueError, match=r"layout 'contiguous' takes one pack per chunk"):
        run.load(source=shards("contiguous"), cp_size=2, layout=None, packs_per_chunk=2)


def test_a_state_moves_between_plan_and_shards(run, shards):
    first = run.load(dp_size=2, cp_size=2)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    second = run.load(source=shards(), dp_size=2, cp_size=2)

    second.load_state_dict(first.state_dict())

    assert second.state_dict() == first.state_dict()
    assert_same(second, batches)


def test_a_state_made_without_the_burned_in_skip_list_is_refused_inside_a_step(run, shards):
    first = run.load(dp_size=2, cp_size=2)
    batches = iter(first)
    next(batches)
    second = run.load(source=shards(skipped=[0, 7, run.num_prose + 1]), dp_size=2, cp_size=2)

    with pytest.raises(ValueError, match=r"inside step 0 .* with skip list none, this loader has \w{16}"):
        second.load_state_dict(first.state_dict())
