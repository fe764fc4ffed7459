"""``ContextParallelSharder``: how a batch is cut, and token tensors moved in the caller's coordinates.

In:   a function that shards a batch, or a model and batch from which one is chosen (``automodel_resolve.py``)
Out:  the rank's batch; shards of any token-aligned tensor, and gathered ones

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``).

Shapes: B rows, S tokens in a row as the caller has them, T tokens after padding or flattening,
L local tokens, R cp ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringfeed.sharding.automodel_indices import (
    gather_token_tensor_by_indices,
    shard_token_tensor_by_indices,
)
from ringfeed.sharding.mesh import get_submesh

__all__ = ["BatchSharding", "ContextParallelSharder", "ShardLayout", "pad_dim"]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What sharding a batch has told about where tokens went."""

    local_token_global_indices: Tensor | None = None
    """integers [L], this rank's positions, where they follow from the batch and not from T alone."""
    original_seq_len: int | None = None
    """S, where the sequence was padded to T; None for streams."""
    padded_seq_len: int | None = None
    """T."""
    input_row_shape: tuple[int, ...] | None = None
    """(B, S), where rows were flattened into a stream."""
    input_token_stream_positions: Tensor | None = None
    """integers [B, S], the column of [B, T] that each token went to, -1 = dropped; where rows moved."""


BatchSharding = Callable[..., tuple[Callable[[], Any], dict[str, Any], ShardLayout | None]]
"""Takes ``(cp_mesh, tp_mesh, batch, *, loss_mask=None, padding_token_id=0)``; returns a context factory,
the rank's batch and its layout."""

_NO_LAYOUT = ShardLayout()


