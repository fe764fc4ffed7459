"""Gathered attention where one rank holds everything, and what describes a chunk to it."""

import numpy as np
import pytest
import torch

from ringfeed.sharding.attention.allgather import AllGatherContext, allgather_attention, allgather_context
from ringfeed.sharding.index_map import IndexMap

CU_SEQLENS = [0, 5, 6, 6, 13]
CU_SEQLENS_PADDED = [0, 8, 12, 16, 24]
REAL = [0, 1, 2, 3, 4, 8, 16, 17, 18, 19, 20, 21, 22]


def whole(num_tokens: int) -> IndexMap:
    return IndexMap(np.array([[0, num_tokens]]), num_tokens)


def one_rank() -> AllGatherContext:
    return allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, [whole(24)], 0)


def inputs(num_tokens: int = 24, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(num_tokens, n, 8) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def per_document(q, k, v, window=(-1, 0)):
    """Attention over each document alone, written out: no mask over documents, no SDPA."""
    left, right = (side if side >= 0 else 24 for side in window)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
    share = q.shape[1] // k.shape[1]
    for slot, start in enumerate(CU_SEQLENS_PADDED[:-1]):
        rows = slice(start, start + CU_SEQLENS[slot + 1] - CU_SEQLENS[slot])
        keys, values = (x[rows].repeat_interleave(share, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / q.shape[2] ** 0.5
        hidden = torch.ones(scores.shape[1:]).bool()
        hidden = hidden.triu(right + 1) | hidden.tril(-left - 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out


def test_ids_and_positions_come_from_the_lengths():
    context = one_rank()

    documents = [0] * 5 + [-1] * 3 + [1] + [-1] * 7 + [3] * 7 + [-1]
    assert context.global_document_ids.tolist() == documents
    positions = [0, 1, 2, 3, 4, 0, 0, 0, 0] + [0] * 7 + [*range(7), 0]
    assert context.global_positions.tolist() == positions


def test_local_ids_and_positions_follow_the_index_map():
    maps = [IndexMap(np.array([[12, 12]]), 24), IndexMap(np.array([[0, 12]]), 24)]
    context = allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, maps, 0)

    assert torch.equal(context.local_document_ids, context.global_document_ids[12:])
    assert torch.equal(context.local_positions, context.global_positions[12:])


def test_one_rank_without_a_group_equals_attention_per_document():
    q, k, v = inputs()
    weight = torch.randn(24, 4, 8, generator=torch.Generator().manual_seed(2))

    out = allgather_attention(q, k, v, context=one_rank())
    grads = torch.autograd.grad((out * weight).sum(), (q, k, v))

    expected = per_document(q, k, v)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (0, 0), (1, 2), (-1, 1), (0, -1), (100, 0)])
def test_a_window_limits_what_a_query_sees_of_its_document(window):
    q, k, v = inputs()
    weight = torch.randn(24, 4, 8, generator=torch.Generator().manual_seed(2))

    out = allgather_attention(q, k, v, context=one_rank().with_window(window))
    grads = torch.autograd.grad((out * weight).sum(), (q, k, v))

    expected = per_document(q, k, v, window)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, wanted, rtol=1e-5, atol=1e-5)


def test_layers_with_different_windows_share_a_context():
    q, k, v = inputs()
    context = one_rank()

    windows = [context.with_window(sides) for sides in ((1, 0), (-1, 0), (1, 0))]
    outs = [allgather_attention(q, k, v, context=each) for each in windows]

    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


def test_a_rank_that_holds_all_tokens_in_another_order_gives_the_same():
    shuffled = IndexMap(np.array([[16, 8], [0, 4], [12, 4], [4, 8]]), 24)
    q, k, v = inputs()
    context = allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, [shuffled], 0)

    out = allgather_attention(*(shuffled.take(x) for x in (q, k, v)), context=context)

    torch.testing.assert_close(out, shuffled.take(per_document(q, k, v)), rtol=1e-5, atol=1e-5)


def test_padding_rows_are_zero_and_push_no_gradient_into_real_rows():
    q, k, v = inputs()
    padding = torch.ones(24, dtype=torch.bool)
    padding[REAL] = False

    out = allgather_attention(q, k, v, context=one_rank())
    grads = torch.autograd.grad(out[padding].sum(), (q, k, v))

    assert not out[padding].any()
    assert not any(grad.any() for grad in grads)


def test_a_chunk_of_padding_only_is_zero_and_differentiable():
    q, k, v = inputs()
    context = allgather_context([0, 0], [0, 24], [whole(24)], 0)

    out = allgather_attention(q, k, v, context=context)
    out.sum().backward()

    assert not out.any()
    assert q.grad is not None
    assert not q.grad.any()


def test_scale_multiplies_the_scores():
    q, k, v = inputs()

    out = allgather_attention(q, k, v, context=one_rank(), scale=0.5)

    torch.testing.assert_close(out, per_document(q * 0.5 * 8**0.5, k, v), rtol=1e-5, atol=1e-5)


def test_bfloat16_keeps_its_type():
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in inputs())

    out = allgather_attention(q, k, v, context=one_rank())
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))

    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}


def test_positions_beyond_the_slots_are_padding():
    context = allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, [whole(30)], 0)

    assert context.global_document_ids[24:].tolist() == [-1] * 6


def test_a_gap_between_the_index_maps_is_named():
    maps = [IndexMap(np.array([[0, 12]]), 24), IndexMap(np.array([[13, 11]]), 24)]
    with pytest.raises(ValueError, match="do not tile the 24-token chunk: token 12 is held 0 times"):
        allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, maps, 0)


def test_maps_of_different_chunks_are_refused():
    maps = [IndexMap(np.array([[0, 12]]), 24), IndexMap(np.array([[0, 12]]), 12)]
    with pytest.raises(ValueError, match=r"different chunks: \[24, 12\] tokens"):
        allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, maps, 0)


def test_offsets_beyond_the_maps_are_refused():
    with pytest.raises(ValueError, match="ends at 24, but the index maps cover 20"):
        allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, [whole(20)], 0)


def test_a_cp_rank_without_a_map_is_refused():
    with pytest.raises(ValueError, match="cp_rank=1 is not in 0 to 0"):
        allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, [whole(24)], 1)


def test_a_cut_chunk_without_a_group_is_refused():
    maps = [IndexMap(np.array([[0, 12]]), 24), IndexMap(np.array([[12, 12]]), 24)]
    context = allgather_context(CU_SEQLENS, CU_SEQLENS_PADDED, maps, 0)
    with pytest.raises(ValueError, match="cut into 2 parts: pass group="):
        allgather_attention(*inputs(12), context=context)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((24, 4), (24, 4), (24, 4)), r"\[tokens, heads, width\]"),
        (((23, 4, 8), (24, 4, 8), (24, 4, 8)), "describes 24 local tokens"),
        (((24, 4, 8), (24, 3, 8), (24, 3, 8)), "heads of k and v divide those of q"),
        (((24, 4, 8), (24, 2, 6), (24, 2, 8)), "q and k have one width"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        allgather_attention(*(torch.zeros(shape) for shape in shapes), context=one_rank())


def test_only_what_attention_reads_is_made_and_moved():
    context = one_rank().to("meta")

    held = {name: getattr(context, name) for name in AllGatherContext.__dataclass_fields__}
    assert [name for name, value in held.items() if isinstance(value, torch.Tensor)] in ([], ["key_order"])
    assert context.num_local == context.num_tokens == 24
    assert context.local_positions.device.type == "meta"
    assert context.with_window((3, 0)).local_positions is context.local_positions
