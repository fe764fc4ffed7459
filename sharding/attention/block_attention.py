"""Attention of one rank's queries to a chunk's keys, block by block, in bounded memory.

In:   q of the rank, k and v of the chunk, and ``KeyRanges``, or a context (``chunk_context.py``)
Out:  the rank's attention output

SDPA with a mask keeps that mask for the backward pass; over a long chunk the masks of all
blocks add up to [L, T]. Here the backward pass computes each block again instead.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringfeed.sharding.attention.kernels import AttentionKernel
from ringfeed.sharding.attention.query_blocks import QueryBlock, plan_query_blocks

if TYPE_CHECKING:
    from ringfeed.sharding.attention.chunk_context import AllGatherContext

__all__ = ["KeyRanges", "SdpaBlocks", "block_attention"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyRanges:
    """Which keys each local row may see: one range of chunk positions a row."""

    starts: Tensor
    """int32 [L], first chunk position that the row may see."""
    stops: Tensor
    """int32 [L], one past the last."""
    sees_any: Tensor
    """bool [L], False for a row without keys, such as padding, whatever its range says."""
    blocks: tuple[QueryBlock, ...]
    """The rows with keys, grouped."""

    @classmethod
    def plan(cls, starts: NDArray[np.int64], stops: NDArray[np.int64], *, num_keys: int) -> "KeyRanges":
        """Group L rows with keys ``[starts, stops)``; a row whose range is empty sees none."""
        sees_any = stops > starts
        # Softmax over no key is 0/0 in some backends, and its gradient NaN, so a blind row in a
        # block sees all of its keys, and its output is made zero.
        return cls(
            starts=torch.from_numpy(np.where(sees_any, starts, 0).astype(np.int32)),
            stops=torch.from_numpy(np.where(sees_any, stops, num_keys).astype(np.int32)),
            sees_any=torch.from_numpy(sees_any),
            blocks=plan_query_blocks(starts, stops),
        )

    def to(self, device: torch.device | str) -> "KeyRanges":
        """Return the same with tensors on ``device``."""
        names = ("starts", "stops", "sees_any")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def mask(self, block: QueryBlock, dtype: torch.dtype) -> Tensor:
        """Return [rows, keys] of ``block`` to add to scores: 0 where the row may see the key, else -inf."""
        device = self.stops.device
        hidden = float("-inf")
        mask = torch.zeros(
            block.row_stop - block.row_start, block.key_stop - block.key_start, dtype=dtype, device=device
        )
        keys = torch.arange(block.key_start, block.key_stop, dtype=torch.int32, device=device)
        # Between the two edges every row sees every key: most of a long document's block.
        head = max(0, block.last_start - block.key_start)
        if head:
            mask[:, :head].masked_fill_(keys[:head] < self.starts[block.rows, None], hidden)
        tail = block.first_stop - block.key_start
        mask[:, tail:].masked_fill_(keys[tail:] >= self.stops[block.rows, None], hidden)
        return mask


@dataclass(frozen=True, slots=True)
class SdpaBlocks(AttentionKernel):
    """Torch's SDPA under the mask of one block of queries after the other: on any device, trained or not."""

    name: ClassVar[str] = "sdpa"

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:  # noqa: ARG002
        return None

    def mask(self, context: "AllGatherContext") -> KeyRanges:
        return KeyRanges.plan(*context.key_ranges(), num_keys=context.num_tokens).to(context.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: KeyRanges, scale: float | None) -> Tensor:
        return block_attention(q, k, v, key_ranges=mask, scale=scale)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, *, key_ranges: KeyRanges, scale: float | None = None
) -> Tensor:
    """Attend from local rows to the chunk's keys.

    Args:
        q: [L, H, D].
        k: [T, Hkv, D] in chunk order, Hkv divides H.
        v: [T, Hkv, Dv] in chunk order.
        key_ranges: who may see whom.
        scale: factor on the scores; None is 1/sqrt(D).

    Returns:
        [L, H, Dv]. Rows that see nothing are zero and give no gradient. Differentiable once.
    """
    out: Tensor = _BlockAttention.apply(q, k, v, key_ranges, scale)  # type: ignore[no-untyped-call]
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_ranges: KeyRanges, scale: float | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.key_ranges, ctx.scale = key_ranges, scale
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        for block in key_ranges.blocks:
            rows, keys = block.rows, block.keys
            out[rows] = _attend(q[rows], k[keys], v[keys], mask=key_ranges.mask(block, q.dtype), scale=scale)
        return out.masked_fill_(~key_ranges.sees_any[:, None, None], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        key_ranges: KeyRanges = ctx.key_ranges
        grad_out = grad_out.masked_fill(~key_ranges.sees_any[:, None, None], 0.0)
        grad_q = torch.zeros_like(q)
        # A key collects from many blocks: bfloat16 sums would lose the small ones.
        grad_k = torch.zeros_like(k, dtype=torch.promote_types(k.dtype, torch.float32))
        grad_v = torch.zeros_like(v, dtype=torch.promote_types(v.dtype, torch.float32))
        for block in key_ranges.blocks:
            rows, keys = block.rows, block.keys
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q[rows], k[keys], v[keys])]
                out = _attend(*leaves, mask=key_ranges.mask(block, q.dtype), scale=ctx.scale)
            grads = torch.autograd.grad(out, leaves, grad_out[rows])
            grad_q[rows] = grads[0]
            grad_k[keys] += grads[1]
            grad_v[keys] += grads[2]
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, scale: float | None) -> Tensor:
    """Return [rows, H, Dv] for q [rows, H, D], k and v [keys, Hkv, ...], mask [rows, keys]."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)
