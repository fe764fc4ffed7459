"""Torch's FlexAttention under context parallelism, with a mask made from document offsets.

In:   offsets of a chunk, the index maps of layout head_tail, contiguous or ptrr, a cp mesh
Out:  this rank's ``BlockMask``, and attention of its queries over the gathered keys

    mask = document_block_mask(cu_seqlens, cu_seqlens_padded, device=device)       # per chunk
    balancer = load_balancer(layout.name, index_maps, device=device)
    local = shard_block_mask(cp_mesh, block_mask=mask, load_balancer=balancer)
    out = flex_cp_attention(q, k, v, block_mask=local, cp_mesh=cp_mesh)            # per layer

The mask never exists token by token: whole blocks follow from the offsets, and torch computes a rank's
blocks in a compiled loop. Keys stay in the ranks' order; the mask knows where each one stands.

Shapes: T slots in the chunk, L = T/R local tokens, N slots' count, M = T/128 blocks, R cp ranks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _LoadBalancer
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ringfeed.sharding.attention.dispatcher import kept_options
from ringfeed.sharding.index_map import IndexMap, expand_runs
from ringfeed.sharding.offsets import as_offsets, as_real_offsets
from ringfeed.sharding.ptrr import block_times

__all__ = [
    "IndexMapBalancer",
    "document_block_mask",
    "flex_cp_attention",
    "load_balancer",
    "shard_block_mask",
]

BLOCK = 128
"""Torch's block size, fixed in its context-parallel mask."""
LAYOUTS = ("head_tail", "contiguous", "ptrr")
_SEQ_DIM = 2


