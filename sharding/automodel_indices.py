"""Which positions a rank holds, and token tensors cut and gathered by them.

In:   a mesh that knows its size and rank; slot boundaries, or a padded length
Out:  positions of this rank as tensors, computed by ``layouts.py``; shards and gathered tensors

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``).

Shapes: T tokens in the stream or padded sequence, L local tokens, R cp ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringfeed.sharding.attention.gather import gather_rows
from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.layouts import ContiguousLayout, HeadTailLayout, IdentityLayout, Layout, TeLayout
from ringfeed.sharding.offsets import as_offsets
from ringfeed.sharding.run_kernels import Int64Array

__all__ = [
    "contiguous_local_indices",
    "gather_token_tensor_by_indices",
    "identity_local_indices",
    "mesh_index_map",
    "mesh_rank",
    "round_robin_local_indices",
    "shard_token_tensor_by_indices",
    "te_index_map",
    "thd_get_partitioned_indices",
]


def contiguous_local_indices(cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of this rank, int64 [L]: the r-th of R equal runs.

    Raises:
        ValueError: if ``padded_seq_len`` is not a multiple of the mesh's size.
    """
    return mesh_index_map(ContiguousLayout(), cp_mesh, padded_seq_len).positions.to(device)


def round_robin_local_indices(
    cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None
) -> Tensor:
    """Return the positions of this rank, int64 [L]: pieces r and 2R - 1 - r of 2R.

    Raises:
        ValueError: if ``padded_seq_len`` is not a multiple of twice the mesh's size.
    """
    return mesh_index_map(HeadTailLayout(), cp_mesh, padded_seq_len).positions.to(device)


def identity_local_indices(cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None) -> Tensor:
    """Return all positions, int64 [T], whatever the mesh."""
    del cp_mesh
    index_map = IdentityLayout().index_map([0, padded_seq_len], cp_size=1, cp_rank=0)
    return index_map.positions.to(device)


def mesh_index_map(layout: Layout, cp_mesh: Any, padded_seq_len: int) -> IndexMap:
    """Return what this rank of ``cp_mesh`` holds of one sequence.

    Raises:
        ValueError: if ``padded_seq_len`` is not a multiple of what ``layout`` needs.
    """
    cp_size = cp_mesh.size()
    multiple = layout.base_multiple(cp_size)
    if padded_seq_len % multiple:
        rule = "cp_size" if multiple == cp_size else "2 * cp_size"
        raise ValueError(f"padded_seq_len must be divisible by {rule}, got {padded_seq_len=} {cp_size=}")
    return layout.index_map([0, padded_seq_len], cp_size=cp_size, cp_rank=mesh_rank(cp_mesh))


