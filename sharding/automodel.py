"""Names of nemo-automodel 0.7.0's context parallelism, as a thin shell over ringfeed's types.

In:   what those functions take: tensors, and a mesh that knows its size and rank
Out:  what those functions return for well-formed input, computed by ``layouts.py``

Signatures and error types are the original's. Where the original answers ill-formed input
with a wrong partition and no word, this module raises ValueError.
"""

from typing import Any

import torch
from torch import Tensor

from ringfeed.sharding.layouts import ContiguousLayout, HeadTailLayout, IdentityLayout, Layout, TeLayout
from ringfeed.sharding.offsets import as_offsets

__all__ = [
    "contiguous_local_indices",
    "identity_local_indices",
    "round_robin_local_indices",
    "thd_get_partitioned_indices",
    "thd_padding_mask_from_token_ids",
]


def contiguous_local_indices(cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of this rank, int64 [L]: the r-th of R equal runs.

    Raises:
        ValueError: if ``padded_seq_len`` is not a multiple of the mesh's size.
    """
    return _mesh_positions(ContiguousLayout(), "cp_size", cp_mesh, padded_seq_len, device)


def round_robin_local_indices(
    cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None
) -> Tensor:
    """Return the positions of this rank, int64 [L]: pieces r and 2R - 1 - r of 2R.

    Raises:
        ValueError: if ``padded_seq_len`` is not a multiple of twice the mesh's size.
    """
    return _mesh_positions(HeadTailLayout(), "2 * cp_size", cp_mesh, padded_seq_len, device)


def identity_local_indices(cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None) -> Tensor:
    """Return all positions, int64 [T], whatever the mesh."""
    del cp_mesh
    index_map = IdentityLayout().index_map([0, padded_seq_len], cp_size=1, cp_rank=0)
    return index_map.positions.to(device)


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
    _partition_host_checks(cu_seqlens, total_tokens, world_size, rank)
    offsets = as_offsets(cu_seqlens, name="cu_seqlens")
    if offsets[-1] != total_tokens:
        raise ValueError(
            f"total_tokens={total_tokens}, but the last slot ({len(offsets) - 2}) ends at {offsets[-1]}: "
            "the ranks' parts would overlap"
        )
    index_map = TeLayout().index_map(offsets, cp_size=world_size, cp_rank=rank)
    return index_map.positions.to(device=cu_seqlens.device, dtype=torch.int32)


def thd_padding_mask_from_token_ids(input_ids: Tensor, padding_token_id: int) -> Tensor:
    """Return which tokens are padding, bool [T], told from their values.

    The one function of ringfeed that looks at token values to find padding, because its
    callers have nothing else (everything else carries lengths). So it only accepts input
    that leaves no doubt: the pad id fills the end of the stream and stands nowhere else.

    Args:
        input_ids: integers [T].
        padding_token_id: the filler.

    Raises:
        ValueError: if the pad id also occurs before the padding, as content.
    """
    padding = input_ids == padding_token_id
    returns_to_content = padding[:-1] & ~padding[1:]
    if input_ids.ndim != 1 or bool(returns_to_content.any()):
        raise ValueError(
            f"padding_token_id={padding_token_id} also occurs as content of input_ids "
            f"{list(input_ids.shape)}, so padding cannot be told from values; carry lengths "
            "(seq_lens and seq_lens_padded), or use a pad id that no document contains"
        )
    return padding


def _partition_host_checks(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise RuntimeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1:
        raise RuntimeError(f"cu_seqlens must be 1-D, got shape {list(cu_seqlens.shape)}")
    if len(cu_seqlens) < 2:
        raise RuntimeError(f"cu_seqlens needs at least 2 boundaries, got {len(cu_seqlens)}")
    if not 0 <= rank < world_size:
        raise RuntimeError(f"rank={rank} must be at least 0 and below world_size={world_size}")
    # The extension checks world_size > 0 next, which a rank below it implies.
    if total_tokens <= 0 or total_tokens % (2 * world_size):
        raise RuntimeError(
            f"total_tokens={total_tokens} must be positive and a multiple of {2 * world_size} "
            f"(2 * world_size={world_size})"
        )


def _mesh_positions(
    layout: Layout, multiple_name: str, cp_mesh: Any, padded_seq_len: int, device: torch.device | None
) -> Tensor:
    cp_size = cp_mesh.size()
    if padded_seq_len % layout.base_multiple(cp_size):
        raise ValueError(
            f"padded_seq_len must be divisible by {multiple_name}, got {padded_seq_len=} {cp_size=}"
        )
    index_map = layout.index_map([0, padded_seq_len], cp_size=cp_size, cp_rank=_mesh_rank(cp_mesh))
    return index_map.positions.to(device)


def _mesh_rank(cp_mesh: Any) -> int:
    # The mesh first: it knows its rank without an initialised process group.
    if hasattr(cp_mesh, "get_local_rank"):
        return int(cp_mesh.get_local_rank())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(group=cp_mesh.get_group())
    return 0
