from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringfeed.sharding import automodel


def mesh(size, rank):
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("cu_seqlens", "total", "world", "rank", "message"),
    [
        (torch.tensor([[0, 8]]), 7, 0, 3, "int32"),
        (torch.zeros(1, 2, dtype=torch.int32), 7, 0, 3, "1-D"),
        (int32(0), 7, 0, 3, "at least 2"),
        (int32(0, 8), 7, 2, 2, "rank=2"),
        (int32(0, 8), 7, 2, -1, "rank=-1"),
        (int32(0, 8), 7, 0, 0, "rank=0 must be .* below world_size=0"),
        (int32(0, 8), 0, 2, 0, "total_tokens=0"),
        (int32(0, 8), -4, 2, 0, "total_tokens=-4"),
        (int32(0, 8), 6, 2, 0, "total_tokens=6 must be positive and a multiple of 4"),
    ],
)
def test_partition_makes_the_extensions_host_checks_in_its_order(cu_seqlens, total, world, rank, message):
    # Each case breaks a later check as well, so the message tells which one came first.
    with pytest.raises(RuntimeError, match=message):
        automodel.thd_get_partitioned_indices(cu_seqlens, total, world, rank)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("cu_seqlens", "total", "message"),
    [
        (int32(0, 6, 12), 12, "slot 0 has 6 tokens, not a multiple of 4"),
        (int32(0, 8), 16, r"total_tokens=16, but the last slot \(0\) ends at 8"),
        (int32(8, 16), 16, "must begin at 0, but slot 0 begins at 8"),
        (int32(0, 12, 8), 8, "slot 1 begins at 12 and ends at 8"),
    ],
)
def test_partition_refuses_what_the_extension_gets_wrong(cu_seqlens, total, message, rank):
    with pytest.raises(ValueError, match=message):
        automodel.thd_get_partitioned_indices(cu_seqlens, total, 2, rank)


def test_partition_is_int32_and_whole_at_world_size_1():
    indices = automodel.thd_get_partitioned_indices(int32(0, 4, 6), 6, 1, 0)

    assert indices.dtype == torch.int32
    assert indices.tolist() == [0, 1, 2, 3, 4, 5]


def test_identity_indices_are_all_positions_on_any_mesh():
    assert automodel.identity_local_indices(None, 3).tolist() == [0, 1, 2]
    assert automodel.identity_local_indices(mesh(4, 2), 3, torch.device("cpu")).dtype == torch.int64


@pytest.mark.parametrize(
    "function", [automodel.round_robin_local_indices, automodel.contiguous_local_indices]
)
def test_mesh_functions_read_size_and_rank_from_the_mesh(function):
    ranks = [function(mesh(2, rank), 8) for rank in (0, 1)]

    assert torch.cat(ranks).sort().values.tolist() == list(range(8))


@pytest.fixture
def mesh_of_rank_5():
    """cp ranks 4 to 7 of 8, as rank 5 of a real process group sees them."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))["cp"]
    dist.destroy_process_group()


def test_the_rank_is_the_meshs_where_the_process_group_has_another(mesh_of_rank_5):
    tokens = torch.arange(16)
    rows = {"input_ids": tokens[None], "labels": tokens[None], "position_ids": tokens[None]}
    lengths = {"seq_lens": torch.tensor([[16]]), "seq_lens_padded": torch.tensor([[16]])}

    head_tail = [2, 3, 12, 13]
    assert automodel.round_robin_local_indices(mesh_of_rank_5, 16).tolist() == head_tail
    assert automodel._shard_grad_buffer_for_cp(tokens, 0, mesh_of_rank_5).tolist() == head_tail
    assert automodel.contiguous_local_indices(mesh_of_rank_5, 16).tolist() == [4, 5, 6, 7]
    local = automodel.make_cp_batch_for_te(mesh_of_rank_5, {**rows, **lengths})
    assert (local["cp_rank"], local["input_ids"].tolist()) == (1, head_tail)


def test_rank_is_0_where_neither_mesh_nor_process_group_tells():
    assert automodel.contiguous_local_indices(SimpleNamespace(size=lambda: 2), 4).tolist() == [0, 1]


def test_errors_name_length_and_size():
    with pytest.raises(ValueError, match=r"by 2 \* cp_size, got padded_seq_len=6 cp_size=2"):
        automodel.round_robin_local_indices(mesh(2, 0), 6)
    with pytest.raises(ValueError, match=r"by cp_size, got padded_seq_len=7 cp_size=2"):
        automodel.contiguous_local_indices(mesh(2, 0), 7)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [([5, 6], [False, False]), ([0, 0], [True, True]), ([5, 0], [False, True]), ([], [])],
)
def test_mask_from_ids_accepts_a_padded_tail_only(ids, mask):
    input_ids = torch.tensor(ids, dtype=torch.int64)

    assert automodel.thd_padding_mask_from_token_ids(input_ids, 0).tolist() == mask


@pytest.mark.parametrize("ids", [[0, 5], [5, 0, 6, 0]])
def test_mask_from_ids_refuses_a_pad_id_among_the_content(ids):
    with pytest.raises(ValueError, match="padding_token_id=0 also occurs as content"):
        automodel.thd_padding_mask_from_token_ids(torch.tensor(ids), 0)
