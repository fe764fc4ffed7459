"""Batches cut by position alone: not at all, or into equal runs, one a rank.

In:   a batch of [B, S] tensors, and a mesh that knows its size and rank
Out:  the rank's batch, padded first to what the ranks can share, and its ``ShardLayout``

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``).

Shapes: B rows, S tokens in a row, T tokens after padding, L local tokens, R cp ranks.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringfeed.sharding.automodel_indices import identity_local_indices, mesh_index_map
from ringfeed.sharding.automodel_sharder import ShardLayout, pad_dim
from ringfeed.sharding.layouts import ContiguousLayout, HeadTailLayout, Layout

__all__ = [
    "check_length",
    "convert_attention_mask_to_padding_mask",
    "primary_field",
    "shard_batch_contiguous",
    "shard_batch_identity",
    "shard_sequence_for_cp_contiguous",
    "shard_sequence_for_cp_round_robin",
    "with_positions",
]

Sharded = tuple[Callable[[], Any], dict[str, Any], ShardLayout]


def shard_batch_identity(
    cp_mesh: Any,
    tp_mesh: Any,
    batch: dict[str, Any],
    *,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
) -> tuple[Callable[[], Any], dict[str, Any], ShardLayout | None]:
    """Return the batch itself: nothing to prepare without context parallelism."""
    del cp_mesh, tp_mesh, loss_mask, padding_token_id
    primary = batch.get("inputs_embeds", batch.get("input_ids"))
    layout = None
    if primary is not None and primary.ndim >= 2:
        layout = ShardLayout(original_seq_len=primary.shape[1], padded_seq_len=primary.shape[1])
    return contextlib.nullcontext, batch, layout


def shard_batch_contiguous(
    cp_mesh: Any,
    tp_mesh: Any,
    batch: dict[str, Any],
    *,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
    pad_multiple: int = 1,
    extra_seq_keys: dict[str, int] | None = None,
    extra_pad_values: dict[str, Any] | None = None,
    shard_primary: bool = True,
) -> Sharded:
    """Return this rank's run of every sequence, for a model that owns its CP attention.

    Differs from the original: the caller's batch is not changed (there it is edited); a tensor whose
    length is not that of the sequence is refused (there it is cut somewhere).

    Args:
        cp_mesh: something with ``size`` and ``get_local_rank``.
        tp_mesh: not used.
        batch: exactly one of ``input_ids`` [B, S] and ``inputs_embeds`` [B, S, H]; ``labels``;
            ``position_ids`` [B, S], [1, S], [n_rope, B, S] or none; an ``attention_mask`` becomes a
            ``padding_mask``.
        loss_mask: [B, S]; taken as the labels where there are none.
        padding_token_id: pads ``input_ids``. Labels are padded with -100, the mask with True, positions
            count on.
        pad_multiple: L is a multiple of it, and of 2.
        extra_seq_keys: further keys to cut, with their sequence dimension.
        extra_pad_values: what pads these; 0 if not told.
        shard_primary: False leaves ids or embeddings whole, for a model that cuts them itself
            (``shard_sequence_for_cp_contiguous``).

    Returns:
        ``nullcontext`` itself, the batch, S and T.

    Raises:
        AssertionError: if not exactly one of ids and embeddings is there.
        KeyError: if there are neither labels nor a loss mask.
        ValueError: if a tensor has another length than the sequence; the field is named.
    """
    del tp_mesh
    batch = dict(batch)
    convert_attention_mask_to_padding_mask(batch)
    primary = primary_field(batch)
    seq_len = batch[primary].shape[1]
    batch["position_ids"], position_dim = with_positions(batch, primary)
    if batch.get("labels") is None:
        if loss_mask is None:
            raise KeyError("labels: context parallelism needs them in the batch, or as loss_mask")
        batch["labels"], loss_mask = loss_mask, None
    if loss_mask is not None:
        batch["loss_mask"] = loss_mask
    fills = {"padding_mask": True, "labels": -100, **({} if loss_mask is None else {"loss_mask": 0})}
    if shard_primary:
        fills |= {"input_ids": padding_token_id, "inputs_embeds": 0}
    dims = dict.fromkeys(fills, 1)
    for name, dim in (extra_seq_keys or {}).items():
        if name not in {*fills, "position_ids", "loss_mask"}:
            dims[name], fills[name] = dim, (extra_pad_values or {}).get(name, 0)
    padded_len = seq_len + -seq_len % _contiguous_multiple(cp_mesh, pad_multiple)
    index_map = mesh_index_map(ContiguousLayout(), cp_mesh, padded_len)
    for name, dim in dims.items():
        if name in batch:
            check_length(name, batch[name], dim, seq_len)
            batch[name] = index_map.take(pad_dim(batch[name], dim, padded_len - seq_len, fills[name]), dim)
    check_length("position_ids", batch["position_ids"], position_dim, seq_len)
    positions = _count_on(batch["position_ids"], position_dim, padded_len - seq_len)
    batch["position_ids"] = index_map.take(positions, position_dim)
    layout = ShardLayout(original_seq_len=seq_len, padded_seq_len=padded_len)
    return contextlib.nullcontext, batch, layout


def shard_sequence_for_cp_round_robin(
    cp_mesh: Any, tensor: Tensor, *, seq_dim: int = 1, pad_value: float = 0
) -> tuple[Tensor, Tensor, int]:
    """Return pieces r and 2R - 1 - r of 2R of a sequence padded to a multiple of 2R, differentiably.

    For a model that cuts its embeddings itself (``shard_batch_aux_only`` cuts the rest).

    Args:
        cp_mesh: None, or something with ``size`` and ``get_local_rank``; R = 1 changes nothing.
        tensor: [.., S, ..].
        seq_dim: the dimension of the tokens.
        pad_value: fills the padding.

    Returns:
        The part [.., L, ..], its positions int64 [L], and T.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        return _whole_sequence(tensor, seq_dim)
    return _cut_sequence(HeadTailLayout(), cp_mesh, tensor, seq_dim, pad_value, 2 * cp_mesh.size())


