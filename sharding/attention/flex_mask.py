"""A chunk's mask as FlexAttention wants it, from L local queries to T keys in chunk order.

In:   an ``AllGatherContext`` (``chunk_context.py``)
Out:  a ``mask_mod``, or the whole ``BlockMask``

Any layout and index map will do, because a local query brings its own range of keys. The mask never
exists token by token: which blocks are seen follows from the ranges (``block_counts.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.attention.flex_attention import BlockMask

from ringfeed.sharding.attention.block_counts import list_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ringfeed.sharding.attention.chunk_context import AllGatherContext

    MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """(batch, head, q_idx, kv_idx) -> bool, as FlexAttention calls it."""

__all__ = ["document_mask_mod", "local_block_mask"]

_BLOCK = 128
"""Torch's own block size."""


def document_mask_mod(context: AllGatherContext) -> MaskMod:
    """Return the mask: a token sees its own document under the context's window; padding neither sees nor is.

    Args:
        context: on the device where the mask is used.
    """
    starts, stops = (torch.from_numpy(end).to(context.device, torch.int32) for end in context.key_ranges())

    def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (kv_idx >= starts[q_idx]) & (kv_idx < stops[q_idx])

    return mask_mod


def local_block_mask(context: AllGatherContext) -> BlockMask:
    """Return the mask of this rank's queries over the chunk's keys, for ``flex_attention``.

    Equal to ``create_block_mask(document_mask_mod(context), None, None, L, T)``, which makes all L * T pairs.

    Args:
        context: on the device where attention runs (``Batch.kwargs("flex")["context"]``), with its window.

    Returns:
        A mask of [1, 1, L, T] in blocks of 128. Memory O(L * T / 128**2), no matter what it shows.
    """
    starts, stops = context.key_ranges()
    tables = list_blocks(starts, stops, context.num_tokens, _BLOCK)
    num_part, part_ids, num_full, full_ids = (
        torch.from_numpy(table)[None, None].to(context.device) for table in tables
    )
    return BlockMask.from_kv_blocks(
        num_part,
        part_ids,
        num_full,
        full_ids,
        BLOCK_SIZE=_BLOCK,
        mask_mod=document_mask_mod(context),
        seq_lengths=(len(starts), context.num_tokens),
    )
