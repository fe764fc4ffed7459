"""What MagiAttention needs of every batch, from a model that is configured for it.

In:   a model whose attention backend is "magi", the mesh, and batches
Out:  ``MagiState``, which prepares batches; None for other models

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``). Who holds what
is computed by the layout ``magi``, without MagiAttention; that is only asked for its runtime key, and
only where tokens are dispatched (``attention/magi.py``).

Shapes: B rows, S tokens in a row, T tokens of the stream, T' with padding, L local tokens, R cp ranks.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringfeed.sharding.automodel_indices import mesh_rank
from ringfeed.sharding.automodel_model import _attention_backend, _is_multimodal_model
from ringfeed.sharding.automodel_sharder import pad_dim
from ringfeed.sharding.automodel_te import make_cp_batch_for_te
from ringfeed.sharding.automodel_thd import position_dim, token_aligned_extras
from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.magi.layout import MagiLayout
from ringfeed.sharding.magi.masks import prefix_tree_slices
from ringfeed.sharding.magi.slices import MaskSlices
from ringfeed.sharding.mesh import get_submesh

__all__ = ["MagiState", "MagiWork"]

_CHUNK_SIZE = 512
"""The original's."""


@dataclass(slots=True)
class MagiState:
    """How a model uses MagiAttention; one that is not enabled prepares nothing."""

    enabled: bool = False
    custom: bool = False
    """The model's own attention calls MagiAttention; else Hugging Face's interface does."""
    cp_group: Any = None
    cp_size: int = 1
    domain: str = "llm"
    """"llm", or "vlm" for a model with a vision or audio tower."""
    device_mesh: Any = None

    @property
    def hf_dispatch(self) -> bool:
        """Whether each batch is one causal sequence that is dispatched for Hugging Face's interface."""
        return self.enabled and not self.custom

    def make_cp_batch(
        self,
        cp_mesh: Any,
        batch: dict[str, Any],
        *,
        padding_token_id: int = 0,
        num_chunks: int = 1,
        is_thd: bool = False,
        model: Any = None,
        return_local_indices: bool = False,
    ) -> Any:
        """Return the batch as this rank's attention wants it.

        | model | R = 1 | R > 1 |
        |---|---|---|
        | text, HF | one causal sequence [1, S], cut into [1, L] | the same |
        | text, custom, THD | the THD stream, not cut | the stream's documents dealt out, [L] |
        | text, custom, rows | as it is | refused |
        | with a tower, custom | as it is | as it is |
        | with a tower, HF | as it is, batch 1 | refused |

        Differs from the original: the caller's batch is not changed; padding carries the label -100 (on
        the THD path there 0, a real label); positions of documents stay those of the batch (there they are
        places in the stream); indices are places in the padded stream, each once (there padding has the
        place of the last token); rows at R > 1, which it leaves uncut, and a prefix tree at R > 1, which it
        ignores, are refused.

        Args:
            cp_mesh: not used; the state has its own group and mesh.
            batch: whole sequences.
            padding_token_id: pads ``input_ids``.
            num_chunks: THD chunks, where nothing is cut.
            is_thd: the batch is THD.
            model: whose attention gets the group and the key.
            return_local_indices: return ``(batch, indices)``: the places of this rank's tokens in the
                padded stream, int64 [L]; None where nothing is cut.

        Raises:
            ValueError: if the batch is of a kind that is refused, or not [1, S] where it must be.
            NotImplementedError: if Hugging Face's interface would need a prefix tree, or a tower R > 1.
        """
        del cp_mesh
        indices = None
        if self.enabled and self.domain == "vlm":
            self._prepare_tower_model(batch, model)
        elif self.enabled:
            batch, indices = self._prepare_text(batch, padding_token_id, num_chunks, is_thd, model)
        return (batch, indices) if return_local_indices else batch

    def _prepare_text(
        self, batch: dict[str, Any], padding_token_id: int, num_chunks: int, is_thd: bool, model: Any
    ) -> tuple[dict[str, Any], Tensor | None]:
        tree = batch.get("prefix_tree")
        batch = {name: value for name, value in batch.items() if name != "prefix_tree"}
        if tree is not None and self.hf_dispatch:
            raise NotImplementedError(
                "prefix_tree cannot be told to Hugging Face's attention interface; use a model that calls "
                "MagiAttention itself (backend.attn='magi')"
            )
        if tree is not None and self.cp_size > 1:
            raise ValueError(f"prefix_tree needs cp_size=1, got {self.cp_size}")
        if self.hf_dispatch:
            return self._cut_sequence(batch, padding_token_id, model)
        if self.cp_size > 1:
            if not is_thd:
                raise ValueError(
                    f"cp_size={self.cp_size} with a model that calls MagiAttention itself needs a THD batch "
                    "(qkv_format='thd' and seq_lens): rows would reach every rank whole"
                )
            return self._cut_stream(batch, padding_token_id, model)
        if tree is not None:
            slices = prefix_tree_slices(*tree)
            _attend(model, MagiWork(slices=slices, total=batch["input_ids"].numel(), state=self))
        if is_thd:
            batch = _as_stream(batch, padding_token_id, num_chunks)
        return batch, None

    def _cut_sequence(
        self, batch: dict[str, Any], padding_token_id: int, model: Any
    ) -> tuple[dict[str, Any], Tensor]:
        ids = _one_row(batch)
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        batch = {name: value for name, value in batch.items() if name != "attention_mask"}
        batch["position_ids"] = positions
        index_map = self._deal_out([0, ids.shape[1]], model)
        dims = dict.fromkeys(["input_ids", "labels", "padding_mask", *token_aligned_extras(batch)], 1)
        dims["position_ids"] = positions.ndim - 1
        return _cut(batch, dims, index_map, padding_token_id)

    def _cut_stream(
        self, batch: dict[str, Any], padding_token_id: int, model: Any
    ) -> tuple[dict[str, Any], Tensor]:
        aligned = token_aligned_extras(batch)
        stream = _as_stream(batch, padding_token_id, num_chunks=1)
        offsets = stream.pop("cu_seqlens")
        if offsets is None:
            raise ValueError("seq_lens is None: MagiAttention's mask is made of the documents' boundaries")
        offsets = stream.pop("cu_seqlens_padded", offsets).clone()
        # Padding at the end of the stream belongs to the last slot.
        offsets[-1] = len(stream["input_ids"])
        stream.pop("max_seqlen")
        index_map = self._deal_out(offsets, model)
        dims = dict.fromkeys(["input_ids", "labels", "padding_mask", *aligned], 0)
        dims["position_ids"] = position_dim(stream["position_ids"])
        local, indices = _cut(stream, dims, index_map, padding_token_id)
        local.pop("attention_mask", None)
        return {**local, "qkv_format": "thd"}, indices

    def _deal_out(self, cu_seqlens_padded: Any, model: Any) -> IndexMap:
        """Return this rank's share, and give the model's attention what it needs for the same one."""
        layout = MagiLayout(chunk_size=_CHUNK_SIZE)
        slices = layout.slices(cu_seqlens_padded)
        total = int(cu_seqlens_padded[-1])
        partition = layout.partition_slices(slices, total, cp_size=self.cp_size)
        _attend(model, MagiWork(slices=slices, total=total, state=self, layout=layout))
        return partition.index_maps[self._cp_rank]

    @property
    def _cp_rank(self) -> int:
        cp_mesh = get_submesh(self.device_mesh, "cp")
        if cp_mesh is not None:
            return mesh_rank(cp_mesh)
        return int(self.cp_group.rank()) if self.cp_size > 1 else 0

    def _prepare_tower_model(self, batch: dict[str, Any], model: Any) -> None:
        if self.custom:
            return
        if self.cp_size != 1:
            raise NotImplementedError(
                f"a model with a tower needs cp_size=1 with Hugging Face's interface, got {self.cp_size}: "
                "its embeddings are made inside its forward"
            )
        _one_row(batch)
        _attend(model, MagiWork(slices=None, total=None, state=self))


