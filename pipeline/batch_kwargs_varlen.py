"""Keyword arguments of attention that takes sequences by their offsets.

In:   a ``Batch`` of one micro-batch (``pipeline/batch.py``)
Out:  arguments for TransformerEngine, Megatron-Core, Hugging Face flash attention and
      zhuzilin's ring-flash-attention (``pipeline/batch_kwargs.py`` says which batches fit)

Shapes: N slots' count, L local tokens, R cp ranks.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ringfeed.pipeline.batch import Batch

__all__ = ["hf_flash", "megatron", "model_inputs", "required_tensor", "ring_flash", "te"]

_FLAG = "pad_between_seqs"
_MEGATRON_MODULE = "megatron.core.packed_seq_params"


def te(batch: Batch, *, pads: str) -> dict[str, Any]:
    """Return arguments of TransformerEngine's ``DotProductAttention``."""
    return {**_packed(batch, pads=pads), _FLAG: pads == "exact"}


def megatron(batch: Batch, *, pads: str) -> dict[str, Any]:
    """Return fields of Megatron-Core's ``PackedSeqParams``.

    With ``pads="attend"`` they are those that every version has. "exact" adds ``pad_between_seqs``, True:
    without it TransformerEngine compares the offsets, waits for the device to do so, and misses padding
    that is only after the last document. So a Megatron-Core without the field is refused.

    Raises:
        ValueError: with ``pads="exact"``, if the Megatron-Core that this process has imported is too old.
    """
    packed = _packed(batch, pads=pads)
    if pads == "attend":
        return packed
    # Whoever makes PackedSeqParams has imported this; importing Megatron here would start half of it.
    params = getattr(sys.modules.get(_MEGATRON_MODULE), "PackedSeqParams", None)
    if params is not None and _FLAG not in {field.name for field in fields(params)}:
        raise ValueError(
            f"pads='exact' needs the field {_FLAG}, which PackedSeqParams of this Megatron-Core does not "
            "have; use pads='attend', which is exact for causal attention, or a newer Megatron-Core"
        )
    return {**packed, _FLAG: True}


def _packed(batch: Batch, *, pads: str) -> dict[str, Any]:
    slots = required_tensor(batch, "cu_seqlens_padded")
    # "attend" hands over the slots as sequences: a document's pads trail it, so under a causal mask no
    # real token sees one, and every kernel stays available.
    real = slots if pads == "attend" else required_tensor(batch, "cu_seqlens")
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": slots,
        "cu_seqlens_kv_padded": slots,
        "max_seqlen_q": batch.info.max_seqlen_padded,
        "max_seqlen_kv": batch.info.max_seqlen_padded,
    }


def hf_flash(batch: Batch) -> dict[str, Any]:
    """Return arguments of a Hugging Face model whose attention is flash attention: ids [1, L] and slots."""
    slots = required_tensor(batch, "cu_seqlens_padded")
    return {
        **model_inputs(batch),
        "cu_seq_lens_q": slots,
        "cu_seq_lens_k": slots,
        "max_length_q": batch.info.max_seqlen_padded,
        "max_length_k": batch.info.max_seqlen_padded,
    }


def ring_flash(batch: Batch) -> dict[str, Any]:
    """Return arguments of ``zigzag_ring_flash_attn_varlen_func``: one rank's share of every slot.

    Slots count as sequences, and each is a multiple of 2R, so the offsets int32 [N + 1] divide.
    """
    cp_size, widest = batch.info.cp_size, batch.info.max_seqlen_padded
    if not isinstance(widest, int):
        raise TypeError("max_seqlen_padded of one micro-batch is an int")
    return {
        "cu_seqlens": required_tensor(batch, "cu_seqlens_padded") // cp_size,
        "max_seqlen": widest // cp_size,
        "causal": True,
    }


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Return token ids and positions with a batch axis, [1, L] each."""
    return {name: required_tensor(batch, name)[None] for name in ("input_ids", "position_ids")}


def required_tensor(batch: Batch, name: str) -> Tensor:
    """Return a tensor of the batch.

    Raises:
        ValueError: if the loader was asked to leave it out.
    """
    if name not in batch.tensors:
        raise ValueError(f"this needs the tensor {name!r}, which Loader(columns=...) left out; add it there")
    return batch.tensors[name]
