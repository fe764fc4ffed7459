"""Which way a batch is sharded: the model's own, magi, TransformerEngine, torch's ring, or not at all.

In:   a model, a mesh and a batch
Out:  a ``ContextParallelSharder`` (``automodel_sharder.py``)

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringfeed.sharding.automodel_batches import shard_batch_identity
from ringfeed.sharding.automodel_indices import identity_local_indices, round_robin_local_indices
from ringfeed.sharding.automodel_magi import _magi_state_from_model
from ringfeed.sharding.automodel_model import _uses_te_attention
from ringfeed.sharding.automodel_ring import shard_batch_load_balanced
from ringfeed.sharding.automodel_sharder import ContextParallelSharder, ShardLayout
from ringfeed.sharding.automodel_te import make_cp_batch_for_te
from ringfeed.sharding.mesh import get_submesh, mesh_axis_size

__all__: list[str] = []

_SENTINEL = -1000

Sharded = tuple[Callable[[], Any], dict[str, Any], ShardLayout | None]


def _make_cp_batch_and_ctx(
    device_mesh: Any,
    batch: dict[str, Any],
    loss_mask: Tensor | None = None,
    use_te: bool = False,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = _SENTINEL,
    magi: Any = None,
    model: Any = None,
    cp_sharder: ContextParallelSharder | None = None,
    extra_seq_buffers: dict[str, int] | None = None,
) -> tuple[Callable[[], Any], dict[str, Any], ContextParallelSharder]:
    """Shard ``batch`` in the way that applies; change nothing where none does.

    Args:
        device_mesh: its ``cp`` and ``tp`` axes count; None is fine.
        batch: whole sequences; it is not changed.
        loss_mask: [B, S], sharded with the batch where the way does so.
        use_te: the batch is THD.
        padding_token_id: pads ``input_ids``.
        num_chunks: THD chunks.
        seq_lens_padding_value: stands for no sequence in the length tables.
        magi: a ``MagiState`` or its like.
        model: handed to ``magi``.
        cp_sharder: the model's own way, which goes first.
        extra_seq_buffers: further keys with their sequence dimension, for torch's ring.

    Returns:
        The context factory of the forward pass (``contextlib.nullcontext`` itself without ring
        attention), the batch of this rank, and the sharder for further tensors.

    Raises:
        ValueError: if ``extra_seq_buffers`` are given for a THD batch, before it is looked at.
    """
    _check_extra_buffers(extra_seq_buffers, is_thd=use_te)
    way = _resolve_cp_sharder(
        get_submesh(device_mesh, "cp"),
        cp_sharder,
        magi=magi,
        is_thd=use_te,
        num_chunks=num_chunks,
        seq_lens_padding_value=seq_lens_padding_value,
        model=model,
        extra_seq_buffers=extra_seq_buffers,
    )
    sharder = _configured(way, device_mesh, loss_mask, padding_token_id)
    context, batch = sharder.shard(batch)
    return context, batch, sharder


def _prepare_cp_sharder(
    model: Any,
    device_mesh: Any,
    batch: dict[str, Any],
    *,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    loss_mask: Tensor | None = None,
    invoke_pre_embed: bool = True,
    extra_seq_buffers: dict[str, int] | None = None,
) -> ContextParallelSharder:
    """Return the configured sharder for ``model`` and ``batch``; the identity where nothing applies.

    A model's hook ``prepare_model_inputs_for_cp(batch, num_chunks=...)`` is asked when R > 1 or the
    model owns THD batches (``supports_thd``), unless magi replaces it (no tower). It returns a dict with an
    optional ``cp_sharder``; its other entries join the batch when that is sharded.

    Differs from the original: the caller's batch is not changed (there the hook's entries are put into
    it at once), and ``extra_seq_buffers`` for a THD batch are refused before the hook runs.

    Raises:
        ValueError: if ``extra_seq_buffers`` are given for a THD batch, or the hook returns None.
    """
    batch_is_thd = batch.get("qkv_format") == "thd"
    magi = _magi_state_from_model(model, device_mesh)
    magi_enabled = magi is not None and magi.enabled
    is_thd = batch_is_thd and (magi_enabled or _uses_te_attention(model))
    _check_extra_buffers(extra_seq_buffers, is_thd=is_thd)
    hook = getattr(model, "prepare_model_inputs_for_cp", None)
    owns_thd = batch_is_thd and bool(getattr(model, "supports_thd", False))
    replaced = magi is not None and magi.enabled and magi.domain == "llm"
    updates: dict[str, Any] = {}
    model_sharder = None
    wanted = mesh_axis_size(device_mesh, "cp") > 1 or owns_thd
    if hook is not None and invoke_pre_embed and wanted and not replaced:
        updates = _ask(hook, batch, num_chunks)
        model_sharder = updates.pop("cp_sharder", None)
    way = _resolve_cp_sharder(
        get_submesh(device_mesh, "cp"),
        model_sharder,
        magi=magi,
        is_thd=is_thd,
        num_chunks=num_chunks,
        seq_lens_padding_value=_SENTINEL,
        model=model,
        extra_seq_buffers=extra_seq_buffers,
    )
    sharder = _configured(way, device_mesh, loss_mask, padding_token_id)
    sharder._batch_updates = updates
    return sharder


def _resolve_cp_sharder(
    cp_mesh: Any,
    model_sharder: ContextParallelSharder | None,
    *,
    magi: Any,
    is_thd: bool,
    num_chunks: int,
    seq_lens_padding_value: int,
    model: Any,
    extra_seq_buffers: dict[str, int] | None = None,
) -> ContextParallelSharder:
    """Return the way that goes first: model-owned, magi, THD, torch's ring (R > 1), identity.

    ``extra_seq_buffers`` are for torch's ring; a way that moves its own tensors leaves them whole.
    """
    if model_sharder is not None:
        return model_sharder
    if magi is not None and getattr(magi, "enabled", False):
        return ContextParallelSharder(
            shard_batch=_MagiSharding(magi=magi, is_thd=is_thd, num_chunks=num_chunks, model=model)
        )
    if is_thd:
        return ContextParallelSharder(
            shard_batch=_TeSharding(num_chunks=num_chunks, seq_lens_padding_value=seq_lens_padding_value)
        )
    if cp_mesh is not None and cp_mesh.size() > 1:
        return ContextParallelSharder(
            shard_batch=partial(shard_batch_load_balanced, extra_seq_buffers=extra_seq_buffers),
            local_token_global_indices=round_robin_local_indices,
        )
    return ContextParallelSharder(
        shard_batch=shard_batch_identity, local_token_global_indices=identity_local_indices
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TeSharding:
    """Sharding into a THD batch. Chunked batches leave no layout: each chunk has positions of its own."""

    num_chunks: int
    seq_lens_padding_value: int

    def __call__(
        self,
        cp_mesh: Any,
        tp_mesh: Any,
        batch: dict[str, Any],
        *,
        loss_mask: Tensor | None = None,
        padding_token_id: int = 0,
    ) -> Sharded:
        # An extra entry of the batch is cut; a mask that only the trainer has goes through the sharder.
        del tp_mesh, loss_mask
        local, indices = make_cp_batch_for_te(
            cp_mesh,
            batch,
            padding_token_id=padding_token_id,
            num_chunks=self.num_chunks,
            seq_lens_padding_value=self.seq_lens_padding_value,
            return_local_indices=True,
        )
        if indices is None:
            return contextlib.nullcontext, local, None
        num_rows, width = batch["input_ids"].shape[:2]
        if cp_mesh is None or cp_mesh.size() <= 1:
            # Of all tokens, whatever else input_ids has.
            indices = torch.arange(num_rows * width, device=indices.device)
        local["_thd_local_indices"] = indices
        layout = ShardLayout(
            local_token_global_indices=indices,
            padded_seq_len=num_rows * width,
            input_row_shape=(num_rows, width),
        )
        return contextlib.nullcontext, local, layout


@dataclass(frozen=True, kw_only=True, slots=True)
class _MagiSharding:
    """Sharding that a Magi state does; its dispatch tells which positions a rank has."""

    magi: Any
    is_thd: bool
    num_chunks: int
    model: Any

    def __call__(
        self,
        cp_mesh: Any,
        tp_mesh: Any,
        batch: dict[str, Any],
        *,
        loss_mask: Tensor | None = None,
        padding_token_id: int = 0,
    ) -> Sharded:
        del tp_mesh, loss_mask
        local, indices = self.magi.make_cp_batch(
            cp_mesh,
            batch,
            padding_token_id=padding_token_id,
            num_chunks=self.num_chunks,
            is_thd=self.is_thd,
            model=self.model,
            return_local_indices=True,
        )
        if indices is None:
            return contextlib.nullcontext, local, None
        return contextlib.nullcontext, local, self._layout(batch.get("input_ids"), indices)

    def _layout(self, input_ids: Tensor | None, indices: Tensor) -> ShardLayout:
        padded = indices.numel() * max(getattr(self.magi, "cp_size", 1) or 1, 1)
        rows = None if input_ids is None or input_ids.ndim < 2 else tuple(input_ids.shape[:2])
        if rows is not None and padded == rows[0] * rows[1]:
            return ShardLayout(
                local_token_global_indices=indices, padded_seq_len=padded, input_row_shape=rows
            )
        # One sequence, padded behind its end: cutting off the padding restores it.
        is_one_padded = rows is not None and rows[0] == 1 and padded >= rows[1]
        return ShardLayout(
            local_token_global_indices=indices,
            padded_seq_len=padded,
            original_seq_len=rows[1] if rows is not None and is_one_padded else None,
        )


def _configured(
    way: ContextParallelSharder, device_mesh: Any, loss_mask: Tensor | None, padding_token_id: int
) -> ContextParallelSharder:
    return ContextParallelSharder(
        device_mesh=device_mesh,
        shard_batch=way.shard_batch,
        local_token_global_indices=way.local_token_global_indices,
        shard_layout=way.shard_layout,
        loss_mask=loss_mask,
        padding_token_id=padding_token_id,
    )


def _ask(hook: Callable[..., Any], batch: dict[str, Any], num_chunks: int) -> dict[str, Any]:
    # A copy, since the caller's batch stays what it is whatever the hook does with it.
    prepared = hook(dict(batch), num_chunks=num_chunks)
    if prepared is None:
        raise ValueError(
            "the model's prepare_model_inputs_for_cp returned None; it must return a dict (with a "
            "cp_sharder, if it has one)"
        )
    return dict(prepared)


def _check_extra_buffers(extra_seq_buffers: dict[str, int] | None, *, is_thd: bool) -> None:
    if is_thd and extra_seq_buffers:
        raise ValueError(
            f"extra_seq_buffers={sorted(extra_seq_buffers)} are not supported by the THD path: a [B, S, ...] "
            "tensor of the batch is cut like the ids there, so leave them out"
        )