@dataclass(frozen=True, kw_only=True, slots=True)
class MagiWork:
    """What the attention of one batch has to compute, for ``attention.magi.prepare_model``."""

    slices: MaskSlices | None
    """The mask; None: causal over the sequence that arrives, whose length is known in the forward only."""
    total: int | None
    """T."""
    state: MagiState
    layout: MagiLayout | None = None
    """Who deals the chunks out; None where tokens stay in place."""


def _attend(model: Any, work: MagiWork) -> None:
    # MagiAttention is asked here and nowhere else.
    importlib.import_module("ringfeed.sharding.attention.magi").prepare_model(model, work)


def _as_stream(batch: dict[str, Any], padding_token_id: int, num_chunks: int) -> dict[str, Any]:
    stream: Any = make_cp_batch_for_te(None, batch, padding_token_id=padding_token_id, num_chunks=num_chunks)
    return dict(stream)


def _one_row(batch: dict[str, Any]) -> Tensor:
    ids: Tensor | None = batch.get("input_ids")
    if ids is None or ids.ndim != 2 or len(ids) != 1:
        raise ValueError(
            f"input_ids must be one sequence [1, S] for MagiAttention behind Hugging Face's interface, got "
            f"{None if ids is None else list(ids.shape)}; use micro-batches of 1"
        )
    return ids


def _cut(
    batch: dict[str, Any], dims: dict[str, int], index_map: IndexMap, padding_token_id: int
) -> tuple[dict[str, Any], Tensor]:
    fills = {"input_ids": padding_token_id, "labels": -100, "padding_mask": True}
    local = dict(batch)
    for name, dim in dims.items():
        if (value := batch.get(name)) is not None:
            missing = index_map.num_tokens - value.shape[dim]
            local[name] = index_map.take(pad_dim(value, dim, missing, fills.get(name, 0)), dim)
    return local, index_map.positions.to(batch["input_ids"].device)


def _magi_state_from_model(model: Any, device_mesh: Any) -> MagiState | None:
    """Return the Magi state of ``model`` on ``device_mesh``; None unless its attention backend is "magi".

    Works without MagiAttention. Without a mesh, or a ``cp`` axis in it, R is 1 and there is no group.
    """
    if model is None or _attention_backend(model) != "magi":
        return None
    cp_mesh = get_submesh(device_mesh, "cp")
    cp_group = None if cp_mesh is None else cp_mesh.get_group()
    return MagiState(
        enabled=True,
        custom=getattr(getattr(model, "backend", None), "attn", None) == "magi",
        cp_group=cp_group,
        cp_size=1 if cp_group is None else int(cp_group.size()),
        domain="vlm" if _is_multimodal_model(model) else "llm",
        device_mesh=device_mesh,
    )
