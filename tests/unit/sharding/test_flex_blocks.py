"""Where FlexAttention attends, where it cannot, and that whoever asks for it there is told why."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from ringfeed.sharding.attention.allgather import allgather_attention, allgather_context, kernel_for
from ringfeed.sharding.attention.block_attention import SdpaBlocks
from ringfeed.sharding.attention.flex_blocks import FlexBlocks, compiled_flex_attention
from ringfeed.sharding.index_map import IndexMap

EAGER_FLEX = FlexBlocks(flex=lambda: flex_attention)


def operands(*, device="cpu", width=32, dtype=torch.float32, grad=True):
    return [torch.zeros(8, 2, width, device=device, dtype=dtype, requires_grad=grad) for _ in range(3)]


def on_cuda(**changes):
    """Tensors that say they are on a CUDA device, and hold nothing."""
    with FakeTensorMode():
        return operands(device="cuda", **changes)


def context():
    return allgather_context([0, 5, 8], [0, 5, 8], [IndexMap(np.array([[0, 8]]), 8)], 0)


def test_a_device_with_a_backward_pass_gets_flex():
    assert kernel_for(*on_cuda()) == FlexBlocks()
    assert kernel_for(*on_cuda(grad=False)) == FlexBlocks()


def test_any_other_device_gets_sdpa():
    assert kernel_for(*operands()) == SdpaBlocks()
    assert kernel_for(*operands(grad=False)) == SdpaBlocks()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"width": 8}, "at least 16 entries, here 8"), ({"dtype": torch.float64}, "no float64")],
)
def test_tensors_that_flex_cannot_take_get_sdpa_there(changes, reason):
    assert kernel_for(*on_cuda(**changes)) == SdpaBlocks()
    assert reason in str(FlexBlocks().obstacle(*on_cuda(**changes)))


def test_flex_where_it_has_no_backward_pass_is_refused():
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"'flex' cannot attend .* no backward pass on cpu; .* SdpaBlocks"):
        allgather_attention(q, k, v, context=context().with_kernel(EAGER_FLEX))


def test_flex_without_gradients_attends_there_to_parameters_too():
    q, k, v = (torch.randn(8, 2, 32, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        out = allgather_attention(q, k, v, context=context().with_kernel(EAGER_FLEX))

    torch.testing.assert_close(out, allgather_attention(q, k, v, context=context()).detach())


def test_scale_and_window_reach_flex():
    q, k, v = (torch.randn(8, 2, 32) for _ in range(3))
    windowed = context().with_window((2, 0))

    out = allgather_attention(q, k, v, context=windowed.with_kernel(EAGER_FLEX), scale=0.3)

    torch.testing.assert_close(out, allgather_attention(q, k, v, context=windowed, scale=0.3))


def test_a_chosen_kernel_is_given_up_again():
    chosen = context().with_kernel(EAGER_FLEX)

    assert chosen.with_window((1, 0)).kernel is EAGER_FLEX
    assert chosen.with_kernel(None).kernel is None


def test_what_is_compiled_is_compiled_once_a_process():
    assert compiled_flex_attention() is compiled_flex_attention()
