"""Where views come from: two small contracts, whatever lies behind them.

In:   a plan with its corpora (``pipeline/plan_source.py``), pre-sharded files (``pipeline/store.py``), or a
      service (``pipeline/feed_source.py``)
Out:  per step its facts, per pack the view of one cp rank (``pipeline/views.py``)

``RankSource`` is what a trainer rank needs: its own share. ``ViewSource`` has the whole run at hand as well.
All implementations give the same bytes for the same plan, layout and cp size (law L1). A view is a pure
function of (step, pack, cp rank): asking twice, or in any order, changes nothing.

Shapes: K packs in a step, P pieces in a pack, S source corpora.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from ringfeed.pipeline.block_fetcher import DigestComparer
    from ringfeed.pipeline.laid_pack import LaidPack
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.step_packs import Pieces
    from ringfeed.pipeline.step_share import StepShare
    from ringfeed.pipeline.views import RankView

__all__ = ["NO_OVERLAY", "BuildSource", "Overlay", "PackView", "RankSource", "StepFacts", "ViewSource"]

NO_OVERLAY = ""
"""The overlay digest of a source that skips no document."""


class Overlay(Protocol):
    """A skip list: documents whose slots stay and whose tokens become padding."""

    @property
    def digest(self) -> str:
        """Hash of the list; never ``NO_OVERLAY``."""
        ...

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """int64 [D], the global ids that the list names."""
        ...

    def skipped(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of ``documents`` (global ids, int64 [P]) the list names, bool [P]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepFacts:
    """What every rank must know of a step, without any token."""

    step: int
    slates: npt.NDArray[np.int32]
    """int32 [K], slate of each pack within the step."""
    costs: npt.NDArray[np.int64]
    """int64 [K], as planned: an overlay does not move packs between ranks."""
    slots: npt.NDArray[np.int64]
    """int64 [K], T of each pack."""
    supervised: npt.NDArray[np.int64]
    """int64 [K, S], supervised tokens of each pack and source corpus, after the overlay."""
    chain: str
    """Hash chain value of this step, hex."""

    @property
    def num_packs(self) -> int:
        """K; the last step of a plan may have fewer than ``packs_per_step``."""
        return len(self.slates)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackView:
    """One cp rank's view of one pack, and the pieces it was made from."""

    view: RankView
    pieces: Pieces
    """In slot order, skipped ones included; none for the all-padding pack."""


class RankSource(Protocol):
    """Gives one trainer rank its share of a run, in any order."""

    @property
    def spec(self) -> ViewSpec:
        """How packs become views: layout, cp size, slots of a pack, pad id."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of the plan; those so far, while it is growing."""
        ...

    @property
    def is_growing(self) -> bool:
        """Whether a service still plans: ``num_steps`` and ``max_slots()`` are those so far."""
        ...

    @property
    def window_bytes(self) -> int:
        """Bytes that the source may hold for what comes next; 0 where nothing is fetched ahead."""
        ...

    @property
    def comparer(self) -> DigestComparer | None:
        """Who knows what other ranks of this run train on, if anybody does."""
        ...

    @property
    def packs_per_step(self) -> int: ...

    @property
    def recipe_fingerprint(self) -> str: ...

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the S corpora, in command order."""
        ...

    @property
    def replaced_steps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of steps (first, end) that other ones took the place of when the plan was extended."""
        ...

    @property
    def overlay_digest(self) -> str:
        """Digest of the skip list that the views were made with, or ``NO_OVERLAY``."""
        ...

    def chain(self, step: int) -> str:
        """Return the hash chain value after ``step``; -1 gives the one before the first step."""
        ...

    def max_slots(self) -> int:
        """Return the largest N (slots of a pack, its tail slot included) over the run."""
        ...

    def has_step(self, step: int) -> bool:
        """Return whether the plan has ``step``; waits for the answer while a service still plans.

        Raises:
            TimeoutError: if the plan does not get there.
        """
        ...

    def wait_for(self, step: int, micro_batch: int, *, stop: threading.Event) -> bool:
        """Wait until a micro-batch can be made without further waiting. Files and plans never wait.

        It also says where the consumer stands: a service sends ahead from here on. A wait that takes long
        is told, and in the end it fails, with who holds what (law L11).

        Returns:
            False if the plan ends before ``step``, or once ``stop`` is set.

        Raises:
            TimeoutError: if nothing comes.
        """
        ...

    def step_share(self, step: int, place: RankPlace) -> StepShare:
        """Return what the dp rank of ``place`` must know of ``step``.

        Raises:
            ValueError: if there is no such step, or the place does not fit.
            CorruptDataError: if the facts are damaged.
        """
        ...

    def rank_view(self, step: int, pack: int | None, *, cp_rank: int) -> RankView:
        """Return the view that ``cp_rank`` has of ``pack``; None gives the all-padding pack.

        The arrays are read-only for the caller and valid until the next call: copy what must last.

        Raises:
            ValueError: if there is no such step, pack or rank.
            CorruptDataError: if the tokens behind the view are damaged.
        """
        ...

    def close(self) -> None:
        """Give back files and buffers; a closed source answers nothing."""
        ...


