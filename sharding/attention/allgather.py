"""Context-parallel attention that gathers all keys and values: any layout, any index map.

In:   a chunk's offsets and index maps (``sharding/layouts.py``); a rank's q, k, v [L, ...]
Out:  the rank's attention output [L, H, Dv], equal to attention over whole documents

    context = allgather_context(cu_seqlens, cu_seqlens_padded, index_maps, cp_rank)  # per chunk
    out = allgather_attention(q, k, v, context=context, group=cp_group)              # per layer

Ring attention moves keys around while it computes and wants a matching layout. This gathers
them first (``gather.py``), sorts them into chunk order, and attends under a mask made from
lengths (``block_attention.py``): simpler, right for every layout, more memory.

Shapes: T slots in the chunk, L local tokens, N slots' count, R cp ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ringfeed.sharding.attention.block_attention import KeyRanges, block_attention
from ringfeed.sharding.attention.gather import gather_rows
from ringfeed.sharding.index_map import IndexMap, expand_runs
from ringfeed.sharding.offsets import as_offsets, as_real_offsets

__all__ = ["AllGatherContext", "allgather_attention", "allgather_context"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllGatherContext:
    """What one rank's attention needs to know of a chunk. Made once, used by every layer."""

    local_document_ids: Tensor
    """int32 [L], slot of the chunk that each local token is in, -1 for padding."""
    local_positions: Tensor
    """int32 [L], offset of each local token in its slot, 0 for padding."""
    global_document_ids: Tensor
    """int32 [T], as ``local_document_ids``, for the chunk in chunk order."""
    global_positions: Tensor
    """int32 [T], as ``local_positions``, for the chunk in chunk order."""
    key_ranges: KeyRanges
    """The same mask, same document and not later, as one range of keys for each local token."""
    key_order: Tensor | None
    """int64 [T], the gathered row of each chunk token; None if they are in chunk order."""
    num_parts: int
    """R; 1 where the rank holds the whole chunk and nothing is gathered."""
    part_length: int
    """Rows of the longest part."""
    cp_rank: int

    def to(self, device: torch.device | str) -> "AllGatherContext":
        """Return the same context with its tensors on ``device``."""
        names = ("local_document_ids", "local_positions", "global_document_ids", "global_positions")
        moved = {name: getattr(self, name).to(device) for name in (*names, "key_ranges")}
        order = None if self.key_order is None else self.key_order.to(device)
        return replace(self, **moved, key_order=order)


def allgather_context(
    cu_seqlens: ArrayLike | Tensor,
    cu_seqlens_padded: ArrayLike | Tensor,
    index_maps: Sequence[IndexMap],
    cp_rank: int,
) -> AllGatherContext:
    """Describe a chunk to ``allgather_attention``. Arithmetic on lengths, on the CPU.

    Args:
        cu_seqlens: real offsets, int [N + 1].
        cu_seqlens_padded: slot offsets, int [N + 1].
        index_maps: one per cp rank. They tile the chunk, or each holds all of it.
        cp_rank: which of them is this rank's.

    Raises:
        ValueError: if offsets and index maps do not belong together, or the maps do not tile.
    """
    slots = as_offsets(cu_seqlens_padded, name="cu_seqlens_padded")
    lengths = np.diff(as_real_offsets(cu_seqlens, slots))
    if not 0 <= cp_rank < len(index_maps):
        raise ValueError(f"cp_rank={cp_rank} is not in 0 to {len(index_maps) - 1}")
    num_tokens = index_maps[cp_rank].num_tokens
    if any(index_map.num_tokens != num_tokens for index_map in index_maps):
        raise ValueError(f"index maps cover different chunks: {[m.num_tokens for m in index_maps]} tokens")
    documents, positions, starts = _describe(lengths, slots, num_tokens)
    local = expand_runs(index_maps[cp_rank].runs)
    # A rank that holds every token (cp 1, layout identity) has the keys already.
    parts = [local] if len(local) == num_tokens else [expand_runs(m.runs) for m in index_maps]
    part_length = max(len(part) for part in parts)
    return AllGatherContext(
        local_document_ids=torch.from_numpy(documents[local]),
        local_positions=torch.from_numpy(positions[local]),
        global_document_ids=torch.from_numpy(documents),
        global_positions=torch.from_numpy(positions),
        # From the document's first token to the token itself. Pads of a slot come last, so none is in.
        key_ranges=KeyRanges.plan(
            starts[local], np.where(documents[local] < 0, 0, local + 1), num_keys=num_tokens
        ),
        key_order=_key_order(parts, num_tokens, part_length),
        num_parts=len(parts),
        part_length=part_length,
        cp_rank=cp_rank,
    )


