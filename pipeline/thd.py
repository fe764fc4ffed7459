"""Lay packed documents end to end in THD form.

In:   the pieces of one pack (``pipeline/step_packs.py``), or a BSHD batch (``pipeline/bshd.py``)
Out:  one ``ThdChunk``, cut per rank by a layout (``pipeline/views.py``)

THD is the variable-length layout of TransformerEngine and flash-attention: no batch axis, one token
axis T, and N + 1 offsets that say where documents start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ringfeed.pipeline.pack_slots import lay_out
from ringfeed.pipeline.pack_tokens import PackTokens
from ringfeed.pipeline.view_kernels import fill_positions

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.corpus_set import CorpusSet
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.step_packs import Pieces

__all__ = ["ThdChunk", "thd_from_pieces"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ThdChunk:
    """Pieces laid end to end, each padded to its slot, with the labels and positions they have."""

    tokens: npt.NDArray[np.int32]
    """int32 [T]"""
    labels: npt.NDArray[np.int32]
    """int32 [T], the next token of the document; -100 = ignore."""
    position_ids: npt.NDArray[np.int32]
    """int32 [T]; padding has 0."""
    padding_mask: npt.NDArray[np.bool_]
    """bool [T], True = padding; made from the offsets, never from token values."""
    cu_seqlens: npt.NDArray[np.int32]
    """int32 [N + 1], offsets by real length."""
    cu_seqlens_padded: npt.NDArray[np.int32]
    """int32 [N + 1], offsets by slot length; the last one is T."""
    documents: npt.NDArray[np.int64]
    """int64 [D], one id per piece in slot order; tail slots and skipped pieces have none."""
    num_packs: int = 1
    """Packs that lie end to end in this chunk."""
    extras: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further token-aligned columns [T]."""


def thd_from_pieces(
    pieces: Pieces, *, spec: ViewSpec, corpora: CorpusSet, skipped: npt.NDArray[np.bool_] | None = None
) -> ThdChunk:
    """Lay one pack out. Labels are next-token, made on whole documents; nothing is sharded yet.

    Args:
        pieces: of the pack; none gives the all-padding pack.
        spec: T, multiple, pad id, and what happens at a piece's border.
        corpora: where the tokens are; they are read, not checked (``CorpusSet.check_documents``).
        skipped: bool [P], pieces that an overlay leaves out: they keep their slots, without a token.

    Raises:
        ValueError: if the slots do not fit into T, or a piece is no part of its document.
        CorruptDataError: if a document lies outside its token file.
    """
    slots = lay_out(pieces, spec=spec, skipped=skipped)
    total = int(slots.cu_seqlens_padded[-1])
    # Read-only like the runs of an index map: numba compiles the kernels once for both.
    everything = np.array([[0, total]], dtype=np.int64)
    everything.flags.writeable = False
    tokens, labels, positions = (np.empty(total, dtype=np.int32) for _ in range(3))
    mask = np.empty(total, dtype=np.bool_)
    PackTokens(pieces, slots, corpora=corpora, spec=spec).fill(everything, tokens, labels)
    fill_positions(
        everything, slots.cu_seqlens_padded, slots.real_lengths, slots.first_positions, positions, mask
    )
    return ThdChunk(
        tokens=tokens,
        labels=labels,
        position_ids=positions,
        padding_mask=mask,
        cu_seqlens=slots.cu_seqlens,
        cu_seqlens_padded=slots.cu_seqlens_padded,
        documents=slots.documents,
    )
