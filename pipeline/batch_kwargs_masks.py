"""Keyword arguments of attention that takes a mask, made from the chunk's lengths.

In:   a ``Batch`` of one micro-batch (``pipeline/batch.py``)
Out:  arguments for ringfeed's all-gather attention, alone and in Hugging Face models, FlexAttention with and
      without torch's context parallelism, torch's SDPA ring and MagiAttention (``pipeline/batch_kwargs.py``
      says which batches fit)

Offsets come from ``Batch.sharder``, on the host: nothing here waits for the device.

Shapes: T slots in the chunk, L local tokens, S slices of a mask, R cp ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.batch_kwargs_varlen import model_inputs

if TYPE_CHECKING:
    import torch

    from ringfeed.pipeline.batch import Batch
    from ringfeed.sharding.attention.allgather import AllGatherContext

__all__ = ["allgather", "flex", "flex_cp", "hf", "magi", "torch_cp"]


def allgather(batch: Batch) -> dict[str, Any]:
    """Return the argument of ``allgather_attention``: a context with document ids and positions."""
    return {"context": _context(batch)}


def hf(batch: Batch) -> dict[str, Any]:
    """Return arguments of a Hugging Face model with ``attn_implementation="ringfeed"``; ids [1, L].

    At cp sizes above 1 the caller adds ``ringfeed_group``, the cp process group: the run's, not the batch's.
    """
    return {**model_inputs(batch), "use_cache": False, "ringfeed_context": _context(batch)}


def flex(batch: Batch) -> dict[str, Any]:
    """Return what FlexAttention needs to attend from L local rows to the chunk's T keys in chunk order.

    ``sharder.gather_token_tensor`` brings keys and values into that order, and the ``BlockMask`` is
    ``sharding.attention.flex_mask.local_block_mask(context)``, or with a window that of
    ``context.with_window((left, right))``. Beside ``context`` there are its causal ``mask_mod``, and document
    ids (-1 is padding) and positions, int32: ``local_*`` [L], ``global_*`` [T].
    """
    from ringfeed.sharding.attention.flex_mask import document_mask_mod

    context = _context(batch)
    names = ("local_document_ids", "local_positions", "global_document_ids", "global_positions")
    described = {name: getattr(context, name) for name in names}
    return {**described, "mask_mod": document_mask_mod(context), "context": context}


def flex_cp(batch: Batch) -> dict[str, Any]:
    """Return arguments of ``shard_block_mask``, which with the cp mesh makes this rank's ``BlockMask``.

    Raises:
        ValueError: if T is no multiple of the mask's blocks times R.
    """
    from ringfeed.sharding.attention.flex_cp import BLOCK, document_block_mask, load_balancer

    sharder, device = batch.sharder, _device(batch)
    num_tokens, multiple = sharder.num_tokens, BLOCK * sharder.cp_size
    if num_tokens % multiple:
        raise ValueError(
            f"the chunk has {num_tokens} tokens; backend 'flex-cp' at cp {sharder.cp_size} wants a multiple "
            f"of {multiple}, blocks of {BLOCK} on each rank: plan with such pack_tokens, or use 'flex'"
        )
    offsets = sharder.offsets
    return {
        "block_mask": document_block_mask(offsets.cu_seqlens, offsets.cu_seqlens_padded, device=device),
        "load_balancer": load_balancer(sharder.layout.name, sharder.index_maps, device=device),
    }


def torch_cp(batch: Batch) -> dict[str, Any]:
    """Return arguments of a model whose SDPA is torch's ring: ids and positions [1, L], no mask.

    Raises:
        ValueError: if the chunk holds more than one real document, which the ring would mix.
    """
    from ringfeed.sharding.attention.torch_cp import require_one_document

    offsets = batch.sharder.offsets
    require_one_document(offsets.cu_seqlens, offsets.cu_seqlens_padded)
    return model_inputs(batch)


def magi(batch: Batch) -> dict[str, Any]:
    """Return the arguments of ``magi_attn_flex_key`` that belong to the chunk.

    The others (heads, group, config) are the run's. ``q_ranges`` and ``k_ranges``: S pairs of ints, for
    ``AttnRanges.from_ranges``; ``attn_mask_type``: S words. The layout's packs need no padding.
    """
    from ringfeed.sharding.magi.layout import MagiLayout

    sharder = batch.sharder
    if not isinstance(sharder.layout, MagiLayout):
        raise TypeError(f"layout 'magi' is a {type(sharder.layout).__name__}")
    offsets = sharder.offsets
    slices = sharder.layout.slices(offsets.cu_seqlens_padded, cu_seqlens=offsets.cu_seqlens).to_tuples()
    grid = sharder.layout.rule.grid(sharder.num_tokens, cp_size=sharder.cp_size)
    return {
        "q_ranges": [[q0, q1] for q0, q1, _, _, _ in slices],
        "k_ranges": [[k0, k1] for _, _, k0, k1, _ in slices],
        "attn_mask_type": [kind for *_, kind in slices],
        "total_seqlen_q": grid.total,
        "total_seqlen_k": grid.total,
        "pad_size": grid.pad_size,
        "chunk_size": grid.chunk_size,
    }


def _context(batch: Batch) -> AllGatherContext:
    from ringfeed.sharding.attention.allgather import allgather_context

    sharder = batch.sharder
    offsets = sharder.offsets
    context = allgather_context(
        offsets.cu_seqlens, offsets.cu_seqlens_padded, sharder.index_maps, sharder.cp_rank
    )
    return context.to(_device(batch))


def _device(batch: Batch) -> torch.device:
    return next(iter(batch.tensors.values())).device
