"""Views made in the trainer's own process, from a plan and its corpora.

In:   ``Plan`` (``pipeline/plan.py``), ``CorpusSet`` (``pipeline/corpus_set.py``), ``ViewSpec``
Out:  ``PackView``s of any rank (``pipeline/view_source.py``), filled straight from the mapped documents

A rank copies its own runs and nothing else: no chunk is ever built. Whole documents, and their rows of the
documents table, are hashed before they are read, documents anew in each step: opening reads neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.corpus_masks import piece_supervised
from ringfeed.pipeline.laid_pack import LaidPack, lay_pack
from ringfeed.pipeline.local_source import LocalSource
from ringfeed.pipeline.opening import check_footprints
from ringfeed.pipeline.pack_slots import lay_out
from ringfeed.pipeline.pack_tokens import PackTokens
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.thd import thd_from_pieces
from ringfeed.pipeline.view_kernels import fill_positions
from ringfeed.pipeline.view_source import NO_OVERLAY, Overlay, PackView, StepFacts
from ringfeed.pipeline.views import RankView

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    import numpy.typing as npt

    from ringfeed.pipeline.corpus_set import CorpusSet
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.pack_slots import PackSlots
    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.step_packs import StepPacks
    from ringfeed.pipeline.thd import ThdChunk
    from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["PlanSource"]


class PlanSource(LocalSource):
    """A ``ViewSource`` over a plan. One thread at a time."""

    def __init__(
        self, plan: Plan, corpora: CorpusSet, *, spec: ViewSpec, overlay: Overlay | None = None
    ) -> None:
        """Take what is open already; ``close`` closes the corpora.

        Args:
            plan: made from ``corpora`` (``Plan.open_corpora`` checks that).
            corpora: the documents.
            spec: from ``opening.open_spec``.
            overlay: documents to leave out; it may be replaced between steps.
        """
        self.spec = spec
        self.overlay = overlay
        self._plan = plan
        self._corpora = corpora
        self._step: StepPacks | None = None
        self._slots = np.empty(0, dtype=np.int64)
        self._checked: set[int] = set()
        """Documents that were hashed in this step; in the next one they may have changed on the disk."""
        self._buffers: _Buffers | None = None
        self.tokens_copied = 0
        """Tokens that were copied out of documents so far, padding not counted."""

    @property
    def num_steps(self) -> int:
        return self._plan.num_steps

    @property
    def is_growing(self) -> bool:
        return self._plan.is_growing

    def refresh(self) -> None:
        self._plan.refresh()

    def has_step(self, step: int) -> bool:
        return self._plan.wait_for_step(step)

    def wait_for(self, step: int, micro_batch: int, *, stop: threading.Event) -> bool:
        del micro_batch
        return self._plan.wait_for_step(step, stop=stop)

    @property
    def packs_per_step(self) -> int:
        return self._plan.packs_per_step

    @property
    def slate_size(self) -> int:
        return self._plan.slate_size

    @property
    def recipe_fingerprint(self) -> str:
        return self._plan.recipe_fingerprint

    @property
    def sources(self) -> tuple[str, ...]:
        return self._corpora.names

    @property
    def replaced_steps(self) -> tuple[tuple[int, int], ...]:
        return self._plan.replaced_steps

    @property
    def num_documents(self) -> int:
        return self._corpora.num_documents

    @property
    def overlay_digest(self) -> str:
        return NO_OVERLAY if self.overlay is None else self.overlay.digest

    def chain(self, step: int) -> str:
        return self._plan.chain(step)

    def max_slots(self) -> int:
        # Every pack may have a tail slot; the all-padding pack is one slot.
        return self._plan.largest_num_pieces + 1

    def step_facts(self, step: int) -> StepFacts:
        packs = self._step_packs(step)
        supervised = packs.supervised
        if supervised is None:
            supervised = self._supervised_of(packs, np.ones(len(packs.pieces), dtype=np.bool_))
        if self.overlay is not None:
            skipped = self.overlay.skipped(packs.pieces.documents)
            supervised = supervised - self._supervised_of(packs, skipped)
        return StepFacts(
            step=step,
            slates=packs.slates,
            costs=packs.costs,
            slots=self._slots,
            supervised=supervised,
            chain=packs.chain,
        )

    def may_empty_a_step(self) -> bool:
        """Could the overlay leave a step without a supervised token? False is sure, and known at once."""
        least = self._plan.least_supervised
        if self.overlay is None:
            return False
        # If all that it names stood in one step, in every epoch.
        most = int(self._corpora.lengths(self.overlay.documents).sum()) * self._plan.num_epochs
        return self.is_growing or least is None or most >= least

    def pack_view(self, step: int, pack: int | None, *, cp_rank: int) -> PackView:
        pieces, skipped = self._pieces(step, pack)
        slots = lay_out(pieces, spec=self.spec, skipped=skipped)
        index_map = self.spec.layout.index_map(
            slots.cu_seqlens_padded,
            cp_size=self.spec.cp_size,
            cp_rank=cp_rank,
            cu_seqlens=slots.cu_seqlens,
        )
        buffers = self._buffers_for(len(index_map))
        supervised = self._fill(pieces, slots, index_map.runs, buffers)
        view = RankView(
            input_ids=buffers.ids,
            labels=buffers.labels,
            position_ids=buffers.positions,
            padding_mask=buffers.mask,
            cu_seqlens=slots.cu_seqlens,
            cu_seqlens_padded=slots.cu_seqlens_padded,
            documents=slots.documents,
            local_supervised=supervised,
        )
        return PackView(view=view, pieces=pieces)

    def lay_pack(self, step: int, pack: int) -> LaidPack:
        pieces, skipped = self._pieces(step, pack)
        return lay_pack(pieces, place=(step, pack), spec=self.spec, skipped=skipped)

    def fill_ranks(
        self, laid: LaidPack, ids: Sequence[npt.NDArray[np.int32]], labels: Sequence[npt.NDArray[np.int32]]
    ) -> list[int]:
        tokens = self._checked_tokens(laid.pieces, laid.slots)
        return [
            tokens.fill(index_map.runs, *targets)
            for index_map, *targets in zip(laid.maps, ids, labels, strict=True)
        ]

    def chunk(self, step: int, pack: int) -> tuple[Pieces, ThdChunk]:
        """Return a whole pack, checked: what all ranks' views of it are cut from. Errors as ``pack_view``."""
        pieces, skipped = self._pieces(step, pack)
        kept = pieces.documents if skipped is None else pieces.documents[~skipped]
        self._check_documents(kept)
        return pieces, thd_from_pieces(pieces, spec=self.spec, corpora=self._corpora, skipped=skipped)

    @property
    def bytes_held(self) -> int:
        """Bytes of the buffers that a view is made in."""
        return 0 if self._buffers is None else self._buffers.nbytes

    def close(self) -> None:
        self._step = None
        self._buffers = None
        self._corpora.close()

    def _pieces(self, step: int, pack: int | None) -> tuple[Pieces, npt.NDArray[np.bool_] | None]:
        """Return the pieces of a pack, and which of them the overlay leaves out."""
        packs = self._step_packs(step)
        if pack is None:
            return Pieces.concat([]), None
        if not 0 <= pack < packs.num_packs:
            raise ValueError(f"step {step} has no pack {pack}: it has packs 0 to {packs.num_packs - 1}")
        pieces = packs.pack(pack)
        return pieces, None if self.overlay is None else self.overlay.skipped(pieces.documents)

    def _fill(self, pieces: Pieces, slots: PackSlots, runs: Int64Array, buffers: _Buffers) -> int:
        supervised = self._checked_tokens(pieces, slots).fill(runs, buffers.ids, buffers.labels)
        offsets = slots.cu_seqlens_padded
        fill_positions(
            runs, offsets, slots.real_lengths, slots.first_positions, buffers.positions, buffers.mask
        )
        self.tokens_copied += len(buffers.mask) - int(np.count_nonzero(buffers.mask))
        return supervised

    def _checked_tokens(self, pieces: Pieces, slots: PackSlots) -> PackTokens:
        self._check_documents(slots.documents)
        return PackTokens(pieces, slots, corpora=self._corpora, spec=self.spec)

    def _check_documents(self, documents: Int64Array) -> None:
        """Hash each document that was not hashed in this step, and its row of the table."""
        new = np.array([one for one in dict.fromkeys(documents.tolist()) if one not in self._checked])
        touched = new.astype(np.int64)
        self._corpora.check_rows(touched)
        self._corpora.check_documents(touched)
        self._checked.update(touched.tolist())

    def _step_packs(self, step: int) -> StepPacks:
        if self._step is None or self._step.step != step:
            packs = self._plan.step_packs(step)
            self._slots = self._checked_slots(packs)
            self._step = packs
            self._checked.clear()
        return self._step

    def _checked_slots(self, packs: StepPacks) -> Int64Array:
        """Return T of each pack, int64 [K]; refuse a step with one over the budget, on every rank alike."""
        footprints = packs.footprints(multiple=self.spec.multiple)
        if (footprints > self.spec.pack_slots).any():
            check_footprints(self._plan, self.spec)
        return self.spec.pack_lengths.of(footprints)

    def _buffers_for(self, num_local: int) -> _Buffers:
        if self._buffers is None or len(self._buffers.ids) < num_local:
            self._buffers = _Buffers.of(num_local)
        # Uneven shares and variable packs have another L in every view.
        return self._buffers.first(num_local)

    def _supervised_of(self, packs: StepPacks, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return the supervised tokens of the ``chosen`` pieces (bool [P]) per pack and source, [K, S]."""
        counts = np.zeros((packs.num_packs, len(self.sources)), dtype=np.int64)
        pieces = packs.pieces.take(np.flatnonzero(chosen))
        if len(pieces):
            self._corpora.check_rows(pieces.documents)
            owners = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))[chosen]
            found = piece_supervised(self._corpora, pieces, boundary=self.spec.boundary)
            np.add.at(counts, (owners, self._corpora.source_of(pieces.documents)), found)
        return counts


@dataclass(frozen=True, slots=True, eq=False)
class _Buffers:
    """Where one view is made, again and again."""

    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, num_local: int) -> _Buffers:
        ids, labels, positions = (np.empty(num_local, dtype=np.int32) for _ in range(3))
        return cls(ids, labels, positions, np.empty(num_local, dtype=np.bool_))

    def first(self, num_local: int) -> _Buffers:
        """Return the first ``num_local`` entries, over the same memory."""
        part = slice(num_local)
        return _Buffers(self.ids[part], self.labels[part], self.positions[part], self.mask[part])

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.labels.nbytes + self.positions.nbytes + self.mask.nbytes
