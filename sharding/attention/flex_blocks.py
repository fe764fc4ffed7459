"""FlexAttention as the kernel of gathered attention: whole blocks of keys are skipped, no mask is kept.

In:   q of the rank, k and v of the chunk, a ``BlockMask`` (``flex_mask.py``)
Out:  the rank's attention output

FlexAttention is slow and large unless compiled; here it is compiled once a process. A chunk of the same sizes
and another mask runs the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.attention.flex_attention import flex_attention

from ringfeed.sharding.attention.flex_mask import local_block_mask
from ringfeed.sharding.attention.kernels import AttentionKernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from ringfeed.sharding.attention.chunk_context import AllGatherContext

__all__ = ["TRAINING_DEVICES", "FlexBlocks", "compiled_flex_attention"]

TRAINING_DEVICES = ("cuda", "xpu")
"""Device types on which FlexAttention has a backward pass."""
_NARROWEST_HEAD = 16
"""What its Triton kernels multiply at least."""


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return torch's ``flex_attention``, compiled: the same object each time, with what it has compiled."""
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


@dataclass(frozen=True, slots=True)
class FlexBlocks(AttentionKernel):
    """FlexAttention over the chunk's keys."""

    name: ClassVar[str] = "flex"

    flex: Callable[[], Callable[..., Any]] = compiled_flex_attention
    """Returns the function that attends: ``flex_attention`` itself, or compiled."""

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        kind = q.device.type
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if kind in TRAINING_DEVICES:
            narrow = min(q.shape[-1], v.shape[-1])
            if narrow < _NARROWEST_HEAD:
                return f"on {kind} a head has at least {_NARROWEST_HEAD} entries, here {narrow}"
            if q.dtype == torch.float64:
                return f"on {kind} it takes no float64"
            return None
        return f"it has no backward pass on {kind}" if needs_grad else None

    def mask(self, context: AllGatherContext) -> BlockMask:
        return local_block_mask(context)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: BlockMask, scale: float | None) -> Tensor:
        # [L, H, D] -> [1, H, L, D]
        operands = [x.transpose(0, 1)[None] for x in (q, k, v)]
        if not torch.is_grad_enabled():
            # FlexAttention looks at requires_grad alone, and refuses parameters on a CPU.
            operands = [x.detach() for x in operands]
        out = self.flex()(*operands, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"flex_attention returned a {type(out).__name__}")
        return out[0].transpose(0, 1)
