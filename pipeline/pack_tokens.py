"""The tokens and labels of one pack, read out of the documents' own memory: the one way to fill them in.

In:   pieces in their slots (``pack_slots.py``), the corpora that they are cut from, masks included
Out:  ids and labels of any runs of the pack (``plan_source.py`` fills ranks' views, ``thd.py`` whole packs)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfeed.pipeline.corpus_masks import piece_masks
from ringfeed.pipeline.mask_kernels import mask_labels
from ringfeed.pipeline.pack_slots import token_table
from ringfeed.pipeline.view_kernels import fill_tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ringfeed.pipeline.corpus_set import CorpusSet
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.pack_slots import PackSlots
    from ringfeed.pipeline.step_packs import Pieces
    from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["PackTokens"]


class PackTokens:
    """Where the tokens of a pack lie, and which of them are trained on. Keeps them mapped while it lives."""

    def __init__(self, pieces: Pieces, slots: PackSlots, *, corpora: CorpusSet, spec: ViewSpec) -> None:
        """Find the tokens; they are read, not checked (``CorpusSet.check_documents``).

        Raises:
            ValueError: if a piece is no part of its document.
            CorruptDataError: if a document lies outside its token file, or what the tables say of its mask
                changed.
        """
        self._offsets = slots.cu_seqlens_padded
        self._starts = pieces.starts
        self._pad_id = spec.pad_id
        self._tokens = corpora.piece_tokens(pieces.documents, pieces.starts, pieces.lengths)
        self._table = token_table(pieces, slots, tokens=self._tokens, boundary=spec.boundary)
        self._masks = piece_masks(corpora, pieces.documents)

    def fill(self, runs: Int64Array, ids: npt.NDArray[np.int32], labels: npt.NDArray[np.int32]) -> int:
        """Fill the ids and labels of ``runs``; return how many labels are not ``IGNORE``.

        Args:
            runs: [K, 2] start and length in the pack, in local order.
            ids: int32 [L], filled.
            labels: int32 [L], filled.
        """
        supervised = fill_tokens(runs, self._offsets, self._table, self._pad_id, ids, labels)
        if self._masks is not None:
            supervised = mask_labels(runs, self._offsets, self._starts, self._masks.as_tuple(), labels)
        return int(supervised)
