"""BSHD to THD under the reference's names: what its vectors do not cover."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringfeed.sharding import automodel
from ringfeed.sharding.automodel_thd import ChunkCountError


def mesh(size, rank=0):
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)


def batch(rows=2, width=8, **changes):
    """Rows of one full sequence each, unless ``changes`` say otherwise; None leaves a field out."""
    tokens = torch.arange(10, 10 + rows * width).reshape(rows, width)
    full = torch.full((rows, 1), width)
    made = {
        "input_ids": tokens,
        "labels": tokens + 1,
        "position_ids": torch.arange(width).expand(rows, -1).clone(),
        "seq_lens": full,
        "seq_lens_padded": full.clone(),
    }
    return {**made, **changes}


def on_all_ranks(size, given, **settings):
    return [
        automodel.make_cp_batch_for_te(mesh(size, rank), given, return_local_indices=True, **settings)
        for rank in range(size)
    ]


def test_padding_behind_a_row_belongs_to_its_last_sequence():
    # Rows of 4 + 2 pad and 6: the original gives [0, 4, 12] and masks two real tokens.
    lengths = torch.tensor([[4], [6]])

    made = automodel.process_input_for_thd(batch(width=6, seq_lens=lengths, seq_lens_padded=lengths))

    assert made["cu_seqlens"].tolist() == [0, 4, 10]
    assert made["cu_seqlens_padded"].tolist() == [0, 6, 12]
    assert made["padding_mask"].nonzero().flatten().tolist() == [4, 5]


def test_padding_at_the_end_joins_the_last_sequence_only_where_slots_are_told():
    lengths = torch.tensor([[8], [5]])

    told = automodel.process_input_for_thd(batch(seq_lens=lengths, seq_lens_padded=lengths))
    untold = automodel.process_input_for_thd(batch(seq_lens=lengths, seq_lens_padded=None))

    assert told["cu_seqlens"].tolist() == [0, 8, 16]
    assert untold["cu_seqlens"].tolist() == [0, 8, 13]
    assert torch.equal(told["padding_mask"], untold["padding_mask"])


def test_rows_without_a_sequence_come_last():
    lengths = torch.tensor([[8], [-1000]])
    made = automodel.process_input_for_thd(batch(seq_lens=lengths, seq_lens_padded=lengths))
    assert made["cu_seqlens"].tolist() == [0, 16]
    assert made["padding_mask"].sum() == 8

    with pytest.raises(ValueError, match="row 0 of seq_lens has no sequence"):
        automodel.process_input_for_thd(batch(seq_lens=lengths.flip(0), seq_lens_padded=lengths.flip(0)))


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_tile_a_stream_that_ends_in_padding(size):
    lengths = torch.tensor([[5, 3], [7, -1000]])
    slots = torch.tensor([[8, 8], [8, -1000]])
    given = batch(width=24, seq_lens=lengths, seq_lens_padded=slots)

    ranks = on_all_ranks(size, given)

    assert torch.cat([indices for _, indices in ranks]).sort().values.tolist() == list(range(48))
    for made, indices in ranks:
        assert made["cu_seqlens"].tolist() == [0, 8, 24, 48]
        assert torch.equal(made["input_ids"], given["input_ids"].flatten()[indices])


def test_a_last_slot_that_no_longer_fits_with_its_padding_is_refused():
    lengths = torch.tensor([[6, 4]])
    with pytest.raises(ValueError, match="slot 0 has 6 tokens, not a multiple of 4"):
        on_all_ranks(2, batch(rows=1, width=12, seq_lens=lengths, seq_lens_padded=lengths))


@pytest.mark.parametrize("fill", [0, -1, 16])
def test_a_fill_value_takes_no_boundary_away(fill):
    # The original drops every boundary that equals the fill, the leading 0 among them.
    stream = automodel.process_input_for_thd(batch())

    local, indices = automodel._shard_thd_chunk_for_te(stream, mesh(2), "thd", fill, 0)

    assert indices.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert local["cu_seqlens"].tolist() == [0, 8, 16]


def test_a_fill_of_0_leaves_the_leading_boundary_in_the_batch():
    # The original gives rank 0 the rows [2, 3, 4, 7, ...]: without its 0, the first slot begins at 4.
    lengths = torch.tensor([[4, 4, 8]])
    given = batch(rows=1, width=16, seq_lens=lengths, seq_lens_padded=lengths)

    (local, indices), _ = on_all_ranks(2, given, seq_lens_padding_value=0)

    assert indices.tolist() == [0, 3, 4, 7, 8, 9, 14, 15]
    assert local["cu_seqlens"].tolist() == [0, 4, 8, 16]


class Waits(TorchDispatchMode):
    """Counts operations that stop the host until the device has caught up."""

    NAMES = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        is_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in self.NAMES or is_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_no_token_tensor_makes_the_host_wait_for_the_device(num_chunks):
    # The original waits 7 times a chunk: items, comparisons, selections by a mask.
    with Waits() as waits:
        on_all_ranks(2, batch(rows=4), num_chunks=num_chunks)

    assert waits.seen == []


def test_filled_up_boundaries_stay_filled_up():
    stream = automodel.process_input_for_thd(batch(rows=1))
    stream["cu_seqlens"] = torch.tensor([0, 8, -1000, -1000], dtype=torch.int32)

    local, indices = automodel._shard_thd_chunk_for_te(stream, mesh(2, 1), "thd", -1000, 0)

    assert indices.tolist() == [2, 3, 4, 5]
    assert local["cu_seqlens"].tolist() == [0, 8, -1000, -1000]


def test_chunks_keep_extras_and_split_the_ones_aligned_with_tokens():
    weights = torch.rand(4, 8, 3)
    given = batch(rows=4, loss_weights=weights, pixel_values=torch.ones(1, 2), tag=["a", "b"])

    whole = automodel.make_cp_batch_for_te(None, given, num_chunks=2)
    ranks = on_all_ranks(2, given, num_chunks=2)

    assert torch.equal(whole["loss_weights"], weights.reshape(2, 16, 3))
    for made, indices in ranks:
        assert indices is None
        assert made["loss_weights"].shape == (2, 8, 3)
        assert made["pixel_values"].shape == (1, 2)
        assert made["tag"] == ["a", "b"]
    assert torch.equal(ranks[0][0]["loss_weights"][1, :2], weights[2, :2])


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_rope_axes_are_kept_and_tokens_cut(num_chunks):
    # Four axes and four rows: whoever cuts the wrong axis does not notice.
    positions = torch.arange(4 * 4 * 8).reshape(4, 4, 8)

    made, _ = on_all_ranks(2, batch(rows=4, position_ids=positions), num_chunks=num_chunks)[1]

    streams = positions.reshape(4, num_chunks, 1, -1).transpose(0, 1)
    kept = [2, 3, 4, 5]
    rows = torch.cat([torch.tensor(kept) + 8 * row for row in range(4 // num_chunks)])
    expected = streams.index_select(3, rows)
    assert torch.equal(made["position_ids"], expected if num_chunks > 1 else expected[0])


def test_embeddings_keep_dtype_and_gradient():
    embeddings = torch.rand(2, 8, 4, dtype=torch.bfloat16, requires_grad=True)

    made, _ = on_all_ranks(2, batch(input_ids=embeddings))[0]

    assert made["input_ids"].dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(made["input_ids"].sum(), embeddings)
    assert grad.flatten(0, 1)[:, 0].nonzero().flatten().tolist() == [0, 1, 6, 7, 8, 9, 14, 15]


def test_positions_of_one_row_are_those_of_every_row():
    made = automodel.process_input_for_thd(batch(position_ids=torch.arange(8).unsqueeze(0)))

    assert made["position_ids"].tolist() == [*range(8), *range(8)]


def test_lengths_may_describe_the_stream_as_a_whole():
    lengths = torch.tensor([5, 11])

    made = automodel.process_input_for_thd(batch(seq_lens=lengths, seq_lens_padded=lengths))

    assert made["cu_seqlens"].tolist() == [0, 5, 16]


def test_num_chunks_0_is_like_1():
    assert automodel.make_cp_batch_for_te(None, batch(), num_chunks=0)["input_ids"].shape == (16,)


def test_the_format_is_checked_before_anything_else():
    with pytest.raises(ValueError, match="qkv_format must be 'thd', got ''"):
        automodel.make_cp_batch_for_te(None, {}, qkv_format="")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": torch.tensor([[9], [8]])}, r"row 0: seq_lens_padded\[0\]=8 does not fit"),
        ({"seq_lens": torch.tensor([[8], [-5]])}, r"row 1: seq_lens\[0\]=-5, but a length is at least 0"),
        ({"seq_lens": torch.tensor([[8, 1], [8, 1]])}, "seq_lens has 2 entries, seq_lens_padded 1"),
        ({"seq_lens": torch.tensor([[8]])}, "seq_lens has 1 rows, input_ids 2"),
        ({"seq_lens": torch.ones(2, 1)}, "seq_lens must be integers"),
        ({"seq_lens_padded": torch.tensor([[9], [8]])}, "row 0: seq_lens_padded sums to 9"),
        ({"labels": torch.zeros(2, 7)}, r"labels must be \[2, 8\] like input_ids, got \[2, 7\]"),
        ({"labels": None}, "labels must be .*, got None"),
        ({"position_ids": torch.zeros(3, 8, 2)}, r"position_ids must be \[2, 8\]"),
        ({"input_ids": torch.zeros(16)}, r"input_ids must be \[B, S\] or \[B, S, H\], got \[16\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_field_value_and_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        automodel.process_input_for_thd(batch(**changes))


@pytest.mark.parametrize("name", ["labels", "seq_lens"])
def test_chunks_need_every_row_of_every_field(name):
    with pytest.raises(ValueError, match=f"{name} must have the 2 rows"):
        automodel.split_batch_into_thd_chunks(batch(**{name: torch.ones(1, 8, dtype=torch.int64)}), 2)


def test_a_fill_that_is_also_a_boundary_is_refused():
    # Chunk 1 has a sequence less, and one that ends at 4.
    lengths = torch.tensor([[2, 2, 3, 1], [3, 1, 3, 4]])
    given = batch(seq_lens=lengths, seq_lens_padded=lengths)

    with pytest.raises(ValueError, match="seq_lens_padding_value=4 is also a boundary of chunk 1"):
        automodel.split_batch_into_thd_chunks(given, 2, seq_lens_padding_value=4)


def test_chunk_count_errors_are_what_either_library_raises():
    with pytest.raises(RuntimeError) as caught:
        automodel.split_batch_into_thd_chunks(batch(), 4)
    assert isinstance(caught.value, ChunkCountError)
    assert isinstance(caught.value, ValueError)


def test_a_stream_without_boundaries_is_refused_and_one_without_a_mask_is_not():
    stream = automodel.process_input_for_thd(batch())
    with pytest.raises(ValueError, match="cu_seqlens is None"):
        automodel._shard_thd_chunk_for_te({**stream, "cu_seqlens": None}, mesh(2), "thd", -1000, 0)

    # Padding is a tail of the whole stream; of rank 0's part it is not.
    ids = torch.tensor([1, 2, 3, 0, 0, 0, 0, 0])
    stream = {**automodel.process_input_for_thd(batch(rows=1)), "input_ids": ids}
    del stream["padding_mask"]
    local, _ = automodel._shard_thd_chunk_for_te(stream, mesh(2), "thd", -1000, 0)
    assert local["padding_mask"].tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "cu_seqlens"])
def test_a_stream_without_one_of_its_fields_is_a_key_error(name):
    stream = automodel.process_input_for_thd(batch())
    del stream[name]

    with pytest.raises(KeyError, match=name):
        automodel._shard_thd_chunk_for_te(stream, mesh(2), "thd", -1000, 0)


def test_a_stream_may_have_no_positions():
    stream = {**automodel.process_input_for_thd(batch()), "position_ids": None}

    local, indices = automodel._shard_thd_chunk_for_te(stream, mesh(2), "thd", -1000, 0)

    assert local["position_ids"] is None
    assert torch.equal(local["input_ids"], stream["input_ids"][indices])


def test_neither_function_changes_what_it_is_given():
    stream = automodel.process_input_for_thd(batch())
    before = {name: value.clone() for name, value in stream.items()}

    automodel._shard_thd_chunk_for_te(stream, mesh(2), "thd", -1000, 0)

    assert all(torch.equal(stream[name], before[name]) for name in before)
    assert set(stream) == set(before)
