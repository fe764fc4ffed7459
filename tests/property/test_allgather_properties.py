"""Every kernel, layout and window against softmax under a dense mask, written out from the offsets."""

from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from ringfeed.sharding.attention.allgather import allgather_context
from ringfeed.sharding.attention.block_attention import SdpaBlocks
from ringfeed.sharding.attention.flex_blocks import FlexBlocks
from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets

EAGER_FLEX = FlexBlocks(flex=lambda: flex_attention)
LAYOUTS = {
    "te": {},
    "head_tail": {},
    "contiguous": {},
    "whole_document": {"threshold": 16},
    "ptrr": {"block": 16},
    "magi": {"chunk_size": 16},
    "identity": {},
}
sides = st.integers(-1, 40) | st.sampled_from([-1, 0, 10_000])
lengths = st.lists(st.integers(0, 60) | st.just(1), min_size=1, max_size=6)


@st.composite
def chunks(draw):
    """A layout, its cp size and the offsets of a chunk that fits it."""
    name, cp_size = draw(st.sampled_from(sorted(LAYOUTS))), draw(st.sampled_from([1, 2, 4]))
    layout = make_layout(name, **LAYOUTS[name])
    documents = draw(lengths)
    needed = max(1, int(layout.slot_lengths(documents, cp_size=cp_size).sum()))
    whole = layout.chunk_multiple(cp_size=cp_size)
    total = -(-needed // whole) * whole
    return layout, cp_size, slot_offsets(documents, multiple=layout.length_multiple(cp_size), total=total)


def dense_mask(offsets, window):
    """bool [T, T], pair by pair."""
    left, right = (side if side >= 0 else 10**9 for side in window)
    slots, real = offsets.cu_seqlens_padded.tolist(), np.diff(offsets.cu_seqlens).tolist()
    mask = torch.zeros(slots[-1], slots[-1], dtype=torch.bool)
    for start, length in zip(slots, real, strict=False):
        for query in range(start, start + length):
            first, last = max(start, query - left), min(start + length - 1, query + right)
            mask[query, first : last + 1] = True
    return mask


def dense_attention(operands, mask):
    q, k, v = operands
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[2] ** 0.5
    shares = scores.masked_fill(~mask, -1e30).softmax(-1) * mask
    return torch.einsum("hqk,khd->qhd", shares, values)


def attend(q, k, v, *, kernel, chunk, window):
    """All ranks' outputs in chunk order, each made of the rank's own queries and the chunk's keys."""
    layout, cp_size, offsets = chunk
    cu_seqlens, padded = offsets.cu_seqlens, offsets.cu_seqlens_padded
    maps = layout.index_maps(padded, cp_size=cp_size, cu_seqlens=cu_seqlens)
    described = partial(allgather_context, cu_seqlens, padded, maps, window=window)
    contexts = [described(rank) for rank in range(cp_size)]
    outs = [
        kernel.attend(held.take(q), k, v, mask=context.mask(kernel), scale=None)
        for held, context in zip(maps, contexts, strict=True)
    ]
    return merge(maps, outs)


def tensors(num_tokens):
    made = torch.Generator().manual_seed(0)
    return [torch.randn(num_tokens, heads, 8, generator=made, requires_grad=True) for heads in (4, 2, 2, 4)]


@settings(max_examples=60, deadline=None)
@given(chunk=chunks(), window=st.tuples(sides, sides))
def test_sdpa_blocks_and_their_gradients_equal_the_dense_mask(chunk, window):
    *operands, weight = tensors(int(chunk[2].cu_seqlens_padded[-1]))
    expected = dense_attention(operands, dense_mask(chunk[2], window))

    out = attend(*operands, kernel=SdpaBlocks(), chunk=chunk, window=window)

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad((out * weight).sum(), operands),
        torch.autograd.grad((expected * weight).sum(), operands),
        rtol=0,
        atol=1e-4,
    )


@settings(max_examples=60, deadline=None)
@given(chunk=chunks(), window=st.tuples(sides, sides))
def test_flex_blocks_equal_the_dense_mask(chunk, window):
    operands = tensors(int(chunk[2].cu_seqlens_padded[-1]))[:3]
    expected = dense_attention(operands, dense_mask(chunk[2], window))

    with torch.no_grad():
        out = attend(*operands, kernel=EAGER_FLEX, chunk=chunk, window=window)

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