class ContextParallelSharder:
    """Shards batches, and tensors aligned with their tokens.

    Give ``shard_batch`` to construct one directly; without it, ``model`` and ``batch`` choose
    (model-owned, magi, TransformerEngine, torch's ring, identity).

    Differs from the original: what a model's hook adds to the batch is kept and added by ``shard``, so
    that constructing a sharder changes no batch; a mesh without axis names counts as one without ``cp``.

    Args:
        model: decides by its hook and attention backend; None for the generic choice.
        device_mesh: has ``cp`` and ``tp`` axes, or not; a DeviceMesh, or a mapping with ``mesh_dim_names``.
        batch: the batch that will be sharded, needed to choose.
        shard_batch: how to shard a batch.
        local_token_global_indices: ``(cp_mesh, T, device) -> integers [L]``, for layouts that follow from
            T alone.
        shard_layout: one that is known already.
        padding_token_id: pads ``input_ids``.
        num_chunks: THD chunks.
        loss_mask: [B, S], sharded with the batch where the backend does so.
        invoke_pre_embed: whether the model's hook is asked.
        extra_seq_buffers: further batch keys with their sequence dimension.

    Raises:
        TypeError: if arguments of the two ways are mixed, or ``batch`` is missing.
        ValueError: if ``extra_seq_buffers`` are given for a THD batch.
    """

    shard_batch: BatchSharding
    local_token_global_indices: Callable[..., Tensor] | None
    shard_layout: ShardLayout | None
    """Of the batch that was sharded last."""

    def __init__(
        self,
        model: Any = None,
        device_mesh: Any = None,
        batch: dict[str, Any] | None = None,
        *,
        shard_batch: BatchSharding | None = None,
        local_token_global_indices: Callable[..., Tensor] | None = None,
        shard_layout: ShardLayout | None = None,
        padding_token_id: int = 0,
        num_chunks: int = 1,
        loss_mask: Tensor | None = None,
        invoke_pre_embed: bool = True,
        extra_seq_buffers: dict[str, int] | None = None,
    ) -> None:
        self._batch_updates: dict[str, Any] = {}
        if shard_batch is not None:
            choosing = (model, batch, extra_seq_buffers)
            if any(value is not None for value in choosing) or num_chunks != 1 or not invoke_pre_embed:
                raise TypeError(
                    "shard_batch says how to shard, so model, batch, num_chunks, invoke_pre_embed and "
                    "extra_seq_buffers, which choose a way, cannot be given with it"
                )
            self.shard_batch = shard_batch
            self.local_token_global_indices = local_token_global_indices
            self.shard_layout = shard_layout
            self._cp_mesh = get_submesh(device_mesh, "cp")
            self._tp_mesh = get_submesh(device_mesh, "tp")
            self._loss_mask = loss_mask
            self._padding_token_id = padding_token_id
            return
        if local_token_global_indices is not None or shard_layout is not None:
            raise TypeError("local_token_global_indices and shard_layout are given together with shard_batch")
        if batch is None:
            raise TypeError("batch is needed to choose how to shard; or give shard_batch")
        from ringfeed.sharding.automodel_resolve import _prepare_cp_sharder

        chosen = _prepare_cp_sharder(
            model,
            device_mesh,
            batch,
            padding_token_id=padding_token_id,
            num_chunks=num_chunks,
            loss_mask=loss_mask,
            invoke_pre_embed=invoke_pre_embed,
            extra_seq_buffers=extra_seq_buffers,
        )
        self.__dict__.update(chosen.__dict__)

    def shard(self, batch: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Return a context factory for the forward pass and this rank's batch; keep its layout.

        The batch is not changed. The factory is ``contextlib.nullcontext`` itself without ring attention.
        """
        if self._batch_updates:
            batch = {**batch, **self._batch_updates}
        context, batch, self.shard_layout = self.shard_batch(
            self._cp_mesh,
            self._tp_mesh,
            batch,
            loss_mask=self._loss_mask,
            padding_token_id=self._padding_token_id,
        )
        return context, batch

    def shard_token_tensor(self, tensor: Tensor, seq_dim: int = 1, fill: float | None = None) -> Tensor:
        """Return this rank's part of a token-aligned tensor, cut like the batch that was sharded last.

        Args:
            tensor: [.., T, ..]; or, in the batch's own coordinates: [B, S, ...] where rows were
                flattened or moved (the result is a stream then, ``seq_dim`` plays no part), [.., S, ..]
                where the sequence was padded.
            seq_dim: the dimension of the tokens.
            fill: value of the places that ``tensor`` has no token for; needed where there are any.

        Returns:
            [.., L, ..], or [L, ...] for rows that were flattened.

        Raises:
            ValueError: if the tensor has another length than the batch, or ``fill`` is missing.
            NotImplementedError: if there is no layout: nothing was sharded yet, or only THD chunks.
        """
        layout = self.shard_layout or _NO_LAYOUT
        moved, rows = layout.input_token_stream_positions, layout.input_row_shape
        if moved is not None and tensor.shape[: moved.ndim] == moved.shape:
            tensor, seq_dim = _move_rows(tensor, moved, layout.padded_seq_len, fill), 1
        elif rows is not None and tuple(tensor.shape[: len(rows)]) == tuple(rows):
            tensor, seq_dim = tensor.flatten(0, len(rows) - 1), 0
        length, wanted = tensor.shape[seq_dim], layout.padded_seq_len
        if wanted is not None and length != wanted:
            if fill is None or length != layout.original_seq_len:
                raise ValueError(
                    f"the tensor has {length} entries in dim {seq_dim}; the batch that was sharded has "
                    f"original_seq_len={layout.original_seq_len}, padded_seq_len={wanted}: pass one of "
                    f"these lengths, the original one together with fill, got {fill=}"
                )
            tensor = pad_dim(tensor, seq_dim, wanted - length, fill)
        indices = self._indices(tensor.shape[seq_dim], tensor.device)
        return shard_token_tensor_by_indices(tensor, indices, seq_dim=seq_dim)

    def gather_token_tensor(
        self, tensor: Tensor, seq_dim: int = 1, trim: bool = False, fill: float | None = None
    ) -> Tensor:
        """Return the whole tensor from every rank's part, differentiably: [.., L, ..] -> [.., T, ..].

        The gradient of a part is the sum over the ranks (``gather_token_tensor_by_indices`` says when to
        divide by R).

        Args:
            tensor: this rank's part.
            seq_dim: the dimension of the tokens.
            trim: return it in the caller's coordinates: rows unflattened to [B, S], moved back, or cut
                to S.
            fill: value of tokens that were dropped, where rows were moved.

        Raises:
            ValueError: if the parts are not those of the batch that was sharded last, ``fill`` is
                missing, or R > 1 without a process group.
            NotImplementedError: if there is no layout to gather by, or to trim to.
        """
        layout = self.shard_layout or _NO_LAYOUT
        padded = tensor.shape[seq_dim] * self._cp_size
        indices = self._indices(padded, tensor.device)
        whole = gather_token_tensor_by_indices(self._cp_mesh, tensor, indices, seq_dim=seq_dim)
        if not trim:
            return whole
        if layout.padded_seq_len is not None and whole.shape[seq_dim] != layout.padded_seq_len:
            raise ValueError(
                f"the gathered tensor has {whole.shape[seq_dim]} entries in dim {seq_dim}, the batch that "
                f"was sharded padded_seq_len={layout.padded_seq_len}"
            )
        if layout.input_token_stream_positions is not None:
            return _move_rows_back(whole, layout.input_token_stream_positions, fill)
        if layout.input_row_shape is not None:
            dim = seq_dim % whole.ndim
            return whole.reshape(*whole.shape[:dim], *layout.input_row_shape, *whole.shape[dim + 1 :])
        if layout.original_seq_len is not None:
            return whole.narrow(seq_dim, 0, layout.original_seq_len)
        raise NotImplementedError(
            "there is no shard layout to trim to; gather with trim=False, and cut with what the batch tells "
            "(padding_mask, cu_seqlens)"
        )

    @property
    def _cp_size(self) -> int:
        return int(self._cp_mesh.size()) if self._cp_mesh is not None else 1

    def _indices(self, padded_seq_len: int, device: torch.device) -> Tensor:
        told = (self.shard_layout or _NO_LAYOUT).local_token_global_indices
        if told is not None:
            expected = told.numel() * self._cp_size
            if padded_seq_len != expected:
                raise ValueError(
                    f"the batch that was sharded has {expected} tokens ({told.numel()} local, "
                    f"cp_size {self._cp_size}), got {padded_seq_len=}"
                )
            return told.reshape(-1).to(device=device, dtype=torch.int64)
        if self.local_token_global_indices is None:
            raise NotImplementedError(
                "positions follow from the batch here, and none are known: shard a batch first; THD chunks "
                "(num_chunks > 1) are token spaces of their own and have no common positions"
            )
        return self.local_token_global_indices(self._cp_mesh, padded_seq_len, device)


def pad_dim(tensor: Tensor, dim: int, length: int, value: float) -> Tensor:
    """Return ``tensor`` with ``length`` entries of ``value`` after the last one of ``dim``."""
    if length <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length
    return torch.cat([tensor, tensor.new_full(shape, value)], dim=dim)


def _move_rows(tensor: Tensor, positions: Tensor, length: int | None, fill: float | None) -> Tensor:
    """Return [B, T, ...] with each token of [B, S, ...] in its column."""
    if fill is None or length is None:
        raise ValueError("rows were moved, which leaves empty places: pass fill for them")
    rows, columns = (positions >= 0).nonzero(as_tuple=True)
    moved = tensor.new_full((len(tensor), length, *tensor.shape[2:]), fill)
    targets = positions[rows, columns]
    moved[rows.to(tensor.device), targets.to(tensor.device)] = tensor[rows, columns]
    return moved


def _move_rows_back(whole: Tensor, positions: Tensor, fill: float | None) -> Tensor:
    """Return [B, S, ...] with the token that each place of a row went to."""
    if fill is None:
        raise ValueError("tokens were dropped when rows were moved: pass fill for their places")
    place = positions.to(whole.device, torch.int64)
    place = place.reshape(*place.shape, *[1] * (whole.ndim - 2)).expand(*place.shape, *whole.shape[2:])
    return whole.gather(1, place.clamp(min=0)).masked_fill(place < 0, fill)
