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


REAL = [0, 1, 2, 3, 4, 8, 9, 10, *range(16, 25)]
"""Where the real tokens of ``sharder()`` lie: documents of 5, 3 and 9 tokens in slots of 8, 4 and 12."""


@pytest.mark.parametrize("layout", ["te", "identity"])
@pytest.mark.parametrize("seq_dim", [0, 1, -1])
@pytest.mark.parametrize("num_entries", [17, 11, 0])
def test_real_tokens_go_to_their_places_and_padding_gets_the_fill(layout, seq_dim, num_entries):
    chunks = [sharder(layout, cp_rank=rank) for rank in (0, 1)]
    if layout == "identity":
        chunks = [sharder(layout, cp_size=1)]
    places = [p for p, mask in enumerate(real_mask(chunks[0])) if mask]
    x = torch.arange(2.0 * num_entries).reshape(num_entries, 2).movedim(0, seq_dim)

    parts = [chunk.shard_token_tensor(x, seq_dim, -7.0, coordinates="real") for chunk in chunks]

    expected = torch.full((32, 2), -7.0)
    expected[places[:num_entries]] = x.movedim(seq_dim, 0)
    whole = merge([chunk.index_map for chunk in chunks], parts, dim=seq_dim)
    assert torch.equal(whole.movedim(seq_dim, 0), expected)
    if layout == "te":
        assert places == REAL


def real_mask(chunk):
    mask = [False] * chunk.num_tokens
    real, slots = chunk.offsets.cu_seqlens.tolist(), chunk.offsets.cu_seqlens_padded.tolist()
    for i, start in enumerate(slots[:-1]):
        for place in range(real[i + 1] - real[i]):
            mask[start + place] = True
    return mask


def test_gathered_tensors_are_trimmed_to_what_the_caller_had():
    chunk = sharder(cp_size=1)
    x = torch.rand(3, 17)

    for num_entries in (17, 12):
        part = chunk.shard_token_tensor(x[:, :num_entries], 1, coordinates="real")
        back = chunk.gather_token_tensor(part, 1, coordinates="real", num_entries=num_entries)
        assert torch.equal(back, x[:, :num_entries])
    part = chunk.shard_token_tensor(x, 1)
    assert torch.equal(chunk.gather_token_tensor(part, 1, num_entries=17), x)


def test_a_shard_s_gradient_is_this_rank_s_tokens():
    chunks = [sharder(cp_rank=rank) for rank in (0, 1)]
    weights = torch.rand(32)
    gradients = []
    for chunk in chunks:
        x = torch.rand(17, requires_grad=True)
        part = chunk.shard_token_tensor(x, coordinates="real")
        (part * chunk.shard_token_tensor(weights)).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)

    torch.testing.assert_close(gradients[0] + gradients[1], weights[real_mask(chunks[0])])
    assert not (gradients[0].bool() & gradients[1].bool()).any()


def test_refuses_other_coordinates_and_more_than_there_is():
    chunk = sharder()
    with pytest.raises(ValueError, match=r"x has 18 entries in dim 0, the chunk has 17 real tokens"):
        chunk.shard_token_tensor(torch.zeros(18), coordinates="real")
    with pytest.raises(ValueError, match=r"coordinates='rows' must be one of slots, real"):
        chunk.shard_token_tensor(torch.zeros(1), coordinates="rows")
    with pytest.raises(ValueError, match=r"num_entries=18 is not in 0 to 17"):
        sharder(cp_size=1).gather_token_tensor(torch.zeros(32), coordinates="real", num_entries=18)


def test_shift_looks_ahead_within_each_piece():
    chunk = sharder("identity", cp_size=1, packs=(([5, 3], 16), ([9], 16)))
    ids = chunk.shard_token_tensor(torch.arange(1, 18), coordinates="real")

    ahead = chunk.shift_token_tensor(ids, 2, fill=-100)

    real = chunk.gather_token_tensor(ahead, coordinates="real").tolist()
    assert real == [3, 4, 5, -100, -100, 8, -100, -100, *range(11, 18), -100, -100]
    assert (ahead == -100).sum() == 32 - 11
