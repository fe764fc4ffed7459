"""``Batch.kwargs``: exactly what each attention wants, or a refusal that says what would fit."""

import pytest
import torch

from ringfeed.sharding.attention.allgather import allgather_attention


def first_with_tail(run, **changes):
    return next(
        b for b in run.load(**changes) if b.tensors["padding_mask"].any() and b.info.num_documents > 1
    )


def test_te_attend_hands_over_slots_as_sequences(run):
    batch = first_with_tail(run, cp_size=2, layout="te")

    kwargs = batch.kwargs("te")

    slots = batch.tensors["cu_seqlens_padded"]
    offsets = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    assert all(torch.equal(kwargs.pop(name), slots) for name in offsets)
    assert kwargs == {
        "qkv_format": "thd",
        "max_seqlen_q": batch.info.max_seqlen_padded,
        "max_seqlen_kv": batch.info.max_seqlen_padded,
        "pad_between_seqs": False,
    }


def test_te_exact_tells_real_from_slots(run):
    batch = first_with_tail(run, cp_size=2, layout="te")

    kwargs = batch.kwargs("te", pads="exact")

    real, slots = batch.tensors["cu_seqlens"], batch.tensors["cu_seqlens_padded"]
    assert not torch.equal(real, slots)
    assert torch.equal(kwargs["cu_seqlens_q"], real)
    assert torch.equal(kwargs["cu_seqlens_kv"], real)
    assert torch.equal(kwargs["cu_seqlens_q_padded"], slots)
    assert torch.equal(kwargs["cu_seqlens_kv_padded"], slots)
    assert kwargs["pad_between_seqs"] is True
    assert kwargs["max_seqlen_q"] == batch.info.max_seqlen_padded


def test_pads_is_one_choice_per_loader(run):
    loader = run.load(cp_size=2)
    first, second = (batch for batch, _ in zip(loader, range(2), strict=False))
    first.kwargs("te", pads="exact")

    with pytest.raises(ValueError, match=r"pads='attend': .* asked for pads='exact' before; it is one"):
        second.kwargs("te")
    second.kwargs("te", pads="exact")
    # Another loader is another run.
    next(iter(run.load(cp_size=2))).kwargs("te")


def test_a_refused_call_settles_nothing(run):
    batch = next(iter(run.load(cp_size=2, columns=["cu_seqlens_padded"])))

    with pytest.raises(ValueError, match=r"needs the tensor 'cu_seqlens', which Loader\(columns="):
        batch.kwargs("te", pads="exact")

    assert batch.kwargs("te")["pad_between_seqs"] is False


def test_hf_flash_has_a_batch_axis_and_padded_offsets(run):
    batch = first_with_tail(run, layout="te")

    kwargs = batch.kwargs("hf-flash")

    assert torch.equal(kwargs["input_ids"], batch.tensors["input_ids"][None])
    assert torch.equal(kwargs["position_ids"], batch.tensors["position_ids"][None])
    assert torch.equal(kwargs["cu_seq_lens_q"], batch.tensors["cu_seqlens_padded"])
    assert torch.equal(kwargs["cu_seq_lens_k"], batch.tensors["cu_seqlens_padded"])
    widest = batch.info.max_seqlen_padded
    assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (widest, widest)


@pytest.mark.parametrize("layout", ["te", "whole_document", "magi"])
def test_hf_has_a_batch_axis_and_the_context(run, layout):
    batch = first_with_tail(run, layout=layout, cp_size=2, cp_rank=1)

    kwargs = batch.kwargs("hf")

    assert torch.equal(kwargs.pop("input_ids"), batch.tensors["input_ids"][None])
    assert torch.equal(kwargs.pop("position_ids"), batch.tensors["position_ids"][None])
    made, expected = kwargs.pop("ringfeed_context"), batch.kwargs("allgather")["context"]
    assert torch.equal(made.local_document_ids, expected.local_document_ids)
    assert (made.num_parts, made.cp_rank) == (2, 1)
    # No cache: it would keep the keys of every step.
    assert kwargs == {"use_cache": False}


