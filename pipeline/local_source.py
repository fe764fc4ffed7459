"""What holds for every source that has the whole run at hand: it never waits, and deals steps out itself.

In:   the facts and views of a ``ViewSource`` (``pipeline/view_source.py``)
Out:  the rest of ``RankSource``, for ``pipeline/plan_source.py`` and ``pipeline/store.py``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfeed.pipeline.step_share import StepShare, deal_step

if TYPE_CHECKING:
    import threading

    from ringfeed.pipeline.block_fetcher import DigestComparer
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.view_source import ViewSource
    from ringfeed.pipeline.views import RankView

__all__ = ["LocalSource"]


class LocalSource:
    """Base of the sources on disk. It has no state."""

    __slots__ = ()

    @property
    def is_growing(self) -> bool:
        return False

    def refresh(self) -> None:
        pass

    @property
    def comparer(self) -> DigestComparer | None:
        return None

    @property
    def window_bytes(self) -> int:
        return 0

    def has_step(self: ViewSource, step: int) -> bool:
        return 0 <= step < self.num_steps

    def wait_for(self: ViewSource, step: int, micro_batch: int, *, stop: threading.Event) -> bool:  # noqa: ARG002
        return self.has_step(step)

    def step_share(self: ViewSource, step: int, place: RankPlace) -> StepShare:
        return deal_step(self.step_facts(step), self, place)

    def rank_view(self: ViewSource, step: int, pack: int | None, *, cp_rank: int) -> RankView:
        return self.pack_view(step, pack, cp_rank=cp_rank).view