def mesh_rank(cp_mesh: Any) -> int:
    """Return this rank's place in ``cp_mesh``.

    The mesh is asked first: it knows its rank without an initialised process group. The original asks
    ``torch.distributed`` first, and in its THD path nothing else.
    """
    if hasattr(cp_mesh, "get_local_rank"):
        return int(cp_mesh.get_local_rank())
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group=cp_mesh.get_group())
    return 0


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Return the rows that ``rank`` holds of a THD stream, as TransformerEngine partitions it.

    Args:
        cu_seqlens: int32 [N + 1], slot (padded) boundaries, each slot a multiple of 2R.
        total_tokens: T, the last boundary.
        world_size: R.
        rank: 0 <= rank < R.

    Returns:
        int32 [T / R] on the device of ``cu_seqlens``.

    Raises:
        RuntimeError: what the extension checks on the host, in its order.
        ValueError: what it does not check and gets wrong: slots that are no multiple of 2R,
            boundaries that do not begin at 0, fall, or end elsewhere than at T.
    """
    if cu_seqlens.dtype != torch.int32:
        raise RuntimeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1:
        raise RuntimeError(f"cu_seqlens must be 1-D, got shape {list(cu_seqlens.shape)}")
    if len(cu_seqlens) < 2:
        raise RuntimeError(f"cu_seqlens needs at least 2 boundaries, got {len(cu_seqlens)}")
    if not 0 <= rank < world_size:
        raise RuntimeError(f"rank={rank} must be at least 0 and below world_size={world_size}")
    # The extension checks world_size > 0 next, which a rank below it implies.
    _check_total_tokens(total_tokens, world_size)
    offsets = as_offsets(cu_seqlens, name="cu_seqlens")
    index_map = te_index_map(offsets, total_tokens, cp_size=world_size, cp_rank=rank)
    return index_map.positions.to(device=cu_seqlens.device, dtype=torch.int32)


def te_index_map(offsets: Int64Array, total_tokens: int, *, cp_size: int, cp_rank: int) -> IndexMap:
    """Return what a rank holds of a THD stream of T tokens whose slots end at ``offsets`` [N + 1].

    Raises:
        RuntimeError: if T is not a positive multiple of 2R, as the extension's host checks have it.
        ValueError: if a slot is no multiple of 2R, or the last one does not end at T.
    """
    _check_total_tokens(total_tokens, cp_size)
    if offsets[-1] != total_tokens:
        raise ValueError(
            f"total_tokens={total_tokens}, but the last slot ({len(offsets) - 2}) ends at {offsets[-1]}: "
            "the ranks' parts would overlap"
        )
    return TeLayout().index_map(offsets, cp_size=cp_size, cp_rank=cp_rank)


def _check_total_tokens(total_tokens: int, cp_size: int) -> None:
    if total_tokens <= 0 or total_tokens % (2 * cp_size):
        raise RuntimeError(
            f"total_tokens={total_tokens} must be positive and a multiple of {2 * cp_size} "
            f"(2 * world_size={cp_size})"
        )


def shard_token_tensor_by_indices(tensor: Tensor, local_indices: Tensor, seq_dim: int = 1) -> Tensor:
    """Return a copy of this rank's rows of ``tensor``: [..., T, ...] -> [..., L, ...].

    Args:
        tensor: one entry per token in ``seq_dim``.
        local_indices: integers [L], this rank's positions; moved to the tensor's device.
        seq_dim: the dimension of the tokens.
    """
    return tensor.index_select(seq_dim, local_indices.to(tensor.device)).contiguous()


def gather_token_tensor_by_indices(
    cp_mesh: Any, tensor: Tensor, local_indices: Tensor, seq_dim: int = 1
) -> Tensor:
    """Return the whole tensor from every rank's part: [..., L, ...] -> [..., T, ...], on every rank.

    Differentiable. The gradient of a part is the **sum** over the ranks of what each one's loss says
    about it. So when every rank computes the same loss from the gathered tensor, divide that loss by R
    (the gradient would be R times too large); when each rank's loss covers other tokens, as a sum of
    losses, nothing needs scaling.

    Differs from the original: R > 1 without an initialised process group is refused, where the original
    hands the local part back as if it were the whole; and positions that do not tile the sequence
    (``_reorder_gathered_token_tensor``).

    Args:
        cp_mesh: its group holds the R ranks; None or a size of 1 returns ``tensor`` itself.
        tensor: this rank's part; L is the same on every rank.
        local_indices: integers [L], this rank's positions.
        seq_dim: the dimension of the tokens.

    Raises:
        ValueError: if there is no process group to gather over, or the parts do not tile the sequence.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        return tensor
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"cp_mesh has {cp_mesh.size()} ranks, but no process group is initialised to gather over; "
            "call torch.distributed.init_process_group first"
        )
    group = cp_mesh.get_group()
    num_local = tensor.shape[seq_dim]
    indices = local_indices.to(tensor.device, torch.int64)
    rows = gather_rows(tensor.movedim(seq_dim, 0), part_length=num_local, group=group)
    all_indices = gather_rows(indices, part_length=len(indices), group=group)
    return _in_order(rows.movedim(0, seq_dim), all_indices, seq_dim)


def _reorder_gathered_token_tensor(
    parts: Sequence[Tensor], index_parts: Sequence[Tensor], seq_dim: int = 1
) -> Tensor:
    """Put the ranks' parts back into sequence order: R tensors [..., L, ...] -> [..., T, ...].

    Differs from the original: positions that are held twice or by nobody are refused. The original
    sorts them, and every later token then stands in a wrong place.

    Args:
        parts: in rank order.
        index_parts: integers [L] each, the positions of the parts, in the same order.
        seq_dim: the dimension of the tokens.

    Raises:
        ValueError: if the positions are not 0 to T - 1, each once.
    """
    whole = torch.cat(list(parts), dim=seq_dim)
    indices = torch.cat([part.reshape(-1).to(whole.device, torch.int64) for part in index_parts])
    return _in_order(whole, indices, seq_dim)


def _in_order(whole: Tensor, indices: Tensor, seq_dim: int) -> Tensor:
    found, order = indices.sort()
    if len(indices) != whole.shape[seq_dim]:
        raise ValueError(f"{len(indices)} positions for {whole.shape[seq_dim]} tokens in dim {seq_dim}")
    wrong = (found != torch.arange(len(found), device=found.device)).nonzero()
    if len(wrong):
        token = int(wrong[0])
        raise ValueError(
            f"the ranks' positions do not tile {len(found)} tokens: after sorting, place {token} has "
            f"position {int(found[token])}"
        )
    return whole.index_select(seq_dim, order).contiguous()
