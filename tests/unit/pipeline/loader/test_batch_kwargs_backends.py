"""``Batch.kwargs`` of the backends beside TE: what they are given says the same as the batch's lengths."""

import inspect
import sys
import warnings
from dataclasses import make_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from ringfeed.pipeline.batch_kwargs import PadsChoice
from ringfeed.pipeline.chunk_sharder import ChunkSharder
from ringfeed.sharding.attention.allgather import allgather_attention, allgather_context
from ringfeed.sharding.attention.flex_cp import shard_block_mask
from ringfeed.sharding.attention.flex_mask import local_block_mask
from ringfeed.sharding.attention.te_limits import MAX_BOUNDARIES
from ringfeed.sharding.index_map import IndexMap, merge
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets

LAYOUTS = ["te", "head_tail", "contiguous", "whole_document", "magi", "identity"]


def first_with_tail(run, **changes):
    return next(
        b for b in run.load(**changes) if b.tensors["padding_mask"].any() and b.info.num_documents > 1
    )


def with_chunk(batch, lengths, *, layout, total, cp_size=2, cp_rank=0, **options):
    """The batch's tensors over another chunk: for backends that read offsets from the sharder."""
    made = make_layout(layout, **options)
    packs = [slot_offsets(lengths, multiple=made.length_multiple(cp_size), total=total)]
    sharder = ChunkSharder(layout=made, cp_size=cp_size, cp_rank=cp_rank, packs=packs)
    info = replace(batch.info, layout=layout, cp_size=cp_size, cp_rank=cp_rank)
    return replace(batch, info=info, chunks=(replace(batch.chunks[0], info=info, sharder=sharder),))


