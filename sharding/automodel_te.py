"""THD streams cut to what one context-parallel rank holds, as TransformerEngine partitions them.

In:   a BSHD batch, or the stream that ``automodel_thd.py`` made of it; a mesh that knows size and rank
Out:  the rank's tokens with the slot offsets of the whole stream, ready for TE's THD attention

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``). The partition
is ``layouts.TeLayout``: no CUDA, no TransformerEngine and no process group is needed.

Shapes: T tokens in a stream, L local tokens, N slots, R cp ranks, C chunks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringfeed.sharding.automodel_indices import mesh_rank, shard_token_tensor_by_indices, te_index_map
from ringfeed.sharding.automodel_thd import (
    STREAM_FIELDS,
    chunk_streams,
    position_dim,
    split_batch_into_thd_chunks,
    stack_chunks,
    thd_padding_mask_from_token_ids,
    token_aligned_extras,
)
from ringfeed.sharding.offsets import as_integers, as_offsets
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["MissingBoundariesError", "make_cp_batch_for_te"]

_OFFSET_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")


class MissingBoundariesError(ValueError, TypeError):
    """A stream has no slot boundaries. A TypeError too, which is what the original raises."""


def make_cp_batch_for_te(
    cp_mesh: Any,
    batch: dict[str, Any],
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
    return_local_indices: bool = False,
) -> Any:
    """Return the THD batch of this rank. The caller's batch is not changed.

    At R = 1 (or without a mesh) it is the whole stream, as ``split_batch_into_thd_chunks`` gives it. At
    R > 1 ids, labels, positions, mask and every token-aligned extra are this rank's [L] tokens, integers as
    int64; ``cu_seqlens`` are the slot boundaries of the whole stream, ``max_seqlen`` its widest slot, and
    ``qkv_format``, ``cp_size`` and ``cp_rank`` are added; ``cu_seqlens_padded`` and ``attention_mask`` go.

    Differs from the original: token-aligned extras are cut like the ids, chunked batches keep extra
    entries and all rows, embeddings keep their dtype, 3-D positions are cut on their token axis, padding
    behind the last slot belongs to it, and the rank comes from the mesh. Slots that are no multiple of
    2R, where the original's ranks overlap, are refused.

    Args:
        cp_mesh: None, or something with ``size`` and ``get_local_rank``.
        batch: as for ``process_input_for_thd``.
        qkv_format: "thd".
        padding_token_id: consulted only without ``seq_lens``.
        num_chunks: C; 1 and below make one stream.
        seq_lens_padding_value: stands for no sequence in the length tables, and fills up offsets.
        return_local_indices: return ``(batch, indices)``: this rank's positions, int32 [L]; int64 at
            R = 1, where, as in the original, they count the last axis of ``input_ids`` (T, but H for
            embeddings: ``ContextParallelSharder`` does not use them); None for C > 1, as chunks
            have no common positions.

    Raises:
        ValueError: if the format is another one, or shapes, lengths and slots do not fit together.
        KeyError: if ids, labels, positions, ``seq_lens`` or ``seq_lens_padded`` are missing.
        ChunkCountError: if C does not divide the rows. Also a RuntimeError.
        MissingBoundariesError: if R > 1 and ``seq_lens`` is None. Also a TypeError.
        RuntimeError: if a stream's length is no multiple of 2R.
    """
    if qkv_format != "thd":
        raise ValueError(f"qkv_format must be 'thd', got {qkv_format!r}")
    if cp_mesh is None or cp_mesh.size() <= 1:
        whole = split_batch_into_thd_chunks(batch, num_chunks, seq_lens_padding_value, padding_token_id)
        if not return_local_indices:
            return whole
        ids = whole["input_ids"]
        return whole, torch.arange(ids.shape[-1], device=ids.device) if num_chunks <= 1 else None
    settings = (cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id)
    streams = chunk_streams(batch, max(num_chunks, 1), seq_lens_padding_value, padding_token_id)
    extras = token_aligned_extras(batch)
    parts = [_cut_stream(stream, extras, *settings) for stream in streams]
    if num_chunks > 1:
        local = stack_chunks([part for part, _ in parts], extras, seq_lens_padding_value)
        return (local, None) if return_local_indices else local
    return parts[0] if return_local_indices else parts[0][0]


def _shard_thd_chunk_for_te(
    batch: dict[str, Any],
    cp_mesh: Any,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> tuple[dict[str, Any], Tensor]:
    """Return this rank's part of one stream, and its positions, int32 [L].

    Differs from the original: ``batch`` is not changed; a mask that has to be told from token values is
    told from the whole stream, where padding is a tail, not from a part of it; a fill value that is also
    a boundary takes no boundary away.

    Args:
        batch: ``input_ids`` [T] or [T, H], ``labels`` [T], ``position_ids`` [T] or [n_rope, 1, T] or None,
            ``cu_seqlens``, optional ``cu_seqlens_padded`` [N + 1] (may be filled up on the right);
            optional ``padding_mask`` [T]. Any other tensor with T rows is cut like the ids.
        cp_mesh: something with ``size`` and ``get_local_rank``.
        qkv_format: put into the result.
        seq_lens_padding_value: the fill.
        padding_token_id: consulted only without ``padding_mask``.

    Raises:
        KeyError: if ids, labels, positions or ``cu_seqlens`` are missing.
        MissingBoundariesError: if ``cu_seqlens`` is None. Also a TypeError.
        RuntimeError: if T is no multiple of 2R.
        ValueError: if a slot is no multiple of 2R, or boundaries end behind T.
    """
    num_tokens = len(batch["input_ids"])
    named = {*STREAM_FIELDS, *_OFFSET_FIELDS, "seq_lens", "seq_lens_padded"}
    extras = [
        name
        for name, value in batch.items()
        if name not in named and isinstance(value, Tensor) and value.ndim and len(value) == num_tokens
    ]
    return _cut_stream(batch, extras, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id)


def _cut_stream(
    stream: Mapping[str, Any],
    extras: list[str],
    cp_mesh: Any,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> tuple[dict[str, Any], Tensor]:
    boundaries = stream["cu_seqlens"]
    if stream.get("cu_seqlens_padded") is not None:
        boundaries = stream["cu_seqlens_padded"]
    if boundaries is None:
        raise MissingBoundariesError(
            "cu_seqlens is None: a stream is cut along its slot boundaries, so the batch needs seq_lens "
            "(and seq_lens_padded where sequences are padded)"
        )
    ids, labels, positions = stream["input_ids"], stream["labels"], stream["position_ids"]
    num_tokens, cp_size, cp_rank = len(ids), cp_mesh.size(), mesh_rank(cp_mesh)
    offsets = _slot_offsets(boundaries, num_tokens, seq_lens_padding_value)
    index_map = te_index_map(offsets, num_tokens, cp_size=cp_size, cp_rank=cp_rank)
    mask = stream.get("padding_mask")
    if mask is None:
        mask = thd_padding_mask_from_token_ids(ids, padding_token_id)
    # Moved to the device once, for all that is cut.
    rows = index_map.positions.to(ids.device)
    local = {
        name: value for name, value in stream.items() if name not in ("attention_mask", "cu_seqlens_padded")
    }
    local |= {name: shard_token_tensor_by_indices(stream[name], rows, 0) for name in extras if name in local}
    local |= {
        "input_ids": _cut(ids, rows),
        "labels": _cut(labels, rows),
        "position_ids": None if positions is None else _cut(positions, rows, position_dim(positions)),
        "padding_mask": shard_token_tensor_by_indices(mask.bool(), rows, 0),
        "cu_seqlens": _with_end(boundaries, offsets),
        "max_seqlen": torch.tensor(int(np.diff(offsets).max()), dtype=torch.int32, device=boundaries.device),
        "qkv_format": qkv_format,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }
    return local, rows.to(boundaries.device, torch.int32)


def _cut(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    part = shard_token_tensor_by_indices(x, rows, dim)
    # Embeddings and soft labels stay what they are.
    return part if part.is_floating_point() else part.to(torch.int64)


def _slot_offsets(boundaries: Tensor, num_tokens: int, fill: int) -> Int64Array:
    """Return the slot offsets [N + 1] of a stream: without the fill, and with T as the last one."""
    values = as_integers(boundaries, name="cu_seqlens_padded")
    is_fill = values == fill
    num_filled = int(np.argmin(is_fill[::-1])) if not is_fill.all() else len(values)
    # A last boundary that happens to be the fill value is a boundary all the same.
    if num_filled and values[-1] != num_tokens:
        values = values[:-num_filled]
    offsets = as_offsets(values, name="cu_seqlens_padded")
    # Padding at the end of the stream belongs to the last slot.
    offsets[-1] = max(offsets[-1], num_tokens)
    return offsets


def _with_end(boundaries: Tensor, offsets: Int64Array) -> Tensor:
    ended = boundaries.to(torch.int32, copy=True)
    ended[len(offsets) - 1] = int(offsets[-1])
    return ended