def test_allgather_context_attends_within_documents(run):
    batch = first_with_tail(run, layout="te", packs_per_chunk=2)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 256, 2, 8)

    out = allgather_attention(q, k, v, **batch.kwargs("allgather"))

    real, slots = batch.tensors["cu_seqlens"].tolist(), batch.tensors["cu_seqlens_padded"].tolist()
    expected = torch.zeros_like(out)
    for i, start in enumerate(slots[:-1]):
        part = slice(start, start + real[i + 1] - real[i])
        queries, keys, values = (x[part].transpose(0, 1) for x in (q, k, v))
        alone = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        expected[part] = alone.transpose(0, 1)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("layout", ["te", "head_tail", "contiguous", "whole_document", "identity"])
def test_allgather_describes_every_layout(run, layout):
    for batch in run.load(layout=layout, cp_rank=1, cp_size=2):
        context = batch.kwargs("allgather")["context"]
        is_padding = context.local_document_ids < 0
        assert torch.equal(is_padding, batch.tensors["padding_mask"])
        assert torch.equal(context.local_positions.long(), batch.tensors["position_ids"])


@pytest.mark.parametrize(
    ("layout", "cp_size", "backend", "message"),
    [
        ("contiguous", 2, "te", r"wants layout 'te', or cp 1 .*; backends .*: hf, allgather, flex, flex-cp$"),
        ("identity", 2, "te", r"layout 'identity' at cp 2 does not fit backend 'te'"),
        ("te", 2, "hf-flash", r"wants cp 1 with .*: te, megatron, hf, allgather, flex, ring-flash$"),
        (
            "whole_document",
            2,
            "megatron",
            r"backends that fit this chunk and its layout: hf, allgather, flex$",
        ),
        ("head_tail", 2, "ring-flash", r"wants layout 'te', .*: hf, allgather, flex, flex-cp, torch-cp$"),
        ("te", 2, "flex-cp", r"wants layout 'head_tail' or 'contiguous' or 'ptrr'; "),
        ("contiguous", 2, "torch-cp", r"wants layout 'head_tail', or cp 1 with any layout; "),
        ("te", 1, "magi", r"wants layout 'magi'; "),
        ("magi", 2, "te", r"backends that fit this chunk and its layout: hf, allgather, flex, magi$"),
        ("te", 2, ["te"], r"backend=\['te'\] is not supported; supported: te, megatron"),
        (
            "te",
            2,
            "sdpa",
            r"backend='sdpa' is not supported; supported: te, megatron, hf-flash, hf, allgather, ",
        ),
    ],
)
def test_refuses_what_does_not_fit_and_names_what_does(run, layout, cp_size, backend, message):
    batch = next(iter(run.load(layout=layout, cp_size=cp_size)))

    with pytest.raises(ValueError, match=message):
        batch.kwargs(backend)


@pytest.mark.parametrize(("layout", "copies"), [("identity", 2), ("whole_document", 1), ("te", 1)])
def test_info_says_how_many_ranks_hold_a_token(run, layout, copies):
    assert next(iter(run.load(layout=layout, cp_size=2))).info.copies == copies


@pytest.mark.parametrize("layout", ["head_tail", "contiguous", "whole_document", "identity"])
def test_at_cp_1_every_layout_is_in_chunk_order_and_fits(run, layout):
    by_te = next(iter(run.load(layout="te")))
    batch = next(iter(run.load(layout=layout)))

    assert torch.equal(batch.kwargs("te")["cu_seqlens_q"], batch.tensors["cu_seqlens_padded"])
    assert torch.equal(batch.kwargs("hf-flash")["input_ids"], by_te.tensors["input_ids"][None])


def test_pads_must_be_known_and_is_for_te(run):
    batch = next(iter(run.load()))

    with pytest.raises(ValueError, match=r"pads='some' must be one of attend, exact"):
        batch.kwargs("te", pads="some")
    for backend in ("hf-flash", "hf", "allgather", "flex", "ring-flash", "torch-cp"):
        with pytest.raises(ValueError, match=r"choice of backends 'te' and 'megatron'; leave it out"):
            batch.kwargs(backend, pads="exact")