def _describe(
    lengths: NDArray[np.int64], slots: NDArray[np.int64], num_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Return document ids [T], positions [T] and the chunk position of each one's slot [T]."""
    if slots[-1] > num_tokens:
        raise ValueError(
            f"cu_seqlens_padded ends at {slots[-1]}, but the index maps cover {num_tokens} tokens"
        )
    widths = np.diff(slots)
    ids = np.repeat(np.arange(len(widths)), widths)
    starts = np.repeat(slots[:-1], widths)
    offsets = np.arange(len(ids)) - starts
    is_pad = offsets >= lengths[ids]
    # Magi's maps may cover more than the slots: padding, too.
    beyond = (0, num_tokens - len(ids))
    documents = np.pad(np.where(is_pad, -1, ids), beyond, constant_values=-1).astype(np.int32)
    positions = np.pad(np.where(is_pad, 0, offsets), beyond).astype(np.int32)
    return documents, positions, np.pad(starts, beyond)


def _key_order(parts: Sequence[NDArray[np.int64]], num_tokens: int, part_length: int) -> Tensor | None:
    """Return int64 [T]: the row of each chunk token in the gathered parts; None if row i is token i."""
    held = np.concatenate(parts)
    holders = np.bincount(held, minlength=num_tokens)
    if (holders != 1).any():
        token = int(np.argmax(holders != 1))
        raise ValueError(
            f"index maps do not tile the {num_tokens}-token chunk: "
            f"token {token} is held {holders[token]} times"
        )
    rows = [part_length * rank + np.arange(len(part)) for rank, part in enumerate(parts)]
    order = np.empty(num_tokens, dtype=np.int64)
    order[held] = np.concatenate(rows)
    if len(parts) * part_length == num_tokens and (order == np.arange(num_tokens)).all():
        return None
    return torch.from_numpy(order)


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    context: AllGatherContext,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend causally within each document, over the keys of all ranks of ``group``.

    Args:
        q: [L, H, D].
        k: [L, Hkv, D], Hkv divides H.
        v: [L, Hkv, Dv].
        context: from ``allgather_context``, on the device of ``q``.
        group: the cp ranks in cp order; not needed where nothing is gathered.
        scale: factor on the scores; None is 1/sqrt(D).

    Returns:
        [L, H, Dv]. Padding rows are zero and give no gradient. Differentiable once.

    Raises:
        ValueError: if shapes, context and group do not belong together.
    """
    _check_shapes(q, k, v, len(context.local_positions))
    if context.num_parts > 1:
        k, v = _gather_keys(k, v, context, _checked(group, context))
    elif context.key_order is not None:
        k, v = k.index_select(0, context.key_order), v.index_select(0, context.key_order)
    return block_attention(q, k, v, key_ranges=context.key_ranges, scale=scale)


def _gather_keys(
    k: Tensor, v: Tensor, context: AllGatherContext, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return k and v of the whole chunk, in chunk order."""
    # One collective for both: small messages are bound by latency.
    both = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    gathered = gather_rows(both, part_length=context.part_length, group=group)
    if context.key_order is not None:
        gathered = gathered.index_select(0, context.key_order)
    keys, values = torch.split(gathered, [k[0].numel(), v[0].numel()], dim=1)
    return keys.reshape(-1, *k.shape[1:]), values.reshape(-1, *v.shape[1:])


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, num_local: int) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"q, k and v are [tokens, heads, width], got {shapes}")
    if not len(q) == len(k) == len(v) == num_local:
        raise ValueError(f"the context describes {num_local} local tokens, got {shapes}")
    if q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"heads of k and v divide those of q, q and k have one width: {shapes}")


def _checked(group: dist.ProcessGroup | None, context: AllGatherContext) -> dist.ProcessGroup:
    if group is None:
        raise ValueError(
            f"the chunk is cut into {context.num_parts} parts: pass group=, the cp process group"
        )
    if group.size() != context.num_parts or group.rank() != context.cp_rank:
        raise ValueError(
            f"the context is for cp rank {context.cp_rank} of {context.num_parts}, "
            f"this process is rank {group.rank()} of {group.size()} in the group"
        )
    return group
