"""Gather every rank's rows over the context-parallel group, differentiably.

In:   one rank's rows, and where they go in the chunk (``allgather.py``)
Out:  the chunk's rows, the same on every rank

Each rank uses the gathered rows in its own part of the loss, so the gradient of a row is the
sum over the ranks: a reduce-scatter, the mirror image of the gather.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["gather_rows"]


def gather_rows(x: Tensor, *, part_length: int, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' rows one after the other: [L, ...] -> [R * part_length, ...].

    Args:
        x: this rank's rows, L <= part_length.
        part_length: rows of the longest part; shorter ones are followed by zeros.
        group: the R ranks, in the order of the parts.

    Every rank of the group has to take part in the forward and in the backward pass.
    """
    out: Tensor = _GatherRows.apply(x, part_length, group)  # type: ignore[no-untyped-call]
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part_length: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_rows, ctx.num_parts = group, len(x), group.size()
        if len(x) == part_length:
            padded = x.contiguous()
        else:
            padded = x.new_zeros(part_length, *x.shape[1:])
            padded[: len(x)] = x
        out = x.new_empty(ctx.num_parts * part_length, *x.shape[1:])
        dist.all_gather_single(out, padded, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_out.new_empty(len(grad_out) // ctx.num_parts, *grad_out.shape[1:])
        dist.reduce_scatter_single(grad, grad_out.contiguous(), op=dist.ReduceOp.SUM, group=ctx.group)
        return grad[: ctx.num_rows], None, None
