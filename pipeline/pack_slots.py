"""Where the pieces of one pack lie: their slots in the pack, the tokens that fill them.

In:   ``Pieces`` (``step_packs.py``), a ``ViewSpec`` (``opening.py``), ``PieceTokens`` (``corpus_set.py``)
Out:  ``PackSlots``, offsets and per-slot facts; the table that ``view_kernels.fill_tokens`` reads

Shapes: P pieces, N slots (P, or P + 1 with a tail slot), D pieces that are not skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.sharding.padding import slot_offsets

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.corpus_set import PieceTokens
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.step_packs import Pieces

__all__ = ["PackSlots", "lay_out", "token_table"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackSlots:
    """The slots of one pack, known from lengths alone."""

    cu_seqlens: npt.NDArray[np.int32]
    """int32 [N + 1], offsets by real length."""
    cu_seqlens_padded: npt.NDArray[np.int32]
    """int32 [N + 1], offsets by slot length; the last one is T."""
    real_lengths: npt.NDArray[np.int64]
    """int64 [N], 0 for the tail slot and for skipped pieces."""
    first_positions: npt.NDArray[np.int64]
    """int64 [N], position id of each slot's first token."""
    documents: npt.NDArray[np.int64]
    """int64 [D], one id per piece in slot order; skipped ones are left out."""


def lay_out(pieces: Pieces, *, spec: ViewSpec, skipped: npt.NDArray[np.bool_] | None = None) -> PackSlots:
    """Give every piece its slot.

    Args:
        pieces: of one pack; none gives the all-padding pack.
        spec: T, multiple and positions rule.
        skipped: bool [P], pieces that an overlay leaves out: they keep their slots, without a token.

    Raises:
        ValueError: if the slots do not fit into T.
    """
    kept = np.ones(len(pieces), dtype=np.bool_) if skipped is None else ~skipped
    real = np.where(kept, pieces.lengths, 0)
    total = spec.slots_of(pieces.lengths)
    offsets = slot_offsets(pieces.lengths, multiple=spec.multiple, total=total, real_lengths=real)
    num_slots = len(offsets.cu_seqlens) - 1
    real_lengths = np.zeros(num_slots, dtype=np.int64)
    real_lengths[: len(pieces)] = real
    first_positions = np.zeros(num_slots, dtype=np.int64)
    if spec.positions == "continue":
        first_positions[: len(pieces)] = pieces.starts
    return PackSlots(
        cu_seqlens=offsets.cu_seqlens,
        cu_seqlens_padded=offsets.cu_seqlens_padded,
        real_lengths=real_lengths,
        first_positions=first_positions,
        documents=pieces.documents[kept],
    )


def token_table(
    pieces: Pieces, slots: PackSlots, *, tokens: PieceTokens, boundary: str
) -> npt.NDArray[np.int64]:
    """Return per slot what ``view_kernels.fill_tokens`` needs to read it.

    Args:
        pieces: of the pack.
        slots: from ``lay_out``.
        tokens: where the pieces lie (``CorpusSet.piece_tokens``); keep it while the table is used.
        boundary: ``next``: the last label of a piece is the document's next token, if there is one.
            ``ignore``: it has none.

    Returns:
        int64 [N, 4]: real tokens, address of the first one, bytes of a token, labels.
    """
    count = len(pieces)
    table = np.zeros((len(slots.real_lengths), 4), dtype=np.int64)
    table[:, 0] = slots.real_lengths
    table[:count, 1] = tokens.addresses
    table[:count, 2] = tokens.itemsizes
    has_next = (tokens.after > 0) & (boundary == "next")
    labels = slots.real_lengths[:count] - 1 + has_next
    table[:count, 3] = np.where(slots.real_lengths[:count] > 0, labels, 0)
    return table
