"""``ptrr`` deals as torch's own balancer does for a document-causal ``BlockMask``."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _PTRRLoadBalancer
from torch.nn.attention.flex_attention import create_block_mask

from ringfeed.sharding.layouts import make_layout


@st.composite
def chunks(draw):
    """A chunk as (block, cp_size, slot offsets, real offsets); documents begin anywhere in a block."""
    block, cp_size = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    total = block * cp_size * draw(st.integers(1, 6))
    cuts = draw(st.lists(st.integers(0, total), max_size=10))
    padded = np.array([0, *sorted(cuts), total])
    slots = np.diff(padded)
    lengths = [draw(st.integers(0, int(slot)) | st.just(0)) for slot in slots]
    return block, cp_size, padded, np.concatenate([[0], np.cumsum(lengths)])


def torchs_order(block, cp_size, padded, is_real):
    slot = torch.from_numpy(np.repeat(np.arange(len(padded) - 1), np.diff(padded)))
    sees = torch.from_numpy(np.asarray(is_real))

    def mask(batch, head, query, key):
        return (query >= key) & (slot[query] == slot[key]) & sees[slot[query]]

    total = int(padded[-1])
    block_mask = create_block_mask(mask, 1, 1, total, total, device="cpu", BLOCK_SIZE=block)
    return _PTRRLoadBalancer(block_mask, cp_size)._generate_indices()[0].tolist()


@settings(max_examples=60)
@given(chunk=chunks())
def test_equal_to_torch(chunk):
    block, cp_size, padded, real = chunk
    layout = make_layout("ptrr", block=block)

    for cu_seqlens, is_real in ((None, np.ones(len(padded) - 1, dtype=bool)), (real, np.diff(real) > 0)):
        maps = layout.index_maps(padded, cp_size=cp_size, cu_seqlens=cu_seqlens)

        positions = [position for index_map in maps for position in index_map.positions.tolist()]
        assert positions == torchs_order(block, cp_size, padded, is_real)