def seen_by_lengths(batch):
    """bool [T, T]: same piece, not later; written out from the offsets."""
    real, slots = batch.tensors["cu_seqlens"].tolist(), batch.tensors["cu_seqlens_padded"].tolist()
    seen = torch.zeros(slots[-1], slots[-1], dtype=torch.bool)
    for i, start in enumerate(slots[:-1]):
        stop = start + real[i + 1] - real[i]
        seen[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
    return seen


@pytest.mark.parametrize("pads", ["attend", "exact"])
def test_megatron_has_the_fields_of_packed_seq_params(run, pads):
    batch = first_with_tail(run, cp_size=2)

    kwargs = batch.kwargs("megatron", pads=pads)

    slots = batch.tensors["cu_seqlens_padded"]
    real = slots if pads == "attend" else batch.tensors["cu_seqlens"]
    expected = {"cu_seqlens_q": real, "cu_seqlens_q_padded": slots}
    expected |= {"cu_seqlens_kv": real, "cu_seqlens_kv_padded": slots}
    assert all(torch.equal(kwargs.pop(name), value) for name, value in expected.items())
    widest = batch.info.max_seqlen_padded
    flag = {} if pads == "attend" else {"pad_between_seqs": True}
    assert kwargs == {"qkv_format": "thd", "max_seqlen_q": widest, "max_seqlen_kv": widest, **flag}


PACKED_SEQ_PARAMS = ["qkv_format", "max_seqlen_q", "max_seqlen_kv"]
PACKED_SEQ_PARAMS += [f"cu_seqlens_{side}{kind}" for side in ("q", "kv") for kind in ("", "_padded")]


@pytest.fixture
def megatron_module(monkeypatch):
    """Stand in for the one module of Megatron-Core that is looked at, with the given further fields."""

    def put(*more):
        params = make_dataclass("PackedSeqParams", [*PACKED_SEQ_PARAMS, *more])
        module = SimpleNamespace(PackedSeqParams=params)
        monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", module)
        return params

    return put


def test_megatron_of_any_version_takes_slots_as_sequences(run, megatron_module):
    batch = next(iter(run.load(cp_size=2)))

    assert megatron_module()(**batch.kwargs("megatron")).qkv_format == "thd"
    assert megatron_module("pad_between_seqs")(
        **batch.kwargs("megatron"), pad_between_seqs=False
    ).max_seqlen_q


def test_megatron_is_told_of_padding_or_refused_where_it_cannot_be(run, megatron_module):
    batch = next(iter(run.load(cp_size=2)))

    params = megatron_module("pad_between_seqs")
    assert params(**batch.kwargs("megatron", pads="exact")).pad_between_seqs is True

    megatron_module()
    with pytest.raises(ValueError, match=r"pads='exact' needs the field pad_between_seqs, .* pads='attend'"):
        batch.kwargs("megatron", pads="exact")


def test_megatron_and_te_share_the_pads_choice(run):
    batch = next(iter(run.load(cp_size=2)))
    batch.kwargs("megatron", pads="exact")

    with pytest.raises(ValueError, match=r"pads='attend': .* asked for pads='exact' before"):
        batch.kwargs("te")


@pytest.mark.parametrize("backend", ["te", "megatron"])
def test_too_many_boundaries_are_told_once_in_a_run(run, backend):
    batch = next(iter(run.load(cp_size=2)))
    many = torch.arange(MAX_BOUNDARIES + 1, dtype=torch.int32) * 4
    crowded = replace(batch, tensors={**batch.tensors, "cu_seqlens_padded": many}, pads=PadsChoice())

    with pytest.warns(RuntimeWarning, match=rf"the chunk has {MAX_BOUNDARIES + 1} boundaries") as told:
        crowded.kwargs(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crowded.kwargs(backend)

    assert told[0].filename == __file__


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_ring_flash_has_a_rank_s_share_of_every_slot(run, cp_size):
    batch = first_with_tail(run, cp_size=cp_size)

    kwargs = batch.kwargs("ring-flash")

    slots = batch.tensors["cu_seqlens_padded"]
    assert kwargs["cu_seqlens"].dtype == torch.int32
    assert torch.equal(kwargs["cu_seqlens"] * cp_size, slots)
    assert kwargs["cu_seqlens"][-1] == len(batch.tensors["input_ids"])
    assert kwargs["max_seqlen"] == int(kwargs["cu_seqlens"].diff().max())
    assert kwargs["causal"] is True
    # Zigzag: each share is two pieces of one length.
    assert cp_size == 1 or (kwargs["cu_seqlens"] % 2 == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_mask_is_the_lengths_mask_for_every_layout(run, layout):
    for batch, _ in zip(run.load(layout=layout, cp_size=2, cp_rank=1), range(4), strict=False):
        mask_mod = batch.kwargs("flex")["mask_mod"]

        rows = batch.sharder.index_map.positions
        q, kv = torch.meshgrid(torch.arange(len(rows)), torch.arange(batch.sharder.num_tokens), indexing="ij")
        zero = torch.zeros((), dtype=torch.int64)
        assert torch.equal(mask_mod(zero, zero, q, kv), seen_by_lengths(batch)[rows])


def test_flex_says_which_document_and_position_each_token_has(run):
    batch = first_with_tail(run, layout="te", cp_size=2)

    kwargs = batch.kwargs("flex")

    rows = batch.sharder.index_map.positions
    assert torch.equal(kwargs["local_document_ids"], kwargs["global_document_ids"][rows])
    assert torch.equal(kwargs["local_positions"], kwargs["global_positions"][rows])
    assert torch.equal(kwargs["local_document_ids"] < 0, batch.tensors["padding_mask"])
    assert torch.equal(kwargs["local_positions"].long(), batch.tensors["position_ids"])


@pytest.mark.parametrize("window", [(-1, 0), (9, 0), (-1, -1)])
@pytest.mark.parametrize("layout", ["te", "whole_document", "magi"])
def test_flex_attention_over_gathered_keys_equals_allgather(run, layout, window):
    loaders = (run.load(layout=layout, cp_size=2, cp_rank=rank) for rank in range(2))
    ranks = next(r for r in zip(*loaders, strict=True) if any(b.tensors["padding_mask"].any() for b in r))
    q, k, v = torch.randn(3, ranks[0].sharder.num_tokens, 2, 16, generator=torch.Generator().manual_seed(0))

    outs = []
    for batch in ranks:
        mask = local_block_mask(batch.kwargs("flex")["context"].with_window(window))
        queries, keys, values = (x.transpose(0, 1)[None] for x in (batch.sharder.index_map.take(q), k, v))
        outs.append(flex_attention(queries, keys, values, block_mask=mask)[0].transpose(0, 1))

    offsets, whole = ranks[0].sharder.offsets, IndexMap(np.array([[0, len(q)]]), len(q))
    context = allgather_context(offsets.cu_seqlens, offsets.cu_seqlens_padded, [whole], 0, window=window)
    expected = allgather_attention(q, k, v, context=context)
    torch.testing.assert_close(merge(ranks[0].sharder.index_maps, outs), expected)


@pytest.mark.parametrize("layout", ["head_tail", "contiguous", "ptrr"])
def test_flex_cp_hands_over_the_chunk_s_mask_and_the_ranks_order(run, layout):
    batch = with_chunk(next(iter(run.load())), [300, 1, 90], layout=layout, total=512)

    kwargs = batch.kwargs("flex-cp")

    assert {"cp_mesh", *kwargs} == set(inspect.signature(shard_block_mask).parameters)
    assert kwargs["block_mask"].seq_lengths == (512, 512)
    if layout == "contiguous":
        assert kwargs["load_balancer"] is None
    else:
        order = kwargs["load_balancer"]._generate_indices(restore=False)[0]
        maps = batch.sharder.index_maps
        assert order.tolist() == [p for m in maps for p in m.positions.tolist()]


def test_flex_cp_wants_whole_blocks_on_every_rank(run):
    batch = with_chunk(next(iter(run.load())), [300], layout="contiguous", total=384)

    with pytest.raises(
        ValueError, match=r"has 384 tokens; .* at cp 2 wants a multiple of 256, blocks of 128"
    ):
        batch.kwargs("flex-cp")


def pairs_of_ranges(kwargs):
    """How many slices allow each pair, int [T, T], by MagiAttention's rules."""
    allowed = np.zeros((kwargs["total_seqlen_q"], kwargs["total_seqlen_k"]), dtype=int)
    slices = zip(kwargs["q_ranges"], kwargs["k_ranges"], kwargs["attn_mask_type"], strict=True)
    for (q0, q1), (k0, k1), kind in slices:
        i, j = np.mgrid[: q1 - q0, : k1 - k0]
        pairs = np.ones_like(i, dtype=bool)
        if kind in ("causal", "bi_causal"):
            pairs &= j <= i + (k1 - k0) - (q1 - q0)
        if kind in ("inv_causal", "bi_causal"):
            pairs &= j >= i
        allowed[q0:q1, k0:k1] += pairs
    return allowed


@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}, {"causal": False, "window": [3, 0]}])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_magi_ranges_are_the_lengths_mask(run, options, cp_size):
    batch = with_chunk(
        next(iter(run.load())), [30, 1, 17], layout="magi", total=64, cp_size=cp_size, **options
    )

    kwargs = batch.kwargs("magi")

    expected = np.zeros((64, 64), dtype=int)
    for start, length in ((0, 30), (30, 1), (31, 17)):
        expected[start : start + length, start : start + length] = np.tri(length)
    if "window" in options:
        expected -= np.tril(expected, -4)
    np.testing.assert_array_equal(pairs_of_ranges(kwargs), expected)


