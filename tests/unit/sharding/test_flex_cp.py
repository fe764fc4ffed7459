"""The document mask is torch's own mask block by block, and what FlexAttention CP refuses."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer, _PTRRLoadBalancer
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ringfeed.sharding.attention.flex_cp import (
    document_block_mask,
    flex_cp_attention,
    load_balancer,
    shard_block_mask,
)
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets


class Mesh:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


CHUNKS = {
    "uneven with a tail": ([200, 1, 500, 7, 128, 90], None),
    "one document": ([1024], None),
    "padding only": ([], None),
    "on the blocks": ([128, 256, 384], None),
    "skipped ones": ([300, 100, 400, 200], [0, 100, 0, 150]),
    "skipped block": ([100, 300, 200], [100, 0, 200]),
    "tiny": ([3] * 40 + [600], None),
}


def offsets_of(chunk):
    lengths, real = CHUNKS[chunk]
    return slot_offsets(lengths, multiple=4, total=1024, real_lengths=real)


def block_mask_of(chunk):
    offsets = offsets_of(chunk)
    return document_block_mask(offsets.cu_seqlens, offsets.cu_seqlens_padded, device="cpu")


def token_mask(chunk):
    """bool [T, T], written out."""
    offsets = offsets_of(chunk)
    mask = torch.zeros(1024, 1024, dtype=torch.bool)
    for start, stop, num_real in zip(
        offsets.cu_seqlens_padded, offsets.cu_seqlens_padded[1:], np.diff(offsets.cu_seqlens), strict=False
    ):
        if num_real:
            mask[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
    return mask


@pytest.mark.parametrize("chunk", CHUNKS)
def test_tokens_see_their_slot_up_to_themselves(chunk):
    q, kv = torch.meshgrid(torch.arange(1024), torch.arange(1024), indexing="ij")
    zero = torch.zeros((), dtype=torch.int64)

    assert torch.equal(block_mask_of(chunk).mask_mod(zero, zero, q, kv), token_mask(chunk))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", ["kv", "full_kv", "q", "full_q"])
def test_blocks_are_those_that_torch_finds(chunk, kind):
    mask = block_mask_of(chunk)
    expected = create_block_mask(mask.mask_mod, 1, 1, 1024, 1024, device="cpu")

    def blocks(found):
        counts, ids = getattr(found, f"{kind}_num_blocks")[0, 0], getattr(found, f"{kind}_indices")[0, 0]
        return [sorted(row[:count].tolist()) for count, row in zip(counts.tolist(), ids, strict=True)]

    assert blocks(mask) == blocks(expected)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_attention_is_softmax_under_the_mask(chunk):
    q, k, v = torch.randn(3, 1, 2, 1024, 16, generator=torch.Generator().manual_seed(1)).unbind()
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~token_mask(chunk), float("-inf"))

    found = flex_attention(q, k, v, block_mask=block_mask_of(chunk))

    torch.testing.assert_close(found, scores.softmax(-1).nan_to_num(0.0) @ v, rtol=0, atol=1e-5)


def test_memory_does_not_grow_with_the_tokens_squared():
    mask = document_block_mask([0, 131_072], [0, 131_072], device="cpu")

    assert mask.kv_num_blocks.sum() == 1024
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.sum() == 1024 * 1023 // 2


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("layout", ["head_tail", "ptrr"])
def test_order_is_torchs_own(chunk, layout):
    offsets = offsets_of(chunk)
    maps = make_layout(layout).index_maps(offsets.cu_seqlens_padded, cp_size=2, cu_seqlens=offsets.cu_seqlens)
    balancer = load_balancer(layout, maps, device="cpu")
    torchs = (
        _PTRRLoadBalancer(block_mask_of(chunk), 2)
        if layout == "ptrr"
        else _HeadTailLoadBalancer(1024, 2, "cpu")
    )

    assert balancer is not None
    for restore in (False, True):
        found, expected = (b._generate_indices(restore=restore) for b in (balancer, torchs))
        torch.testing.assert_close(found, expected, check_dtype=False)


def test_contiguous_needs_no_balancer():
    assert load_balancer("contiguous", [], device="cpu") is None


@pytest.mark.parametrize("layout", ["te", "whole_document", "magi", "identity"])
def test_another_layout_is_refused(layout):
    with pytest.raises(ValueError, match=f"layout '{layout}' does not fit.*head_tail, contiguous, ptrr"):
        load_balancer(layout, [], device="cpu")


@pytest.mark.parametrize("length", [0, 100, 1000])
def test_a_chunk_of_broken_blocks_is_refused(length):
    with pytest.raises(ValueError, match=f"has {length} tokens; FlexAttention CP needs a multiple of 128"):
        document_block_mask([0, length], [0, length], device="cpu")


def test_ranks_with_broken_blocks_are_refused():
    with pytest.raises(
        ValueError, match=r"1024 tokens; FlexAttention CP over 3 ranks needs a multiple of 384"
    ):
        shard_block_mask(Mesh(3), block_mask=block_mask_of("tiny"), load_balancer=None)


def test_a_mask_of_the_whole_chunk_is_refused():
    x = torch.zeros(1, 1, 512, 16)

    with pytest.raises(ValueError, match=r"for \(1024, 1024\) queries and keys.*have \(512, 1024\)"):
        flex_cp_attention(x, x, x, block_mask=block_mask_of("tiny"), cp_mesh=Mesh(2))


def test_one_rank_attends_under_the_whole_mask():
    q, k = torch.randn(1, 4, 1024, 16), torch.randn(1, 2, 1024, 16)
    mask = block_mask_of("tiny")

    found = flex_cp_attention(q, k, k, block_mask=mask, cp_mesh=Mesh(1))

    assert torch.equal(found, flex_attention(q, k, k, block_mask=mask, enable_gqa=True))
