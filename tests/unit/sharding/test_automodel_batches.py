"""Batches cut by position: contiguous runs, torch's ring, and sequences a model cuts itself."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.tensor.experimental._attention as torch_attention

from ringfeed.sharding import automodel

RING = [automodel.shard_batch_load_balanced, automodel.shard_batch_aux_only]


def mesh(size, rank=0):
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)


def batch(rows=1, width=6, **changes):
    tokens = torch.arange(1, 1 + rows * width).reshape(rows, width)
    made = {"input_ids": tokens, "labels": tokens + 1, **changes}
    return {name: value for name, value in made.items() if value is not None}


def copies(given):
    return {name: value.clone() for name, value in given.items()}


def assert_untouched(given, before):
    assert set(given) == set(before)
    assert all(torch.equal(given[name], before[name]) for name in before)


@pytest.fixture
def ring(monkeypatch):
    """Torch's context, recorded instead of entered."""
    seen = SimpleNamespace(buffers=None, kept=None)

    @contextlib.contextmanager
    def enter(_mesh, *, buffers, buffer_seq_dims, no_restore_buffers):
        seen.buffers, seen.kept = buffers, no_restore_buffers
        seen.rotate_method = torch_attention._cp_options.rotate_method
        yield

    monkeypatch.setattr(torch.distributed.tensor.experimental, "context_parallel", enter)
    return seen


@pytest.mark.parametrize("rank", [0, 1])
def test_contiguous_cuts_extras_along_their_dimension_with_their_fill(rank):
    groups = torch.arange(12).reshape(2, 1, 6)
    _, made, layout = automodel.shard_batch_contiguous(
        mesh(2, rank),
        None,
        batch(groups=groups),
        extra_seq_keys={"groups": 2, "absent": 1, "labels": 0},
        extra_pad_values={"groups": -1},
    )

    assert made["groups"][1, 0].tolist() == [[6, 7, 8, 9], [10, 11, -1, -1]][rank]
    assert made["labels"].tolist() == [[[2, 3, 4, 5], [6, 7, -100, -100]][rank]]
    assert (layout.original_seq_len, layout.padded_seq_len) == (6, 8)


def test_contiguous_makes_positions_and_counts_them_on():
    cut = [
        automodel.shard_batch_contiguous(mesh(2, rank), None, batch(rows=2))[1]["position_ids"]
        for rank in (0, 1)
    ]

    assert torch.cat(cut, dim=1).tolist() == [[*range(8)]] * 2


def test_contiguous_counts_rope_positions_on_along_the_tokens():
    positions = torch.tensor([[[0, 1, 2]], [[0, 2, 4]], [[7, 7, 7]]])
    _, made, _ = automodel.shard_batch_contiguous(mesh(1), None, batch(width=3, position_ids=positions))

    assert made["position_ids"][:, 0].tolist() == [[0, 1, 2, 3], [0, 2, 4, 5], [7, 7, 7, 8]]


def test_contiguous_leaves_a_primary_whole_that_the_model_cuts():
    given = batch()
    _, made, layout = automodel.shard_batch_contiguous(
        mesh(2, 1), None, given, shard_primary=False, pad_multiple=8
    )
    local, indices, padded_len = automodel.shard_sequence_for_cp_contiguous(
        mesh(2, 1), given["input_ids"], pad_multiple=8
    )

    assert made["input_ids"] is given["input_ids"]
    assert padded_len == layout.padded_seq_len == 16
    assert indices.tolist() == list(range(8, 16))
    assert local.shape == made["labels"].shape == (1, 8)


def test_a_loss_mask_stands_in_for_labels():
    given = batch(labels=None)
    _, made, _ = automodel.shard_batch_contiguous(mesh(2), None, given, loss_mask=torch.ones(1, 6))

    assert made["labels"].tolist() == [[1, 1, 1, 1]]
    assert "loss_mask" not in made


def test_contiguous_changes_nothing_it_is_given():
    given = batch(attention_mask=torch.ones(1, 6), padding_mask=torch.zeros(1, 6, dtype=torch.bool))
    before = copies(given)

    automodel.shard_batch_contiguous(mesh(2), None, given, loss_mask=torch.ones(1, 6))

    assert_untouched(given, before)


@pytest.mark.parametrize(
    "shard", [automodel.shard_batch_contiguous, automodel.shard_batch_load_balanced], ids=lambda f: f.__name__
)
def test_a_tensor_of_another_length_is_refused(shard):
    with pytest.raises(ValueError, match="labels has 5 entries in dim 1, but the sequence has 6"):
        shard(mesh(2), None, batch(labels=torch.zeros(1, 5)))


@pytest.mark.parametrize(
    ("mask", "padding"),
    [
        (torch.tensor([[1, 1, 0]]), [[False, False, True]]),
        (torch.tensor([[[[True, False], [True, False]]]]), [[False, True]]),
        (torch.tensor([[[[0.0, -9.0], [0.0, -9.0]]]]), [[False, True]]),
    ],
    ids=["2-D", "4-D-bool", "4-D-added"],
)
def test_attention_masks_become_padding_masks(mask, padding):
    given = {"attention_mask": mask}

    automodel.convert_attention_mask_to_padding_mask(given)

    assert set(given) == {"padding_mask"}
    assert given["padding_mask"].tolist() == padding


