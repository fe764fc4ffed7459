"""Cut chunks into what each cp rank holds.

In:   token-aligned columns of a chunk [T] and its offsets (``pipeline/thd.py``),
      runs of every rank (``sharding/layouts.py``)
Out:  one ``RankView`` per rank (``pipeline/arrow_codec.py`` encodes it, ``pipeline/loader.py`` hands it out)

Shapes: T slots in the chunk, L local tokens, N slots' count, D real documents, R cp ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["RankView"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankView:
    """One rank's tokens of one chunk, and what it must know of the whole chunk."""

    input_ids: npt.NDArray[np.int32]
    """int32 [L]"""
    labels: npt.NDArray[np.int32]
    """int32 [L], the next token of each token; -100 = ignore."""
    position_ids: npt.NDArray[np.int32]
    """int32 [L], position within the piece (or the document, ``positions: continue``); padding has 0."""
    padding_mask: npt.NDArray[np.bool_]
    """bool [L], True = padding."""
    cu_seqlens: npt.NDArray[np.int32]
    """int32 [N + 1], real offsets of the whole chunk, the same on every rank."""
    cu_seqlens_padded: npt.NDArray[np.int32]
    """int32 [N + 1], slot offsets of the whole chunk; the last one is T."""
    documents: npt.NDArray[np.int64]
    """int64 [D], one id per piece of the whole chunk, slot order; tail slots and skipped pieces have none."""
    local_supervised: int
    """Labels of this view that are not -100."""
    extras: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further token-aligned columns [L] that came with a BSHD batch."""

    @property
    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by their ``Batch.tensors`` names, in numpy."""
        return {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "padding_mask": self.padding_mask,
            "cu_seqlens": self.cu_seqlens,
            "cu_seqlens_padded": self.cu_seqlens_padded,
            **self.extras,
        }
