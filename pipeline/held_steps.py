"""Steps that come once and are held until every rank has had them: what a feed of converted batches serves.

In:   per step the views of each row's cp ranks (``pipeline/conversion.py``)
Out:  a ``BuildSource`` (``pipeline/view_source.py``), from which blocks are built like those of a plan

A row is a pack. Unlike a plan's, a step cannot be had again once it was let go; which ones may go is told by
the owner. Packs cost the same, so that they are dealt in row order.

Shapes: K rows in a step, P sequences, R cp ranks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.chain import next_link
from ringfeed.pipeline.laid_pack import lay_pack
from ringfeed.pipeline.step_packs import Pieces, StepPacks
from ringfeed.pipeline.step_share import deal_step
from ringfeed.pipeline.view_source import NO_OVERLAY, StepFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ringfeed.pipeline.laid_pack import LaidPack
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.step_share import StepShare
    from ringfeed.pipeline.views import RankView

__all__ = ["HeldSteps"]

# Sequences are numbered as they come; how many there will be is not known.
_ANY_DOCUMENTS = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _HeldStep:
    """One step with everything that can be asked of it."""

    packs: StepPacks
    ranks: list[list[RankView]]
    """[K][R]; ids, labels and counts are used."""
    nbytes: int


class HeldSteps:
    """A window over steps. ``add`` and ``let_go`` are the owner's; the rest is for any thread."""

    def __init__(self, spec: ViewSpec, *, recipe_fingerprint: str, packs_per_step: int, name: str) -> None:
        """Hold nothing yet.

        Args:
            spec: how rows become views.
            recipe_fingerprint: of this one run: nobody else's steps are its own.
            packs_per_step: rows of a step; some may have fewer.
            name: of the one source, in counts.
        """
        self.spec = spec
        self.recipe_fingerprint = recipe_fingerprint
        self.packs_per_step = self.slate_size = packs_per_step
        self.sources = (name,)
        self.replaced_steps: tuple[tuple[int, int], ...] = ()
        self.num_documents = _ANY_DOCUMENTS
        self.overlay_digest = NO_OVERLAY
        self._lock = threading.Lock()
        self._steps: dict[int, _HeldStep] = {}
        self._first = 0
        self._num_steps = 0
        self._num_documents = 0
        self._chain = recipe_fingerprint
        self._max_slots = 1
        self._is_growing = True
        self.bytes_held = 0
        """Ids and labels of all ranks."""

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def first_step(self) -> int:
        """The first step that is still held."""
        return self._first

    @property
    def is_growing(self) -> bool:
        return self._is_growing

    def max_slots(self) -> int:
        return self._max_slots

    def refresh(self) -> None:
        """Do nothing: what was added is there."""

    def add(self, rows: list[list[RankView]]) -> None:
        """Add the next step, per row the views of all cp ranks.

        Raises:
            ValueError: if it has more rows than a step, or no supervised token.
        """
        step = self._num_steps
        if len(rows) > self.packs_per_step:
            raise ValueError(
                f"batch {step} has {len(rows)} rows, a step has {self.packs_per_step} as the first batch "
                "had; give batches of one size (a smaller one is filled up with padding)"
            )
        packs = self._packs_of(step, rows)
        if packs.supervised is not None and not packs.supervised.any():
            raise ValueError(f"batch {step} has no supervised token, so no loss; leave it out")
        nbytes = sum(view.input_ids.nbytes + view.labels.nbytes for views in rows for view in views)
        with self._lock:
            self._steps[step] = _HeldStep(packs=packs, ranks=rows, nbytes=nbytes)
            self._chain = packs.chain
            self._num_documents += len(packs.pieces)
            # Each row may end in a tail slot.
            self._max_slots = max(self._max_slots, int(np.diff(packs.offsets).max()) + 1)
            self.bytes_held += nbytes
            self._num_steps += 1

    def end(self) -> None:
        """Say that no step follows."""
        self._is_growing = False

    def let_go(self, end: int) -> bool:
        """Drop the first step if it is before ``end``; return whether there was one."""
        with self._lock:
            if self._first >= min(end, self._num_steps):
                return False
            self.bytes_held -= self._steps.pop(self._first).nbytes
            self._first += 1
            return True

    def step_share(self, step: int, place: RankPlace) -> StepShare:
        packs = self._step(step).packs
        facts = StepFacts(
            step=step,
            slates=packs.slates,
            costs=packs.costs,
            slots=np.full(packs.num_packs, self.spec.pack_slots, dtype=np.int64),
            supervised=np.zeros((0, 1), dtype=np.int64) if packs.supervised is None else packs.supervised,
            chain=packs.chain,
        )
        return deal_step(facts, self, place)

    def lay_pack(self, step: int, pack: int) -> LaidPack:
        packs = self._step(step).packs
        return lay_pack(packs.pack(pack), place=(step, pack), spec=self.spec, skipped=None)

    def fill_ranks(
        self, laid: LaidPack, ids: Sequence[npt.NDArray[np.int32]], labels: Sequence[npt.NDArray[np.int32]]
    ) -> list[int]:
        views = self._step(laid.step).ranks[laid.pack]
        for view, own_ids, own_labels in zip(views, ids, labels, strict=True):
            own_ids[:] = view.input_ids
            own_labels[:] = view.labels
        return [view.local_supervised for view in views]

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._steps.clear()
            self._first = self._num_steps
            self.bytes_held = 0

    def _step(self, step: int) -> _HeldStep:
        with self._lock:
            held = self._steps.get(step)
            if held is None:
                raise ValueError(
                    f"step {step} is not held: the first one that is, is {self._first}, of {self._num_steps} "
                    "so far. Batches that were converted as they came cannot be had again; convert them "
                    "ahead (ringfeed convert) where a run has to resume"
                )
            return held

    def _packs_of(self, step: int, rows: list[list[RankView]]) -> StepPacks:
        lengths = [np.diff(views[0].cu_seqlens).astype(np.int64) for views in rows]
        lengths = [row[row > 0] for row in lengths]
        total = sum(map(len, lengths))
        pieces = Pieces(
            np.arange(self._num_documents, self._num_documents + total, dtype=np.int64),
            np.zeros(total, dtype=np.int64),
            np.concatenate([np.empty(0, dtype=np.int64), *lengths]),
            np.zeros(total, dtype=np.int32),
        )
        packs = StepPacks(
            step=step,
            slates=np.zeros(len(rows), dtype=np.int32),
            costs=np.ones(len(rows), dtype=np.int64),
            supervised=np.array([[self._supervised(views)] for views in rows], dtype=np.int64),
            offsets=np.cumsum([0, *map(len, lengths)], dtype=np.int64),
            pieces=pieces,
            chain="",
        )
        return replace(packs, chain=next_link(self._chain, packs))

    def _supervised(self, views: list[RankView]) -> int:
        # Every rank of layout identity has all of them.
        counted = views[:1] if self.spec.layout.name == "identity" else views
        return sum(view.local_supervised for view in counted)