def test_a_padding_mask_that_is_there_stays():
    given = {"attention_mask": torch.zeros(1, 2), "padding_mask": torch.ones(1, 2)}

    automodel.convert_attention_mask_to_padding_mask(given)

    assert given["padding_mask"].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    "shard",
    [automodel.shard_sequence_for_cp_round_robin, automodel.shard_sequence_for_cp_contiguous],
    ids=lambda function: function.__name__,
)
def test_sequences_are_cut_differentiably_and_whole_ones_left_alone(shard):
    whole = torch.rand(1, 2, 6, requires_grad=True)

    parts = [shard(mesh(2, rank), whole, seq_dim=-1, pad_value=7) for rank in (0, 1)]
    (grad,) = torch.autograd.grad([part.sum() for part, _, _ in parts], whole)

    assert torch.equal(grad, torch.ones_like(whole))
    indices = torch.cat([index for _, index, _ in parts])
    merged = torch.cat([part for part, _, _ in parts], dim=2).index_select(2, indices.argsort())
    assert torch.equal(merged[..., :6], whole)
    assert merged[0, 0, 6:].tolist() == [7, 7]
    assert shard(None, whole)[0] is whole
    assert shard(mesh(1), whole, seq_dim=2)[1].tolist() == list(range(6))


@pytest.mark.parametrize("shard", RING, ids=lambda function: function.__name__)
def test_the_ring_gets_tensors_of_its_own(shard, ring):
    # Eight tokens need no padding: the original hands the caller's own tensors to be resized.
    given = batch(width=8, attention_mask=torch.ones(1, 8), position_ids=torch.arange(8).unsqueeze(0))
    before, loss_mask = copies(given), torch.ones(1, 8)

    context, made, _ = shard(mesh(2), None, given, loss_mask=loss_mask)
    with context():
        owned = [*given.values(), loss_mask]
        assert not any(buffer is tensor for buffer in ring.buffers for tensor in owned)
        assert any(made["labels"] is buffer for buffer in ring.buffers)
        for buffer in ring.buffers:
            buffer.zero_()

    assert_untouched(given, before)
    assert loss_mask.all()
    assert "attention_mask" not in made


def test_aux_only_leaves_the_primary_out(ring):
    given = batch()
    context, made, layout = automodel.shard_batch_aux_only(mesh(2), None, given)
    with context():
        assert len(ring.buffers) == 2

    assert made["input_ids"] is given["input_ids"]
    assert made["labels"].shape == (1, 8)
    assert layout.padded_seq_len == 8


def test_the_rotate_method_is_set_inside_only(ring, monkeypatch):
    alltoall = torch_attention._RotateMethod.ALL_TO_ALL
    monkeypatch.setattr(torch_attention._cp_options, "rotate_method", alltoall)

    context, _, _ = automodel.shard_batch_load_balanced(mesh(2), None, batch())
    assert torch_attention._cp_options.rotate_method is alltoall
    with context():
        assert ring.rotate_method is torch_attention._RotateMethod.ALL_GATHER

    assert torch_attention._cp_options.rotate_method is alltoall


def test_what_needs_a_gradient_is_cut_out_of_place(ring):
    embeddings = torch.rand(1, 6, 3, requires_grad=True)
    logits = torch.rand(1, 6, 5, requires_grad=True)
    given = {**batch(input_ids=None), "inputs_embeds": embeddings, "teacher": logits}

    context, made, _ = automodel.shard_batch_load_balanced(
        mesh(2, 1), None, given, extra_seq_buffers={"teacher": 1}
    )
    with context():
        assert len(ring.buffers) == 2
    for part, whole in ((made["inputs_embeds"], embeddings), (made["teacher"], logits)):
        (grad,) = torch.autograd.grad(part.sum(), whole)
        assert grad[0, :, 0].tolist() == [0, 0, 1, 1, 1, 1]


def test_every_field_is_padded_with_what_it_ignores(ring):
    mask = torch.zeros(1, 6)
    _, made, _ = automodel.shard_batch_load_balanced(
        mesh(2),
        None,
        batch(padding_mask=mask, labels=torch.ones(1, 6), teacher=torch.ones(1, 6)),
        extra_seq_buffers={"teacher": 1},
    )

    assert made["padding_mask"][0, 6:].tolist() == [1, 1]
    assert made["labels"][0, 6:].tolist() == [-100, -100]
    assert made["teacher"][0, 6:].tolist() == made["input_ids"][0, 6:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "extra", "error", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 6, 2)}, None, AssertionError, "exactly one"),
        ({"input_ids": None}, None, AssertionError, "exactly one"),
        ({"labels": None}, None, KeyError, "labels"),
        ({}, {"teacher": 1}, KeyError, "extra_seq_buffers names 'teacher'"),
    ],
)
@pytest.mark.parametrize("shard", RING, ids=lambda function: function.__name__)
def test_the_ring_needs_one_primary_labels_and_every_buffer(shard, changes, extra, error, message):
    with pytest.raises(error, match=message):
        shard(mesh(2), None, batch(**changes), extra_seq_buffers=extra)