def shard_sequence_for_cp_contiguous(
    cp_mesh: Any, tensor: Tensor, *, seq_dim: int = 1, pad_value: float = 0, pad_multiple: int = 1
) -> tuple[Tensor, Tensor, int]:
    """Return the r-th of R runs of a sequence padded as ``shard_batch_contiguous`` pads, differentiably.

    Args and result as ``shard_sequence_for_cp_round_robin``; L is a multiple of ``pad_multiple`` and of 2.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        return _whole_sequence(tensor, seq_dim)
    multiple = _contiguous_multiple(cp_mesh, pad_multiple)
    return _cut_sequence(ContiguousLayout(), cp_mesh, tensor, seq_dim, pad_value, multiple)


def convert_attention_mask_to_padding_mask(batch: dict[str, Any]) -> None:
    """Replace ``attention_mask`` in ``batch`` by ``padding_mask`` (True = padding).

    The one function here that edits what it is given, since that is all it does. A ``padding_mask``
    that is there stays. Of a 4-D mask the diagonal counts: bool masks say who may attend,
    others are added to the scores.
    """
    mask = batch.pop("attention_mask", None)
    if mask is None or "padding_mask" in batch:
        return
    if mask.ndim != 4:
        batch["padding_mask"] = ~mask.bool()
        return
    own = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    batch["padding_mask"] = ~own if mask.dtype == torch.bool else own != 0


def primary_field(batch: dict[str, Any]) -> str:
    """Return which one of ``inputs_embeds`` and ``input_ids`` the batch has.

    Raises:
        AssertionError: if it has both or neither.
    """
    found = [name for name in ("inputs_embeds", "input_ids") if name in batch]
    if len(found) != 1:
        raise AssertionError(f"need exactly one of inputs_embeds and input_ids in the batch, got {found}")
    return found[0]


def with_positions(batch: dict[str, Any], primary: str) -> tuple[Tensor, int]:
    """Return the positions of every row, counted from 0 where there are none, and their token dimension."""
    num_rows, seq_len = batch[primary].shape[:2]
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(seq_len, device=batch[primary].device).unsqueeze(0)
    if positions.ndim == 2 and len(positions) == 1 and num_rows > 1:
        positions = positions.expand(num_rows, -1).contiguous()
    return positions, 2 if positions.ndim == 3 else 1


def check_length(name: str, tensor: Tensor, dim: int, seq_len: int) -> None:
    """Refuse a tensor that does not have the sequence's length.

    Raises:
        ValueError: field, value and rule.
    """
    if tensor.shape[dim] != seq_len:
        raise ValueError(
            f"{name} has {tensor.shape[dim]} entries in dim {dim}, but the sequence has {seq_len} tokens"
        )


def _contiguous_multiple(cp_mesh: Any, pad_multiple: int) -> int:
    return int(cp_mesh.size()) * max(int(pad_multiple or 1), 2)


def _whole_sequence(tensor: Tensor, seq_dim: int) -> tuple[Tensor, Tensor, int]:
    seq_len = tensor.shape[seq_dim]
    return tensor, identity_local_indices(None, seq_len, tensor.device), seq_len


def _cut_sequence(
    layout: Layout, cp_mesh: Any, tensor: Tensor, seq_dim: int, pad_value: float, multiple: int
) -> tuple[Tensor, Tensor, int]:
    seq_len = tensor.shape[seq_dim]
    padded_len = seq_len + -seq_len % multiple
    index_map = mesh_index_map(layout, cp_mesh, padded_len)
    local = index_map.take(pad_dim(tensor, seq_dim, padded_len - seq_len, pad_value), seq_dim)
    return local, index_map.positions.to(tensor.device), padded_len


def _count_on(positions: Tensor, dim: int, length: int) -> Tensor:
    """Return positions with ``length`` further ones, counted on from the last of each row."""
    if length <= 0:
        return positions
    steps = torch.arange(1, length + 1, device=positions.device, dtype=positions.dtype)
    last = positions.narrow(dim, positions.shape[dim] - 1, 1)
    return torch.cat([positions, last + steps], dim=dim)
