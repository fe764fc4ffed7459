"""``Batch.sharder``: maps of chunks of several packs, and tensors through them."""

import pytest
import torch

from ringfeed.pipeline.chunk_sharder import ChunkSharder, concat_index_maps
from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets


def sharder(layout="te", *, cp_size=2, cp_rank=0, packs=(([5, 3], 16), ([9], 16))):
    made = make_layout(layout)
    multiple = made.length_multiple(cp_size)
    offsets = [slot_offsets(lengths, multiple=multiple, total=total) for lengths, total in packs]
    return ChunkSharder(layout=made, cp_size=cp_size, cp_rank=cp_rank, packs=offsets)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_te_map_of_a_chunk_is_the_map_of_its_offsets(cp_size, cp_rank):
    if cp_rank >= cp_size:
        return
    chunk = sharder(cp_size=cp_size, cp_rank=cp_rank)

    whole = chunk.layout.index_map(chunk.offsets.cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank)

    assert chunk.num_tokens == 32
    assert chunk.index_map.runs.tolist() == whole.runs.tolist()


def test_concat_shifts_each_pack_behind_the_ones_before():
    layout = make_layout("contiguous")
    maps = [layout.index_map([0, total], cp_size=2, cp_rank=1) for total in (4, 8)]

    assert concat_index_maps(maps).positions.tolist() == [2, 3, 8, 9, 10, 11]
    assert maps[1].runs.tolist() == [[4, 4]]


@pytest.mark.parametrize("seq_dim", [0, 1, -1])
def test_shards_along_any_dim(seq_dim):
    chunk = sharder(cp_rank=1)
    x = torch.arange(64).reshape(32, 2).movedim(0, seq_dim)

    part = chunk.shard_token_tensor(x, seq_dim, 0)

    expected = torch.arange(64).reshape(32, 2)[chunk.index_map.positions].movedim(0, seq_dim)
    assert torch.equal(part, expected)


def test_fills_what_a_shorter_tensor_lacks():
    chunks = [sharder(cp_rank=rank) for rank in (0, 1)]
    x = torch.arange(30, dtype=torch.float32)

    parts = [chunk.shard_token_tensor(x, 0, -7.0) for chunk in chunks]

    whole = merge([chunk.index_map for chunk in chunks], parts)
    assert whole.tolist() == [*x.tolist(), -7.0, -7.0]
    assert len(x) == 30


def test_refuses_more_tokens_than_the_chunk_has():
    with pytest.raises(ValueError, match=r"x has 33 entries in dim 0, the chunk has 32 tokens"):
        sharder().shard_token_tensor(torch.zeros(33), 0, 0)
    with pytest.raises(ValueError, match=r"x has 1 dimensions, so no dim 1"):
        sharder().shard_token_tensor(torch.zeros(32), 1, 0)


@pytest.mark.parametrize(("layout", "cp_size"), [("te", 1), ("identity", 2)])
def test_gathers_without_a_group_where_a_rank_holds_everything(layout, cp_size):
    chunk = sharder(layout, cp_size=cp_size)
    x = torch.rand(3, 32)

    assert torch.equal(chunk.gather_token_tensor(x, 1), x)


def test_gather_says_what_is_missing():
    with pytest.raises(ValueError, match=r"cut into 2 parts: pass group="):
        sharder().gather_token_tensor(torch.zeros(16), 0)
    with pytest.raises(ValueError, match=r"x has 32 entries in dim 0, this rank holds 16"):
        sharder().gather_token_tensor(torch.zeros(32), 0)