def test_magi_is_told_a_chunk_size_that_it_keeps_and_needs_no_padding(run):
    batch = first_with_tail(run, layout="magi", cp_size=2)

    kwargs = batch.kwargs("magi")

    assert (kwargs["total_seqlen_q"], kwargs["total_seqlen_k"], kwargs["pad_size"]) == (128, 128, 0)
    again = make_layout("magi", chunk_size=kwargs["chunk_size"])
    slots, real = (batch.tensors[name].tolist() for name in ("cu_seqlens_padded", "cu_seqlens"))
    maps = again.index_maps(slots, cp_size=2, cu_seqlens=real)
    assert maps[0].runs.tolist() == batch.sharder.index_map.runs.tolist()


def test_torch_cp_counts_documents(run):
    batches = list(run.load(layout="head_tail", cp_size=2))
    alone = next(b for b in batches if b.info.num_documents == 1)
    several = next(b for b in batches if b.info.num_documents > 1)

    kwargs = alone.kwargs("torch-cp")

    assert set(kwargs) == {"input_ids", "position_ids"}
    assert torch.equal(kwargs["input_ids"], alone.tensors["input_ids"][None])
    assert torch.equal(kwargs["position_ids"], alone.tensors["position_ids"][None])
    told = rf"the chunk has {several.info.num_documents} real documents.*: hf, allgather, flex, flex-cp$"
    with pytest.raises(ValueError, match=told):
        several.kwargs("torch-cp")


def test_a_refusal_names_only_backends_that_take_the_chunk(run):
    batches = list(run.load(layout="head_tail", cp_size=2))
    alone = next(b for b in batches if b.info.num_documents == 1)

    with pytest.raises(ValueError, match=r": hf, allgather, flex, flex-cp, torch-cp$"):
        alone.kwargs("te")
    assert alone.kwargs("torch-cp")


def test_an_all_padding_chunk_is_legal_for_every_backend_that_takes_it(run):
    seen = next(iter(run.load()))
    for layout, backends in {
        "te": ["allgather", "flex"],
        "head_tail": ["torch-cp", "flex-cp", "flex"],
        "magi": ["magi", "allgather"],
    }.items():
        batch = with_chunk(seen, [], layout=layout, total=256)
        for backend in backends:
            assert batch.kwargs(backend)
