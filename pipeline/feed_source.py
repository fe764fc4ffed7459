"""One rank's share of a run, fetched from a service a window of blocks ahead.

In:   ``EncodedBlock``s from a ``BlockFetcher`` (``pipeline/block_fetcher.py``)
Out:  shares of steps and views, as a ``RankSource`` (``pipeline/view_source.py``)

The rank owns the cursor: ``wait_for`` says where it stands, the window follows (``pipeline/feed_window.py``),
and a place outside of it drops the window. The service keeps nothing of a rank, so it may die and come back.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.block_fetcher import DigestComparer
from ringfeed.pipeline.block_reader import ReadBlock, read_block
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS
from ringfeed.pipeline.feed_stall import Patience, Stall, StallWatch
from ringfeed.pipeline.feed_window import BlockGrid, FeedWindow, Slot
from ringfeed.pipeline.loader_metrics import NoMetrics, StallCause
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.views import padding_view

if TYPE_CHECKING:
    from ringfeed.pipeline.block_fetcher import BlockFetcher
    from ringfeed.pipeline.loader_metrics import LoaderMetrics
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.step_block import EncodedBlock
    from ringfeed.pipeline.step_share import StepShare
    from ringfeed.pipeline.views import RankView

__all__ = ["DEFAULT_WINDOW_BYTES", "FeedSource"]

DEFAULT_WINDOW_BYTES = 128 << 20
"""Blocks of 8 MB for a second or so of any usual consumer."""
# How soon a wait notices that nobody wants it any more. A block that arrives ends it at once.
_NOTICE_SECONDS = 0.05
_LOG = logging.getLogger("ringfeed.feed")
_Wanted = tuple[int, str, StallCause]
"""A step, what of it, and what a wait for it is counted as."""


class FeedSource:
    """A ``RankSource`` over a service. One consumer at a time; two share a window and slow each other."""

    def __init__(
        self,
        fetcher: BlockFetcher,
        *,
        place: RankPlace,
        columns: tuple[str, ...] = BLOCK_COLUMNS,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        patience: Patience | None = None,
        metrics: LoaderMetrics | None = None,
    ) -> None:
        """Ask the service what it serves; no block is fetched yet.

        Args:
            fetcher: where blocks come from; ``close`` closes it.
            place: which rank this is.
            columns: what of each pack is wanted (``feed_request.BLOCK_COLUMNS``).
            window_bytes: for blocks that are here or under way; one is, whatever it takes.
            patience: when a wait is told, and when it fails.
            metrics: told of blocks, waits and retries.

        Raises:
            ValueError: if the place does not fit what the service serves.
        """
        self._fetcher = fetcher
        self._facts = fetcher.facts()
        self._fingerprint = self._facts.fingerprint
        self._patience = patience or Patience()
        self._metrics = metrics or NoMetrics()
        self._retries = 0
        self._facts.check_place(place)
        self.place = place
        self._grid = BlockGrid.of(self._facts, place, columns)
        self._window = FeedWindow(fetcher, self._grid, budget=window_bytes)
        self.window_bytes = window_bytes
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._asked_facts = time.monotonic()
        self.seconds_waited = 0.0
        """Time in which this rank had nothing to do, from opening on."""
        self.num_stalls = 0
        """Waits that took longer than ``Patience.warn_seconds``."""

    @property
    def spec(self) -> ViewSpec:
        return self._facts.spec

    @property
    def num_steps(self) -> int:
        return self._facts.num_steps

    @property
    def is_growing(self) -> bool:
        return self._facts.is_growing

    @property
    def comparer(self) -> DigestComparer | None:
        return self._fetcher if isinstance(self._fetcher, DigestComparer) else None

    @property
    def packs_per_step(self) -> int:
        return self._facts.packs_per_step

    @property
    def recipe_fingerprint(self) -> str:
        return self._facts.recipe_fingerprint

    @property
    def sources(self) -> tuple[str, ...]:
        return self._facts.sources

    @property
    def replaced_steps(self) -> tuple[tuple[int, int], ...]:
        return self._facts.replaced_steps

    @property
    def num_documents(self) -> int:
        """Documents of all corpora: global ids are below it."""
        return self._facts.num_documents

    @property
    def overlay_digest(self) -> str:
        return self._facts.overlay_digest

    def max_slots(self) -> int:
        return self._facts.max_slots

    def chain(self, step: int) -> str:
        return self.recipe_fingerprint if step == -1 else self._share(step).chain

    def has_step(self, step: int) -> bool:
        return step >= 0 and self._is_planned(step, self._closed)

    def wait_for(self, step: int, micro_batch: int, *, stop: threading.Event) -> bool:
        while not self._turn.acquire(timeout=_NOTICE_SECONDS):
            if stop.is_set():
                return False
        try:
            return self._is_planned(step, stop) and self._arrive(step, micro_batch, stop) is not None
        finally:
            self._turn.release()

    def step_share(self, step: int, place: RankPlace) -> StepShare:
        if replace(place, cp_rank=self.place.cp_rank) != self.place:
            raise ValueError(f"this source is for {self.place}, asked for the share of {place}; open another")
        return self._share(step)

    def rank_view(self, step: int, pack: int | None, *, cp_rank: int) -> RankView:
        if cp_rank != self.place.cp_rank:
            raise ValueError(
                f"cp_rank={cp_rank}: this source is for cp_rank={self.place.cp_rank}; open another"
            )
        if pack is None:
            return padding_view(self.spec, cp_rank=cp_rank)
        for block in self._window.blocks():
            if block.holds(step, pack):
                return block.view(step, pack)
        return self._fetch_now(step, pack).view(step, pack)

    @property
    def bytes_held(self) -> int:
        """Bytes of blocks that are here or under way, the latter as estimated."""
        return sum(self._window.bytes_held().values())

    def close(self) -> None:
        self._closed.set()
        self._window.forget()
        self._fetcher.close()

    def _is_planned(self, step: int, stop: threading.Event) -> bool:
        watch = StallWatch(self._patience, lambda waited: self._stall(waited, step, "to be planned"))
        try:
            while step >= self._facts.num_steps:
                if not self._facts.is_growing:
                    return False
                self._ask_facts()
                if step < self._facts.num_steps or not self._facts.is_growing:
                    continue
                watch.check()
                if stop.wait(self._patience.poll_seconds):
                    return False
            return True
        finally:
            self._count(watch, StallCause.PLANNER)

    def _arrive(self, step: int, micro_batch: int, stop: threading.Event) -> ReadBlock | None:
        """Return the block with a micro-batch once it is here; None once ``stop`` is set."""
        end = self._grid.index(self._facts.num_steps, 0)
        slot = self._window.move_to(self._grid.index(step, micro_batch), end=end)
        if slot.block is None:
            wanted = (step, f"micro-batch {micro_batch}", StallCause.BUILDER)
            slot.block = self._receive(slot, wanted, stop)
        is_due = time.monotonic() - self._asked_facts > self._patience.poll_seconds
        if self._facts.is_growing and is_due and self._window.asked_to >= end:
            self._ask_facts()
        return slot.block

    def _receive(self, slot: Slot, wanted: _Wanted, stop: threading.Event) -> ReadBlock | None:
        """Wait for what was asked for, and check it; a damaged block is asked for once more."""
        try:
            encoded = self._wait(slot, wanted, stop)
            try:
                return None if encoded is None else read_block(encoded, slot.request, self._facts)
            except CorruptDataError as error:
                _LOG.warning("%s; it is asked for again", error)
            self._window.ask_again(slot)
            self._metrics.retries(1)
            encoded = self._wait(slot, wanted, stop)
            return None if encoded is None else read_block(encoded, slot.request, self._facts)
        except Exception:
            # So that whoever tries again asks again.
            self._window.forget()
            raise

    def _wait(self, slot: Slot, wanted: _Wanted, stop: threading.Event) -> EncodedBlock | None:
        step, what, cause = wanted
        watch = StallWatch(self._patience, lambda waited: self._stall(waited, step, what))
        try:
            while not slot.future.done() and not stop.is_set():
                wait([slot.future], timeout=_NOTICE_SECONDS)
                watch.check()
            encoded = None if stop.is_set() else slot.future.result()
        except CancelledError:
            raise ValueError("the source was closed while it waited for a block") from None
        finally:
            self._count(watch, cause)
        if encoded is not None:
            self._metrics.block(nbytes=encoded.nbytes)
        return encoded

    def _share(self, step: int) -> StepShare:
        for block in self._window.blocks():
            if step in block.shares:
                return block.shares[step]
        if not self.has_step(step):
            raise ValueError(f"step {step} is not served: there are steps 0 to {self.num_steps - 1}")
        request = replace(
            self._grid.request(self._grid.index(step, 0), 1 << 40), columns=(), num_micro_batches=1
        )
        slot = Slot(request, 0, self._fetcher.fetch(request))
        answer = self._receive(slot, (step, "its facts", StallCause.FACTS), self._closed)
        if answer is None:
            raise ValueError("the source is closed; open another")
        return answer.shares[step]

    def _fetch_now(self, step: int, pack: int) -> ReadBlock:
        """Get the block with a pack that nobody waited for."""
        at = np.argwhere(self._share(step).packs == pack)
        if not len(at):
            raise ValueError(f"step {step} has no pack {pack} for dp rank {self.place.dp_rank}")
        block = self._arrive(step, int(at[0, 0]), self._closed)
        if block is None:
            raise ValueError("the source is closed; open another")
        return block

    def _ask_facts(self) -> None:
        facts = self._fetcher.facts()
        if facts.fingerprint != self._fingerprint:
            raise ValueError(
                f"the service serves run {facts.fingerprint} now, this rank follows {self._fingerprint}; "
                "start a service of the same plan, layout and skip list again"
            )
        self._facts = facts
        self._asked_facts = time.monotonic()

    def _stall(self, waited: float, step: int, what: str) -> Stall:
        status = self._fetcher.status()
        return Stall(
            seconds=waited,
            step=step,
            what=what,
            place=self.place,
            asked=status.asked,
            bytes_held={**self._window.bytes_held(), **status.bytes_held},
        )

    def _count(self, watch: StallWatch, cause: StallCause) -> None:
        seconds, num_stalls = watch.seconds, int(watch.num_warnings > 0)
        self.seconds_waited += seconds
        self.num_stalls += num_stalls
        self._metrics.wait(cause, seconds=seconds, num_stalls=num_stalls)
        retries = self._fetcher.status().retries
        self._metrics.retries(retries - self._retries)
        self._retries = retries
