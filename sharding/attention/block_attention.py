"""Attention of one rank's queries to a chunk's keys, block by block, in bounded memory.

In:   q of the rank, k and v of the chunk, and an ``AttentionMask`` (``allgather.py`` builds it)
Out:  the rank's attention output

SDPA with a mask keeps that mask for the backward pass; over a long chunk the masks of all
blocks add up to [L, T]. Here the backward pass computes each block again instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringfeed.sharding.attention.query_blocks import QueryBlock

__all__ = ["AttentionMask", "block_attention"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionMask:
    """Who may see whom: same document, and not later. -1 marks padding, which sees nothing."""

    local_document_ids: Tensor
    """int32 [L], which document (slot of the chunk) a query is in, -1 for padding."""
    local_positions: Tensor
    """int32 [L], offset of the query in its document, 0 for padding."""
    global_document_ids: Tensor
    """int32 [T], the same for the chunk's keys, in chunk order."""
    global_positions: Tensor
    """int32 [T], the same for the chunk's keys, in chunk order."""
    blocks: tuple[QueryBlock, ...]
    """Query rows with the key ranges that hold all they may see."""

    def to(self, device: torch.device | str) -> "AttentionMask":
        """Return the same mask with its tensors on ``device``."""
        return replace(
            self,
            local_document_ids=self.local_document_ids.to(device),
            local_positions=self.local_positions.to(device),
            global_document_ids=self.global_document_ids.to(device),
            global_positions=self.global_positions.to(device),
        )

    def visible(self, block: QueryBlock) -> Tensor:
        """Return bool [rows, keys] of ``block``: True where the row may see the key."""
        rows = slice(block.row_start, block.row_stop)
        keys = slice(block.key_start, block.key_stop)
        documents = self.local_document_ids[rows, None]
        same = documents == self.global_document_ids[None, keys]
        past = self.local_positions[rows, None] >= self.global_positions[None, keys]
        return same & past & (documents >= 0)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, scale: float | None = None
) -> Tensor:
    """Attend from local queries to the chunk's keys under ``mask``.

    Args:
        q: [L, H, D].
        k: [T, Hkv, D] in chunk order, Hkv divides H.
        v: [T, Hkv, Dv] in chunk order.
        mask: who may see whom.
        scale: factor on the scores; None is 1/sqrt(D).

    Returns:
        [L, H, Dv]. Rows that see nothing are zero and give no gradient. Differentiable once.
    """
    out: Tensor = _BlockAttention.apply(q, k, v, mask, scale)  # type: ignore[no-untyped-call]
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.mask, ctx.scale = mask, scale
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        for rows, keys, visible in _each_block(mask):
            out[rows] = _attend(q[rows], k[keys], v[keys], visible, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grad_q = torch.zeros_like(q)
        # A key collects from many blocks: bfloat16 sums would lose the small ones.
        grad_k = torch.zeros_like(k, dtype=torch.promote_types(k.dtype, torch.float32))
        grad_v = torch.zeros_like(v, dtype=torch.promote_types(v.dtype, torch.float32))
        for rows, keys, visible in _each_block(ctx.mask):
            with torch.enable_grad():
                parts = [x.detach().requires_grad_() for x in (q[rows], k[keys], v[keys])]
                out = _attend(parts[0], parts[1], parts[2], visible, ctx.scale)
            grads = torch.autograd.grad(out, parts, grad_out[rows])
            grad_q[rows] = grads[0]
            grad_k[keys] += grads[1]
            grad_v[keys] += grads[2]
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _each_block(mask: AttentionMask) -> Iterator[tuple[slice, slice, Tensor]]:
    for block in mask.blocks:
        rows = slice(block.row_start, block.row_stop)
        yield rows, slice(block.key_start, block.key_stop), mask.visible(block)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """Return [rows, H, Dv] for q [rows, H, D], k and v [keys, Hkv, ...], visible [rows, keys]."""
    sees_any = visible.any(dim=1)
    # Softmax over no key is 0/0 in some backends, and its gradient NaN, so padding sees the
    # whole block and is zeroed afterwards.
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=visible | ~sees_any[:, None],
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1).masked_fill(~sees_any[:, None, None], 0.0)
