"""Gathered attention on CUDA: FlexAttention, compiled, forward and backward, against SDPA on the CPU."""

import numpy as np
import pytest
import torch

from ringfeed.sharding.attention.allgather import allgather_attention, allgather_context, kernel_for
from ringfeed.sharding.attention.block_attention import SdpaBlocks
from ringfeed.sharding.attention.flex_blocks import FlexBlocks
from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention trains on a CUDA device only"),
]

LENGTHS = [300, 1, 777, 5, 0, 130]
TOTAL = 1536
WINDOWS = [(-1, 0), (100, 0), (-1, -1), (40, 7)]


def one_rank(window, *, offsets=None):
    """The context of a rank that holds the whole chunk, every second run of it later."""
    offsets = offsets or slot_offsets(LENGTHS, multiple=4, total=TOTAL)
    held = IndexMap(np.array([[512, 512], [0, 512], [1024, 512]]), TOTAL)
    return held, allgather_context(offsets.cu_seqlens, offsets.cu_seqlens_padded, [held], 0, window=window)


def tensors(dtype=torch.float32):
    made = torch.Generator().manual_seed(0)
    return [torch.randn(TOTAL, heads, 32, generator=made).to(dtype) for heads in (4, 2, 2, 4)]


def run(operands, weight, context, device):
    leaves = [x.to(device).requires_grad_() for x in operands]
    out = allgather_attention(*leaves, context=context.to(device))
    grads = torch.autograd.grad((out * weight.to(device)).sum(), leaves)
    return [x.detach().cpu() for x in (out, *grads)]


def test_the_device_trains_with_flex():
    operands = [x.cuda().requires_grad_() for x in tensors()[:3]]

    assert kernel_for(*operands) == FlexBlocks()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", [FlexBlocks(), SdpaBlocks()], ids=["flex", "sdpa"])
def test_output_and_gradients_equal_the_cpu_s(window, kernel):
    *operands, weight = tensors()
    held, context = one_rank(window)
    operands, weight = [held.take(x) for x in operands], held.take(weight)

    found = run(operands, weight, context.with_kernel(kernel), "cuda")

    for one, other in zip(found, run(operands, weight, context, "cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_bfloat16_is_as_near_as_bfloat16_is(window):
    *operands, weight = tensors(torch.bfloat16)
    _, context = one_rank(window)

    found = run(operands, weight, context, "cuda")

    expected = run([x.float() for x in operands], weight.float(), context, "cpu")
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).abs().max() < 0.02 * max(1.0, float(other.abs().max()))


def test_a_long_chunk_needs_no_mask_of_pairs():
    total = 131_072
    layout = make_layout("te")
    offsets = slot_offsets([total - 1000, 900], multiple=16, total=total)
    maps = layout.index_maps(offsets.cu_seqlens_padded, cp_size=8, cu_seqlens=offsets.cu_seqlens)
    context = allgather_context(offsets.cu_seqlens, offsets.cu_seqlens_padded, maps, 3).to("cuda")
    q = torch.randn(total // 8, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(total, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    kernel = FlexBlocks()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    kernel.attend(q, k, v, mask=context.mask(kernel), scale=None).float().sum().backward()

    # One byte a pair would be 2 GiB.
    assert torch.cuda.max_memory_allocated() - before < 2**29
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