class IndexMapBalancer(_LoadBalancer):
    """Tells torch the order in which the ranks hold the chunk."""

    def __init__(self, index_maps: Sequence[IndexMap], device: torch.device | str) -> None:
        positions = np.concatenate([expand_runs(index_map.runs) for index_map in index_maps])
        self._positions = torch.from_numpy(positions)[None].to(device)

    def _generate_indices(self, restore: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        return self._positions.argsort(1) if restore else self._positions


def document_block_mask(
    cu_seqlens: ArrayLike | Tensor, cu_seqlens_padded: ArrayLike | Tensor, *, device: torch.device | str
) -> BlockMask:
    """Return the chunk's mask: a token sees its slot up to itself; a slot without real tokens sees nothing.

    Pads come last in their slot, so no real token sees one. This is the mask that layout ``ptrr`` balances.

    Args:
        cu_seqlens: real offsets, 1-D integers [N + 1].
        cu_seqlens_padded: slot offsets, 1-D integers [N + 1]; T is a multiple of 128.
        device: where attention runs.

    Returns:
        A mask of [1, 1, T, T] in blocks of 128. Memory O(M * M), no matter how long the documents are.

    Raises:
        ValueError: if the offsets are none, or T is no multiple of 128.
    """
    slots = as_offsets(cu_seqlens_padded)
    real = as_real_offsets(cu_seqlens, slots)
    num_tokens = int(slots[-1])
    if num_tokens % BLOCK or not num_tokens:
        raise ValueError(f"the chunk has {num_tokens} tokens; FlexAttention CP needs a multiple of {BLOCK}")
    # The first key that each token sees; beyond the end where it sees none.
    first_keys = np.repeat(np.where(np.diff(real) > 0, slots[:-1], num_tokens), np.diff(slots))
    starts = torch.from_numpy(first_keys.astype(np.int32)).to(device)

    def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (kv_idx <= q_idx) & (kv_idx >= starts[q_idx])

    # Of a row of blocks, those from the first one with a key up to the diagonal are seen. The ones that
    # begin after the last document's start and end before the diagonal are seen by all its tokens.
    rows = np.arange(num_tokens // BLOCK)
    seen = block_times(slots, real, BLOCK)
    whole_from = -(-first_keys.reshape(-1, BLOCK).max(1) // BLOCK)
    num_whole = np.maximum(rows - whole_from, 0)
    num_before = seen - num_whole - (seen > 0)
    columns = rows[None]
    part = np.where(columns < num_before[:, None], (rows - seen + 1)[:, None] + columns, rows[:, None])
    whole = np.minimum(whole_from[:, None] + columns, rows[-1])
    num_part, part_ids, num_full, whole_ids = (
        torch.from_numpy(x.astype(np.int32))[None, None].to(device)
        for x in (seen - num_whole, part, num_whole, whole)
    )
    return BlockMask.from_kv_blocks(
        num_part,
        part_ids,
        num_full,
        whole_ids,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(num_tokens, num_tokens),
    )


def load_balancer(
    layout: str, index_maps: Sequence[IndexMap], *, device: torch.device | str
) -> IndexMapBalancer | None:
    """Return what makes torch cut as ``index_maps`` do; None for torch's own plain order.

    Args:
        layout: name of the layout that made the maps.
        index_maps: one per cp rank.
        device: that of the mask.

    Raises:
        ValueError: if FlexAttention CP does not go with the layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout {layout!r} does not fit torch's FlexAttention CP, which takes {', '.join(LAYOUTS)}; "
            "backend 'allgather' takes any layout"
        )
    return None if layout == "contiguous" else IndexMapBalancer(index_maps, device)


def shard_block_mask(
    cp_mesh: Any, *, block_mask: BlockMask, load_balancer: IndexMapBalancer | None
) -> BlockMask:
    """Return the rows of ``block_mask`` that this rank holds: [1, 1, T, T] -> [1, 1, L, T].

    Torch's process-wide context-parallel options are left as they were, which torch's own function does
    not do.

    Args:
        cp_mesh: one-dimensional mesh of R ranks, on the device of the mask.
        block_mask: from ``document_block_mask``.
        load_balancer: from ``load_balancer``.

    Raises:
        ValueError: if L is no multiple of 128.
    """
    num_tokens, multiple = block_mask.seq_lengths[0], BLOCK * cp_mesh.size()
    if num_tokens % multiple:
        raise ValueError(
            f"the chunk has {num_tokens} tokens; FlexAttention CP over {cp_mesh.size()} ranks needs a "
            f"multiple of {multiple}"
        )
    with kept_options():
        (local,) = _context_parallel_shard(cp_mesh, [block_mask], [_SEQ_DIM], load_balancer)
    if not isinstance(local, BlockMask):
        raise TypeError(f"torch made a {type(local).__name__} of a BlockMask")
    return local


def flex_cp_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, cp_mesh: Any, scale: float | None = None
) -> Tensor:
    """Attend from this rank's queries over the keys of all ranks. To be compiled, as FlexAttention is.

    Args:
        q: [B, H, L, D].
        k: [B, Hkv, L, D], Hkv divides H.
        v: [B, Hkv, L, Dv].
        block_mask: from ``shard_block_mask``.
        cp_mesh: the mesh that it was made with.
        scale: factor on the scores; None is 1/sqrt(D).

    Returns:
        [B, H, L, Dv]; zero for tokens that see nothing. Differentiable where FlexAttention is: not on CPU.

    Raises:
        ValueError: if the mask was not made for L queries and the keys of all ranks.
    """
    expected = (q.shape[_SEQ_DIM], k.shape[_SEQ_DIM] * cp_mesh.size())
    if tuple(block_mask.seq_lengths) != expected:
        raise ValueError(
            f"block_mask is for {tuple(block_mask.seq_lengths)} queries and keys, but q, k and the mesh have "
            f"{expected}; make it with shard_block_mask"
        )
    if cp_mesh.size() > 1:
        k, v = flex_cp_allgather(k, v, _SEQ_DIM, cp_mesh.get_group().group_name)
    out = flex_attention(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if not isinstance(out, Tensor):
        raise TypeError(f"flex_attention returned a {type(out).__name__}")
    return out
