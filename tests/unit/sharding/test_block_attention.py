"""Masks of blocks equal the ranges they are made from, and attention under them the plain formula."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.sharding.attention.block_attention import KeyRanges, block_attention

NUM_KEYS = 700


@st.composite
def key_ranges(draw):
    """Rows of any order with any range of keys, runs of growing ranges among them."""
    starts, stops = [], []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, NUM_KEYS - 1))
        first, count = draw(st.integers(start, NUM_KEYS)), draw(st.integers(1, 150))
        window = draw(st.sampled_from([NUM_KEYS, 20]))
        ends = np.minimum(np.arange(first, first + count), NUM_KEYS)
        stops += ends.tolist()
        starts += np.maximum(start, ends - window).tolist()
    return np.array(starts), np.array(stops)


def visible(starts, stops):
    keys = torch.arange(NUM_KEYS)
    return (keys >= torch.from_numpy(starts)[:, None]) & (keys < torch.from_numpy(stops)[:, None])


@given(key_ranges())
def test_masks_hide_all_but_the_ranges(ranges):
    planned = KeyRanges.plan(*ranges, num_keys=NUM_KEYS)
    found = torch.zeros(len(ranges[0]), NUM_KEYS, dtype=torch.bool)
    for block in planned.blocks:
        found[block.rows, block.keys] = planned.mask(block, torch.float32) == 0
    found[~planned.sees_any] = False

    assert torch.equal(found, visible(*ranges))


@settings(max_examples=30)
@given(key_ranges())
def test_attention_and_gradients_equal_the_plain_formula(ranges):
    mask = visible(*ranges)
    sees_any = mask.any(dim=1)
    generator = torch.Generator().manual_seed(0)
    q, weight = (torch.randn(len(mask), 2, 8, generator=generator, requires_grad=True) for _ in range(2))
    k, v = (torch.randn(NUM_KEYS, 1, 8, generator=generator, requires_grad=True) for _ in range(2))

    out = block_attention(q, k, v, key_ranges=KeyRanges.plan(*ranges, num_keys=NUM_KEYS))
    scores = torch.einsum("qhd,kgd->hqk", q[sees_any], k) / 8**0.5
    shares = scores.masked_fill(~mask[sees_any], float("-inf")).softmax(-1)
    plain = torch.einsum("hqk,kgd->qhd", shares, v)

    assert not out[~sees_any].any()
    torch.testing.assert_close(out[sees_any], plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad((out * weight).sum(), (q, k, v)),
        torch.autograd.grad((plain * weight[sees_any]).sum(), (q, k, v)),
        rtol=1e-5,
        atol=1e-4,
    )


def test_nothing_wider_than_a_block_is_kept_for_the_backward_pass():
    starts, stops = np.zeros(4096, dtype=np.int64), np.arange(1, 4097)
    q, k, v = (torch.randn(4096, 1, 4, requires_grad=True) for _ in range(3))
    saved = []

    def note(x):
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        block_attention(q, k, v, key_ranges=KeyRanges.plan(starts, stops, num_keys=4096))

    assert sum(saved) == 3 * 4096 * 4


def test_a_second_derivative_is_refused():
    ranges = KeyRanges.plan(np.zeros(4, dtype=np.int64), np.arange(1, 5), num_keys=4)
    q, k, v, weight = (torch.randn(4, 1, 4, requires_grad=True) for _ in range(4))
    out = block_attention(q, k, v, key_ranges=ranges)
    (grad,) = torch.autograd.grad((out * weight).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
