"""The mask of local queries over a chunk's keys: torch's own tables, without making all pairs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from ringfeed.sharding.attention.allgather import allgather_context
from ringfeed.sharding.attention.block_attention import SdpaBlocks
from ringfeed.sharding.attention.flex_blocks import FlexBlocks
from ringfeed.sharding.attention.flex_mask import document_mask_mod, local_block_mask
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets

TABLES = ("kv", "full_kv", "q", "full_q")


def context_of(lengths, *, total, layout="contiguous", cp_size=2, cp_rank=1, window=(-1, 0)):
    made = make_layout(layout)
    offsets = slot_offsets(lengths, multiple=made.length_multiple(cp_size), total=total)
    maps = made.index_maps(offsets.cu_seqlens_padded, cp_size=cp_size, cu_seqlens=offsets.cu_seqlens)
    return allgather_context(offsets.cu_seqlens, offsets.cu_seqlens_padded, maps, cp_rank, window=window)


def tables(block_mask):
    """Which blocks are listed in each row of each table; what follows a list means nothing."""
    listed = {}
    for name in TABLES:
        counts = getattr(block_mask, f"{name}_num_blocks")[0, 0].tolist()
        ids = getattr(block_mask, f"{name}_indices")[0, 0].tolist()
        listed[name] = [row[:count] for row, count in zip(ids, counts, strict=True)]
    return listed


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    window=st.tuples(st.integers(-1, 600), st.integers(-1, 600)),
    layout=st.sampled_from(["contiguous", "te", "whole_document"]),
    spare=st.integers(0, 200),
)
def test_blocks_are_those_that_torch_finds_by_looking_at_every_pair(lengths, window, layout, spare):
    total = -(-(sum(lengths) + 4 * len(lengths) + spare) // 4) * 4
    context = context_of(lengths, total=total, layout=layout, window=window)
    num_local = len(context.local_positions)

    found = local_block_mask(context)

    expected = create_block_mask(document_mask_mod(context), None, None, num_local, total, device="cpu")
    assert tables(found) == tables(expected)
    assert found.seq_lengths == expected.seq_lengths == (num_local, total)
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE


def test_a_long_chunk_is_described_by_its_blocks():
    # 2**34 pairs: a mask of them would be 16 GiB.
    context = context_of([2**20], total=2**20, cp_size=64, cp_rank=63)

    found = local_block_mask(context)

    listed = tables(found)
    assert [len(row) for row in listed["full_kv"]] == list(range(8192 - 128, 8192))
    assert [len(row) for row in listed["kv"]] == [1] * 128


def test_a_window_leaves_few_blocks_of_a_long_document():
    context = context_of([2**18], total=2**18, window=(1023, 0))

    listed = tables(local_block_mask(context))

    seen = [len(part) + len(full) for part, full in zip(listed["kv"], listed["full_kv"], strict=True)]
    assert max(seen) == 9


@pytest.mark.parametrize("window", [(-1, 0), (2, 1)])
def test_the_mask_mod_tells_pairs_apart(window):
    context = context_of([5, 3], total=8, cp_size=1, cp_rank=0, window=window)
    q, kv = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    left, right = (side if side >= 0 else 8 for side in window)

    found = document_mask_mod(context)(torch.tensor(0), torch.tensor(0), q, kv)

    same = (q < 5) == (kv < 5)
    assert torch.equal(found, same & (kv >= q - left) & (kv <= q + right))


def test_masks_are_made_once_for_a_window_and_a_kernel():
    kernel, context = SdpaBlocks(), context_of([5, 3], total=8)

    masks = [context.with_window(w).mask(kernel) for w in ((-1, 0), (2, 0), (-1, 0), (2, 0))]

    assert masks[0] is masks[2]
    assert masks[1] is masks[3]
    assert masks[0] is not masks[1]
    assert context.mask(FlexBlocks()) is not masks[0]
    assert context.to("cpu").mask(kernel) is not masks[0]
