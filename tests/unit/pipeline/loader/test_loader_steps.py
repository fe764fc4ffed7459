"""``Loader.steps``: whole steps of one shape."""

import pytest
import torch

FIXED = (
    "step", "num_micro_batches", "step_digest", "global_supervised", "supervised_by_source",
    "cp_rank", "cp_size", "dp_rank", "dp_size", "layout",
)  # fmt: skip
VARYING = (
    "micro_batch", "num_documents", "documents", "digest", "local_supervised", "max_seqlen",
    "max_seqlen_padded",
)  # fmt: skip


def test_a_step_holds_its_micro_batches_in_order(run):
    single = list(run.load(dp_size=2, cp_size=2))
    steps = list(run.load(dp_size=2, cp_size=2).steps())

    assert len(steps) * 4 == len(single)
    for i, step in enumerate(steps):
        parts = single[4 * i : 4 * i + 4]
        for name in ("input_ids", "labels", "position_ids", "padding_mask"):
            assert torch.equal(step.tensors[name], torch.stack([part.tensors[name] for part in parts]))
            assert step.tensors[name].shape == (4, 64)
        for name in FIXED:
            assert getattr(step.info, name) == getattr(parts[0].info, name)
        for name in VARYING:
            assert getattr(step.info, name) == tuple(getattr(part.info, name) for part in parts)


def test_offsets_get_one_width_by_repeating_the_last(run):
    loaders = run.load(dp_size=2), run.load(dp_size=2)
    single = list(loaders[0])
    widest = max(len(batch.tensors["cu_seqlens"]) for batch in single)

    shapes = set()
    for i, step in enumerate(loaders[1].steps()):
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            shapes.add(tuple(step.tensors[name].shape))
            for m in range(4):
                own = single[4 * i + m].tensors[name].tolist()
                row = step.tensors[name][m].tolist()
                assert row == own + [own[-1]] * (len(row) - len(own))
                assert step.tensors[name].dtype == torch.int32
    assert len(shapes) == 1
    assert shapes.pop()[1] >= widest


def test_max_documents_sets_the_width(run):
    step = next(run.load(max_documents=40, packs_per_chunk=2).steps())

    assert step.tensors["cu_seqlens"].shape == (4, 41)


def test_refuses_more_slots_than_max_documents(run):
    with pytest.raises(ValueError, match=r"has \d+ slots, more than max_documents=1; pass max_documents of"):
        list(run.load(max_documents=1).steps())


def test_state_moves_by_whole_steps(run):
    loader = run.load(dp_size=2)
    steps = loader.steps()
    next(steps)
    next(steps)
    state = loader.state_dict()

    again = run.load(dp_size=4)
    again.load_state_dict(state)

    assert (state["step"], state["micro_batch"]) == (2, 0)
    assert next(again.steps()).info.step == 2


def test_refused_inside_a_step(run):
    loader = run.load(dp_size=2)
    batches = iter(loader)
    next(batches)

    with pytest.raises(ValueError, match=r"inside step 0 \(micro-batch 1\), whole steps begin at a border"):
        loader.steps()

    # The refusal left the iteration alone.
    assert next(batches).info.micro_batch == 1


def test_a_step_gives_its_micro_batches_back(run):
    step = next(run.load(dp_size=2, cp_size=2).steps())
    single = list(run.load(dp_size=2, cp_size=2))[:4]

    with pytest.raises(ValueError, match=r"no single sharder; go through batch.micro_batches\(\)"):
        _ = step.sharder
    with pytest.raises(ValueError, match=r"kwargs\('te'\) is for one micro-batch"):
        step.kwargs("te")
    for part, batch in zip(step.micro_batches(), single, strict=True):
        assert part.info == batch.info
        assert torch.equal(part.tensors["labels"], batch.tensors["labels"])
        assert part.sharder.index_map.runs.tolist() == batch.sharder.index_map.runs.tolist()
        assert part.kwargs("te")["max_seqlen_q"] == batch.info.max_seqlen_padded
    assert single[0].micro_batches() == (single[0],)
