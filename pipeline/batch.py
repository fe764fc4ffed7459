"""What a trainer rank gets: the tensors of one chunk, and the facts that belong to them.

In:   tensors and counts put together by ``pipeline/batch_builder.py``
Out:  ``Batch`` for the trainer; ``Batch.kwargs`` is in ``pipeline/batch_kwargs.py``

Shapes: T slots in a chunk, L local tokens, N slots' count, M micro-batches of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ringfeed.pipeline.batch_kwargs import PadsChoice
    from ringfeed.pipeline.chunk_sharder import ChunkSharder

__all__ = ["OFFSET_COLUMNS", "TOKEN_COLUMNS", "VARYING_FIELDS", "Batch", "BatchInfo", "Chunk"]

TOKEN_COLUMNS = ("input_ids", "labels", "position_ids", "padding_mask")
"""Tensors [L]."""
OFFSET_COLUMNS = ("cu_seqlens", "cu_seqlens_padded")
"""Tensors [N + 1] of the whole chunk."""
VARYING_FIELDS = (
    "micro_batch",
    "num_documents",
    "documents",
    "digest",
    "local_supervised",
    "max_seqlen",
    "max_seqlen_padded",
)
"""Fields of ``BatchInfo`` that belong to a micro-batch: tuples of M in a batch of a whole step."""

Count = int | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInfo:
    """Facts of one micro-batch, or of all micro-batches of a step, as plain ints on the host."""

    step: int
    micro_batch: Count
    num_micro_batches: int
    num_documents: Count
    """Real pieces in the chunk; tail slots and skipped pieces are none."""
    documents: tuple[int, ...] | tuple[tuple[int, ...], ...]
    """Global document id of each real piece of the chunk, slot order."""
    digest: Count
    """xxh3_64 of this view's int32 input_ids and labels, pack by pack."""
    step_digest: int
    """xxh3_64 over chain value (which covers all piece lists), overlay digest and this dp rank's packs."""
    local_supervised: Count
    """Labels of this view that are not -100."""
    global_supervised: int
    """Supervised tokens of the step over all ranks: the loss denominator."""
    supervised_by_source: dict[str, int]
    """``global_supervised`` by corpus name."""
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    layout: str
    max_seqlen: Count
    """Longest real piece of the chunk."""
    max_seqlen_padded: Count
    """Widest slot of the chunk, its tail slots included."""

    @property
    def copies(self) -> int:
        """Ranks of cp that hold the same token, for ``sharding.loss``: all of them with layout identity."""
        return self.cp_size if self.layout == "identity" else 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """What belongs to one micro-batch alone."""

    info: BatchInfo
    sharder: ChunkSharder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One micro-batch of one rank, or a whole step of them (``Loader.steps``).

    The tensors are the batch's own: nothing overwrites them later, and writing into them changes
    nothing else.
    """

    tensors: dict[str, Tensor]
    """``input_ids``, ``labels``, ``position_ids``: token dtype [L]; ``padding_mask``: bool [L], True =
    padding; ``cu_seqlens``, ``cu_seqlens_padded``: int32 [N + 1], of the whole chunk. A whole step
    has a leading M. ``Loader(columns=...)`` leaves some out."""
    info: BatchInfo
    chunks: tuple[Chunk, ...]
    """The micro-batches in here: one, or M for a whole step."""
    is_step: bool = False
    """Whether the tensors have a leading M."""
    pads: PadsChoice
    """The choice that all batches of a loader share."""

    @property
    def sharder(self) -> ChunkSharder:
        """Shards and gathers other token-aligned tensors of this chunk; has its ``index_map``.

        Raises:
            ValueError: for a whole step, whose micro-batches have one each.
        """
        if self.is_step:
            raise ValueError(f"a whole step has no single sharder; {_WAY_OUT}")
        return self.chunks[0].sharder

    def micro_batches(self) -> tuple[Batch, ...]:
        """Return this batch's micro-batches one by one; their tensors are rows of this one's."""
        if not self.is_step:
            return (self,)
        return tuple(
            Batch(
                tensors={name: tensor[m] for name, tensor in self.tensors.items()},
                info=chunk.info,
                chunks=(chunk,),
                pads=self.pads,
            )
            for m, chunk in enumerate(self.chunks)
        )

    def kwargs(self, backend: str, *, pads: str = "attend") -> dict[str, Any]:
        """Return what the attention of ``backend`` wants to know of this micro-batch.

        ============  =================================  ==============================================
        backend       layouts                            arguments of
        ============  =================================  ==============================================
        "te"          te; any at cp 1                    TransformerEngine's ``DotProductAttention``
        "megatron"    te; any at cp 1                    Megatron-Core's ``PackedSeqParams``
        "hf-flash"    any, at cp 1 only                  a Hugging Face model with flash attention
        "hf"          any                                one with ``sharding.attention.hf``
        "allgather"   any                                ``sharding.attention.allgather``
        "flex"        any                                FlexAttention over gathered keys: ids, ``mask_mod``
        "flex-cp"     head_tail, contiguous, ptrr        ``sharding.attention.flex_cp.shard_block_mask``
        "ring-flash"  te; any at cp 1                    ``zigzag_ring_flash_attn_varlen_func``
        "magi"        magi                               MagiAttention's ``magi_attn_flex_key``
        "torch-cp"    head_tail; any at cp 1             a model whose SDPA is torch's ring
        ============  =================================  ==============================================

        Args:
            backend: one of these.
            pads: for "te" and "megatron". "attend": slots count as sequences, exact for causal attention
                and open to all kernels. "exact": real and slot offsets differ. One choice for the whole run.

        Raises:
            ValueError: if the layout does not fit (those that do are named), the backend is not known,
                ``pads`` changes within the run, a tensor was left out by ``columns=``, this is a whole
                step, "torch-cp" finds more than one real document, or "flex-cp" a T without whole blocks.

        Warns:
            RuntimeWarning: once in a run, if "te" or "megatron" gets more boundaries than TE's kernels hold.
        """
        from ringfeed.pipeline.batch_kwargs import attention_kwargs

        if self.is_step:
            raise ValueError(f"kwargs({backend!r}) is for one micro-batch, this is a whole step; {_WAY_OUT}")
        return attention_kwargs(self, backend, pads=pads)


_WAY_OUT = "go through batch.micro_batches()"
