"""Checks of torch's FlexAttention CP under document masks, run on each rank by ``checked_rank.py``."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor.experimental._context_parallel import _attention as internals
from torch.nn.attention.flex_attention import create_block_mask

from ringfeed.sharding.attention.flex_cp import (
    document_block_mask,
    flex_cp_attention,
    load_balancer,
    shard_block_mask,
)
from ringfeed.sharding.attention.torch_cp import create_context_parallel_ctx
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets

PLAIN_SDPA = F.scaled_dot_product_attention
NUM_TOKENS = 1024
CHUNK = slot_offsets([200, 1, 300, 7, 128, 90, 100], multiple=4, total=NUM_TOKENS)
OTHER_CHUNK = slot_offsets([3, 900], multiple=4, total=NUM_TOKENS)
CHECKS = []  # type: ignore[var-annotated]


def check(function):
    CHECKS.append(function)
    return function


def whole_mask(chunk):
    return document_block_mask(chunk.cu_seqlens, chunk.cu_seqlens_padded, device="cpu")


def local_mask(mesh, layout_name, chunk=CHUNK):
    maps = make_layout(layout_name).index_maps(
        chunk.cu_seqlens_padded, cp_size=mesh.size(), cu_seqlens=chunk.cu_seqlens
    )
    balancer = load_balancer(layout_name, maps, device="cpu")
    local = shard_block_mask(mesh, block_mask=whole_mask(chunk), load_balancer=balancer)
    return local, maps[mesh.get_local_rank()]


def over_documents(q, k, v, chunk):
    """Attention over each document alone; padding rows stay zero."""
    out = torch.zeros_like(q)
    starts, lengths = chunk.cu_seqlens_padded[:-1], chunk.cu_seqlens[1:] - chunk.cu_seqlens[:-1]
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        rows = (..., slice(start, start + length), slice(None))
        if length:
            out[rows] = PLAIN_SDPA(q[rows], k[rows], v[rows], is_causal=True, enable_gqa=True)
    return out


@contextmanager
def traced_masks():
    """Trace torch's block mask as torch does, without the C++ compiler, which takes a minute on two cores."""
    traced = torch.compile(create_block_mask, dynamic=False, fullgraph=True, backend="eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "_compiled_create_block_mask", traced)
        yield


def check_layout(mesh, layout_name, chunk=CHUNK):
    local, index_map = local_mask(mesh, layout_name, chunk)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 4, NUM_TOKENS, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, NUM_TOKENS, 16, generator=generator).unbind()
    parts = [index_map.take(x, 2) for x in (q, k, v)]

    found = flex_cp_attention(*parts, block_mask=local, cp_mesh=mesh)

    expected = index_map.take(over_documents(q, k, v, chunk), 2)
    is_real = expected.any(-1)
    torch.testing.assert_close(found[is_real], expected[is_real], rtol=0, atol=1e-5)
    assert found.isfinite().all()


@check
def each_layout_equals_attention_over_documents(mesh):
    with traced_masks():
        for layout in ("head_tail", "contiguous", "ptrr"):
            check_layout(mesh, layout)


@check
def one_trace_serves_chunk_after_chunk(mesh):
    with traced_masks():
        first, _ = local_mask(mesh, "ptrr")
        with torch._dynamo.config.patch(error_on_recompile=True):
            second, _ = local_mask(mesh, "ptrr", OTHER_CHUNK)
    assert first.kv_num_blocks.tolist() != second.kv_num_blocks.tolist()


@check
def ranks_of_ptrr_have_about_the_same_number_of_blocks(mesh):
    def difference(layout):
        local, _ = local_mask(mesh, layout, OTHER_CHUNK)
        assert local.full_kv_num_blocks is not None
        mine = local.kv_num_blocks.sum() + local.full_kv_num_blocks.sum()
        both = torch.zeros(2, dtype=mine.dtype)
        dist.all_gather_single(both, mine[None])
        return int((both[0] - both[1]).abs())

    with traced_masks():
        assert difference("ptrr") <= 1
        assert difference("contiguous") > 8


@check
def a_ring_that_is_on_stays_on_and_lets_go(mesh):
    with traced_masks(), create_context_parallel_ctx(mesh, [torch.arange(8)], [0], set()):
        ring = F.scaled_dot_product_attention
        for layout in ("contiguous", "head_tail"):
            local_mask(mesh, layout)
            assert internals._cp_options.enable_load_balance
            assert internals._dispatch_mode is internals._DispatchMode.MONKEY_PATCH
            assert F.scaled_dot_product_attention is ring
    assert F.scaled_dot_product_attention is PLAIN_SDPA
