"""Batches cut for torch's ring attention: head and tail pieces, cut in place when its context is entered.

In:   a batch of [B, S] tensors, and a mesh that knows its size and rank
Out:  the batch padded to a multiple of 2R, and a context factory that cuts it and installs the ring

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``). Torch's
context is touched when the factory's is entered, not before.

Shapes: B rows, S tokens in a row, T tokens after padding, R cp ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringfeed.sharding.attention.torch_cp import (
    create_context_parallel_ctx,
    get_train_context,
    shard_grad_buffer_for_cp,
)
from ringfeed.sharding.automodel_batches import check_length, primary_field, with_positions
from ringfeed.sharding.automodel_sharder import ShardLayout, pad_dim

__all__ = ["shard_batch_aux_only", "shard_batch_load_balanced"]

# What "ignore" means for a field; everything else is padded with 0.
_FILLS: dict[str, float] = {"labels": -100, "padding_mask": True}

Sharded = tuple[Callable[[], Any], dict[str, Any], ShardLayout]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Buffer:
    """A tensor that the context cuts."""

    name: str
    tensor: Tensor
    dim: int
    """The dimension of the tokens."""


def shard_batch_load_balanced(
    cp_mesh: Any,
    tp_mesh: Any,
    batch: dict[str, Any],
    *,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
    extra_seq_buffers: dict[str, int] | None = None,
) -> Sharded:
    """Return the batch padded to T, a multiple of 2R, and the context that cuts it to this rank's part.

    Entering the context cuts the returned batch's tensors in place; after it ends ``position_ids`` are
    whole again, everything else stays the rank's part, and the context may be entered again. A tensor
    that needs a gradient is cut beforehand, out of place.

    Differs from the original: neither the caller's batch nor its tensors are changed (there both are,
    the tensors where nothing has to be padded, ``loss_mask`` among them: cut that one with
    ``shard_token_tensor``); float labels and masks are padded with what they ignore (there with 0); an
    extra buffer may need a gradient; a tensor whose length is not that of the sequence is refused;
    nothing process-wide is touched before the context is entered.

    Args:
        cp_mesh: the R ranks.
        tp_mesh: not used.
        batch: exactly one of ``input_ids`` [B, S] and ``inputs_embeds`` [B, S, H]; ``labels`` [B, S];
            ``position_ids`` [B, S], [1, S], [n_rope, B, S] or none; optional ``padding_mask`` [B, S]. An
            ``attention_mask`` is dropped: the ring is causal.
        loss_mask: [B, S], becomes one more buffer.
        padding_token_id: not used; padding has id 0, comes last and carries the label -100.
        extra_seq_buffers: further keys with their sequence dimension.

    Returns:
        A context factory, the batch, S and T.

    Raises:
        AssertionError: if not exactly one of ids and embeddings is there.
        KeyError: if labels or an extra buffer are missing.
        ValueError: if a tensor has another length than the sequence; the field is named.
    """
    del tp_mesh, padding_token_id
    primary = primary_field(batch)
    return _shard(cp_mesh, batch, [primary], loss_mask, extra_seq_buffers)


def shard_batch_aux_only(
    cp_mesh: Any,
    tp_mesh: Any,
    batch: dict[str, Any],
    *,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
    extra_seq_buffers: dict[str, int] | None = None,
) -> Sharded:
    """Return what ``shard_batch_load_balanced`` does, with ids or embeddings left whole.

    For a model that embeds and cuts its own stream (``shard_sequence_for_cp_round_robin``, to the T
    that the layout tells). Arguments, differences and errors are those of ``shard_batch_load_balanced``.
    """
    del tp_mesh, padding_token_id
    return _shard(cp_mesh, batch, [], loss_mask, extra_seq_buffers)


def _shard(
    cp_mesh: Any,
    batch: dict[str, Any],
    primaries: list[str],
    loss_mask: Tensor | None,
    extra_seq_buffers: dict[str, int] | None,
) -> Sharded:
    batch = {name: value for name, value in batch.items() if name != "attention_mask"}
    primary = primary_field(batch)
    seq_len = batch[primary].shape[1]
    batch["position_ids"], position_dim = with_positions(batch, primary)
    dims = {**dict.fromkeys([*primaries, "labels"], 1), "position_ids": position_dim}
    if loss_mask is not None:
        dims["loss_mask"] = 1
    if "padding_mask" in batch:
        dims["padding_mask"] = 1
    dims |= extra_seq_buffers or {}
    for name in extra_seq_buffers or {}:
        if name not in batch:
            raise KeyError(f"extra_seq_buffers names {name!r}, which is not in the batch")
    # An argument, not an entry of the batch, and it does not become one.
    sources = batch if loss_mask is None else {**batch, "loss_mask": loss_mask}
    padded_len = seq_len + -seq_len % (2 * cp_mesh.size())
    buffers = []
    for name, dim in dims.items():
        check_length(name, sources[name], dim, seq_len)
        tensor = _own_padded(sources[name], dim, padded_len - seq_len, _FILLS.get(name, 0))
        if tensor.requires_grad:
            # Torch resizes its buffers, which a tensor in the graph does not allow.
            tensor = shard_grad_buffer_for_cp(tensor, dim, cp_mesh)
        else:
            buffers.append(_Buffer(name=name, tensor=tensor, dim=dim))
        if name in batch:
            batch[name] = tensor
    layout = ShardLayout(original_seq_len=seq_len, padded_seq_len=padded_len)
    return _ring(cp_mesh, buffers), batch, layout


def _own_padded(tensor: Tensor, dim: int, length: int, fill: float) -> Tensor:
    if length or tensor.requires_grad:
        return pad_dim(tensor, dim, length, fill)
    # The context resizes what it is given, and the caller's tensors are not its to resize.
    return tensor.clone(memory_format=torch.contiguous_format)


def _ring(cp_mesh: Any, buffers: list[_Buffer]) -> Callable[[], Any]:
    ring = create_context_parallel_ctx(
        cp_mesh,
        [buffer.tensor for buffer in buffers],
        [buffer.dim for buffer in buffers],
        {buffer.tensor for buffer in buffers if buffer.name != "position_ids"},
        "allgather",
    )
    return get_train_context(enable_loss_parallel=False, enable_compiled_autograd=False, cp_context=ring)
