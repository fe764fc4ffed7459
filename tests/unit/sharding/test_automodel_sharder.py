"""The sharder's verbs in every coordinate system a caller may have, and its two ways of construction."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ringfeed.sharding import automodel
from ringfeed.sharding.automodel import ContextParallelSharder, ShardLayout


def submesh(size, rank):
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)


class Mesh(dict):
    """A mapping with axis names, as a DeviceMesh is one."""

    mesh_dim_names = ("cp",)


def cp(size, rank=0):
    return Mesh(cp=submesh(size, rank))


def sharder_with(layout, *, size=2, rank=0, indices=automodel.round_robin_local_indices):
    return ContextParallelSharder(
        device_mesh=cp(size, rank),
        shard_batch=lambda *_, **__: (contextlib.nullcontext, {}, layout),
        local_token_global_indices=indices,
        shard_layout=layout,
    )


def thd_batch(rows=2, width=8, **extra):
    tokens = torch.arange(rows * width).reshape(rows, width)
    lengths = torch.full((rows, 1), width)
    return {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": tokens % width,
        "seq_lens": lengths,
        "seq_lens_padded": lengths,
        "qkv_format": "thd",
        **extra,
    }


def thd_sharder(batch, *, size=2, rank=0, **settings):
    return automodel._make_cp_batch_and_ctx(cp(size, rank), batch, use_te=True, **settings)


def test_rows_are_flattened_and_come_back_as_rows():
    batch = thd_batch()
    features = torch.rand(2, 8, 3)

    sharders = [thd_sharder(batch, rank=rank)[2] for rank in range(2)]
    parts = [sharder.shard_token_tensor(features) for sharder in sharders]

    indices = [sharder.shard_layout.local_token_global_indices for sharder in sharders]
    whole = automodel._reorder_gathered_token_tensor(parts, indices, seq_dim=0)
    assert torch.equal(whole.reshape(2, 8, 3), features)


def test_the_part_of_the_ids_is_what_the_batch_has():
    _, local, sharder = thd_sharder(thd_batch(), rank=1)

    part = sharder.shard_token_tensor(thd_batch()["input_ids"])

    assert torch.equal(part, local["input_ids"])
    assert torch.equal(local["_thd_local_indices"], sharder.shard_layout.local_token_global_indices)


def test_embeddings_without_context_parallelism_have_a_position_for_every_token():
    embeddings = torch.rand(2, 8, 3)
    _, _, sharder = thd_sharder(thd_batch(input_ids=embeddings), size=1)

    assert torch.equal(sharder.shard_token_tensor(embeddings), embeddings.reshape(16, 3))
    assert torch.equal(
        sharder.gather_token_tensor(embeddings.reshape(16, 3), seq_dim=0, trim=True), embeddings
    )


def test_chunks_have_no_common_positions():
    _, _, sharder = thd_sharder(thd_batch(), num_chunks=2)

    assert sharder.shard_layout is None
    with pytest.raises(NotImplementedError, match="THD chunks"):
        sharder.shard_token_tensor(torch.zeros(2, 8))


def test_nothing_is_known_before_the_first_batch():
    sharder = sharder_with(None, indices=None)
    with pytest.raises(NotImplementedError, match="shard a batch first"):
        sharder.gather_token_tensor(torch.zeros(2, 8))


def test_moved_rows_go_to_their_columns_and_back():
    # Two documents of two and one tokens a row, each in a slot of 2; the third place was padding.
    positions = torch.tensor([[0, 1, 2], [0, -1, 2]])
    layout = ShardLayout(padded_seq_len=4, input_token_stream_positions=positions)
    sharders = [
        sharder_with(layout, rank=rank, indices=automodel.contiguous_local_indices) for rank in range(2)
    ]
    tensor = torch.arange(1.0, 7.0).reshape(2, 3)

    parts = [sharder.shard_token_tensor(tensor, fill=-1) for sharder in sharders]
    features = [sharder.shard_token_tensor(tensor.unsqueeze(-1), fill=-1) for sharder in sharders]

    assert torch.cat(parts, dim=1).tolist() == [[1, 2, 3, -1], [4, -1, 6, -1]]
    assert torch.equal(torch.cat(features, dim=1).squeeze(-1), torch.cat(parts, dim=1))
    with pytest.raises(ValueError, match="pass fill"):
        sharders[0].shard_token_tensor(tensor)


def test_moved_rows_are_read_back_with_fill_for_what_was_dropped():
    layout = ShardLayout(padded_seq_len=4, input_token_stream_positions=torch.tensor([[0, 1, 2], [0, -1, 2]]))
    sharder = sharder_with(layout, size=1, indices=automodel.identity_local_indices)
    whole = torch.tensor([[1, 2, 3, -1], [4, -1, 6, -1]])

    assert sharder.gather_token_tensor(whole, trim=True, fill=9).tolist() == [[1, 2, 3], [4, 9, 6]]
    deep = sharder.gather_token_tensor(whole.unsqueeze(-1), trim=True, fill=9)
    assert deep.squeeze(-1).tolist() == [[1, 2, 3], [4, 9, 6]]
    with pytest.raises(ValueError, match="pass fill"):
        sharder.gather_token_tensor(whole, trim=True)


@pytest.mark.parametrize("fill", [None, 0])
def test_another_length_is_refused_with_all_three(fill):
    sharder = sharder_with(ShardLayout(original_seq_len=6, padded_seq_len=8))
    with pytest.raises(ValueError, match=r"7 entries .*original_seq_len=6, padded_seq_len=8"):
        sharder.shard_token_tensor(torch.zeros(1, 7), fill=fill)


def test_a_padded_tensor_needs_no_fill_and_any_dimension_will_do():
    sharder = sharder_with(ShardLayout(original_seq_len=6, padded_seq_len=8))

    assert sharder.shard_token_tensor(torch.arange(8).unsqueeze(0)).tolist() == [[0, 1, 6, 7]]
    assert sharder.shard_token_tensor(torch.arange(6), seq_dim=0, fill=9).tolist() == [0, 1, 9, 9]
    assert sharder.shard_token_tensor(torch.zeros(2, 3, 6), seq_dim=-1, fill=1)[0, 0].tolist() == [0, 0, 1, 1]


def test_parts_of_another_batch_are_refused():
    _, _, sharder = thd_sharder(thd_batch(), size=1)
    with pytest.raises(ValueError, match="has 16 tokens"):
        sharder.gather_token_tensor(torch.zeros(8), seq_dim=0)


def test_what_is_not_as_long_as_the_batch_cannot_be_trimmed():
    layout = ShardLayout(original_seq_len=6, padded_seq_len=8)
    sharder = sharder_with(layout, size=1, indices=automodel.identity_local_indices)
    with pytest.raises(ValueError, match=r"4 entries in dim 1, the batch .* padded_seq_len=8"):
        sharder.gather_token_tensor(torch.zeros(1, 4), trim=True)


def test_gathering_without_a_process_group_is_refused():
    sharder = sharder_with(ShardLayout(original_seq_len=8, padded_seq_len=8))
    with pytest.raises(ValueError, match="2 ranks, but no process group"):
        sharder.gather_token_tensor(torch.zeros(1, 4))


def test_there_is_nothing_to_trim_to_without_a_layout():
    sharder = sharder_with(None, size=1, indices=automodel.identity_local_indices)
    assert sharder.gather_token_tensor(torch.zeros(1, 4)).shape == (1, 4)
    with pytest.raises(NotImplementedError, match="no shard layout to trim to"):
        sharder.gather_token_tensor(torch.zeros(1, 4), trim=True)


@pytest.mark.parametrize("indices", [[[0, 1], [1, 2]], [[0, 1], [2, 4]]])
def test_positions_that_do_not_tile_are_refused(indices):
    parts = [torch.zeros(1, 2), torch.zeros(1, 2)]
    with pytest.raises(ValueError, match="do not tile 4 tokens"):
        automodel._reorder_gathered_token_tensor(parts, [torch.tensor(i) for i in indices])


@pytest.mark.parametrize(
    "arguments",
    [
        {"shard_batch": automodel.shard_batch_identity, "model": object()},
        {"shard_batch": automodel.shard_batch_identity, "batch": {}},
        {"shard_batch": automodel.shard_batch_identity, "num_chunks": 2},
        {"shard_batch": automodel.shard_batch_identity, "invoke_pre_embed": False},
        {"shard_batch": automodel.shard_batch_identity, "extra_seq_buffers": {}},
        {"local_token_global_indices": automodel.identity_local_indices},
        {"shard_layout": ShardLayout()},
        {},
    ],
)
def test_the_two_ways_of_construction_do_not_mix(arguments):
    with pytest.raises(TypeError):
        ContextParallelSharder(**arguments)


@pytest.mark.parametrize("device_mesh", [None, SimpleNamespace(), SimpleNamespace(mesh_dim_names=None)])
def test_a_mesh_without_a_cp_axis_is_no_context_parallelism(device_mesh):
    batch = {"input_ids": torch.zeros(1, 6), "labels": torch.zeros(1, 6)}
    sharder = ContextParallelSharder(None, device_mesh, batch)

    context, local = sharder.shard(batch)

    assert context is contextlib.nullcontext
    assert local is batch
    assert sharder.shard_layout == ShardLayout(original_seq_len=6, padded_seq_len=6)
