"""Keyword arguments of attention that takes sequences by their offsets.

In:   a ``Batch`` of one micro-batch (``pipeline/batch.py``)
Out:  arguments for TransformerEngine, Megatron-Core, Hugging Face flash attention and
      zhuzilin's ring-flash-attention (``pipeline/batch_kwargs.py`` says which batches fit)

Shapes: N slots' count, L local tokens, R cp ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ringfeed.pipeline.batch import Batch

__all__ = ["hf_flash", "megatron", "model_inputs", "required_tensor", "ring_flash", "te"]


def te(batch: Batch, *, pads: str) -> dict[str, Any]:
    """Return arguments of TransformerEngine's ``DotProductAttention``."""
    return {**megatron(batch, pads=pads), "pad_between_seqs": pads == "exact"}


def megatron(batch: Batch, *, pads: str) -> dict[str, Any]:
    """Return fields of Megatron-Core's ``PackedSeqParams``, those that every version has.

    With ``pads="exact"`` a version that has the field ``pad_between_seqs`` wants True there as well:
    without it TransformerEngine looks at the offsets, and misses padding after the last document.
    """
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