class BuildSource(Protocol):
    """Gives what blocks are built from: the steps of a run that can be asked for now. From any thread."""

    @property
    def spec(self) -> ViewSpec: ...

    @property
    def num_steps(self) -> int:
        """As far as the last ``refresh`` saw."""
        ...

    @property
    def is_growing(self) -> bool: ...

    @property
    def packs_per_step(self) -> int: ...

    @property
    def slate_size(self) -> int: ...

    @property
    def recipe_fingerprint(self) -> str: ...

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def replaced_steps(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def num_documents(self) -> int: ...

    @property
    def overlay_digest(self) -> str: ...

    def max_slots(self) -> int: ...

    def refresh(self) -> None: ...

    def step_share(self, step: int, place: RankPlace) -> StepShare: ...

    def lay_pack(self, step: int, pack: int) -> LaidPack: ...

    def fill_ranks(
        self, laid: LaidPack, ids: Sequence[npt.NDArray[np.int32]], labels: Sequence[npt.NDArray[np.int32]]
    ) -> list[int]: ...

    def close(self) -> None: ...


class ViewSource(RankSource, Protocol):
    """Gives any view of a run."""

    def refresh(self) -> None:
        """See which steps have come since the last look; files, and plans that are finished, have all.

        Raises:
            ValueError: if a growing plan was given up.
            CorruptDataError: if what has come is damaged.
        """
        ...

    @property
    def slate_size(self) -> int: ...

    @property
    def num_documents(self) -> int:
        """Documents of all corpora: global ids are below it."""
        ...

    def step_facts(self, step: int) -> StepFacts:
        """Return what is known of ``step`` without its tokens.

        Raises:
            ValueError: if there is no such step.
            CorruptDataError: if the stored facts are damaged.
        """
        ...

    def pack_view(self, step: int, pack: int | None, *, cp_rank: int) -> PackView:
        """Do what ``rank_view`` does, and return the pieces of the pack with it."""
        ...

    def lay_pack(self, step: int, pack: int) -> LaidPack:
        """Return how ``pack`` lies on all ranks; the caller may keep it. Errors as ``rank_view``."""
        ...

    def fill_ranks(
        self, laid: LaidPack, ids: Sequence[npt.NDArray[np.int32]], labels: Sequence[npt.NDArray[np.int32]]
    ) -> list[int]:
        """Write every cp rank's ids and labels of a pack, reading and checking its tokens once.

        Args:
            laid: from ``lay_pack`` of this source.
            ids: per cp rank int32 [L], contiguous, filled with the bytes that ``rank_view`` has.
            labels: likewise.

        Returns:
            ``local_supervised`` of each rank.

        Raises:
            CorruptDataError: if the tokens are damaged.
        """
        ...
