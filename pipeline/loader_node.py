"""Batches in order from a cursor on, built ahead in a thread, as nodes of ``torchdata.nodes``.

In:   a ``BatchBuilder`` (``pipeline/batch_builder.py``) and a position to start from
Out:  ``LoaderNode``, the iterator behind ``Loader`` and a node for a torchdata graph

    BuilderNode (in the thread)  ->  torchdata's Prefetcher  ->  LoaderNode (in the trainer)

The cursor moves when a batch is handed out, never when it is built. Dropping a node ends its thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchdata.nodes import BaseNode, Prefetcher

from ringfeed.pipeline.digest_check import RankMismatchError
from ringfeed.pipeline.loader_metrics import NoMetrics
from ringfeed.pipeline.loader_state import LoaderState, check_state, read_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfeed.pipeline.batch import Batch
    from ringfeed.pipeline.batch_builder import BatchBuilder, BuiltBatch
    from ringfeed.pipeline.digest_check import BatchCheck
    from ringfeed.pipeline.loader_metrics import LoaderMetrics

__all__ = ["LoaderNode", "Position"]


class Position:
    """Where a run stands: the next batch on every rank. Moved by one node at a time."""

    __slots__ = ("_builder", "_chain", "_loaded", "micro_batch", "step", "ticket")

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self._loaded: LoaderState | None = None
        self._chain: str | None = None
        self.step = 0
        self.micro_batch = 0
        self.ticket = 0
        """Counts who may move this position: an iteration that a later one overtook may not."""

    def move_past(self, built: BuiltBatch) -> None:
        """Note that this batch was handed out."""
        self._loaded = None
        # Kept here, so that saving asks the source nothing: it may be waiting for a service just then.
        self._chain = built.chain
        self.step, self.micro_batch = _next_place(
            built.step, built.micro_batch, self._builder.num_micro_batches
        )

    def rewind(self) -> None:
        """Go to the first batch of the plan."""
        self._loaded = self._chain = None
        self.step = self.micro_batch = 0

    def load(self, values: Mapping[str, Any]) -> None:
        """Go to where ``values``, a ``save()`` of any rank, stands.

        Raises:
            ValueError: if it is no state, or this run cannot continue from it (``loader_state.py``).
        """
        state = read_state(values)
        place = self._builder.place
        with self._builder.lock:
            check_state(
                state, self._builder.source, dp_size=place.dp_size, packs_per_chunk=place.packs_per_chunk
            )
        self.step, self.micro_batch = state.step, state.micro_batch
        # Kept as it is until a batch is handed out: at a border the skip list may have changed, and
        # the state still tells with which one the batches before it were made.
        self._loaded = state

    def save(self) -> dict[str, Any]:
        """Return a JSON-able state, the same on every rank."""
        if self._loaded is not None:
            return self._loaded.to_dict()
        source, place = self._builder.source, self._builder.place
        inside = self.micro_batch > 0
        state = LoaderState(
            recipe=source.recipe_fingerprint,
            step=self.step,
            micro_batch=self.micro_batch,
            chain=source.chain(-1) if self._chain is None else self._chain,
            overlay=source.overlay_digest,
            dp_size=place.dp_size if inside else None,
            packs_per_chunk=place.packs_per_chunk if inside else None,
        )
        return state.to_dict()


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception on its way from the thread to the consumer."""

    error: Exception


class _BuilderNode(BaseNode[Any]):  # type: ignore[misc]
    """Builds batches one after the other from a start on."""

    def __init__(self, builder: BatchBuilder, step: int, micro_batch: int) -> None:
        super().__init__()
        self._builder = builder
        self.stop = threading.Event()
        """Set when nobody wants the next batch any more: a wait for it ends."""
        self._start = (step, micro_batch)
        self._place = self._start

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._place = self._start

    def next(self) -> BuiltBatch | _Failure:
        step, micro_batch = self._place
        try:
            # Not under the builder's lock: a wait may be long, and closing or moving on must not wait for it.
            ready = self._builder.source.wait_for(step, micro_batch, stop=self.stop)
            built = self._builder.build(step, micro_batch) if ready else None
        except Exception as error:
            # torchdata would make a new exception of it, with the thread's traceback as its text.
            return _Failure(error)
        if built is None:
            raise StopIteration
        self._place = _next_place(step, micro_batch, self._builder.num_micro_batches)
        return built

    def get_state(self) -> dict[str, Any]:
        # The Prefetcher asks before it starts. What counts is the position of what was handed out.
        return {"start": list(self._start)}


class LoaderNode(BaseNode[Any]):  # type: ignore[misc]
    """Hands out one rank's batches in (step, micro-batch) order, prefetched.

    In a torchdata graph ``reset()`` begins at the plan's first batch and ``reset(state)`` where the
    state stands. The state is a ``Loader`` state and can be loaded by either.
    """

    def __init__(
        self,
        builder: BatchBuilder,
        position: Position,
        *,
        prefetch: int,
        check: BatchCheck | None = None,
        metrics: LoaderMetrics | None = None,
    ) -> None:
        super().__init__()
        self._check = check
        self._metrics = metrics or NoMetrics()
        self._builder = builder
        self._position = position
        self._prefetch = prefetch
        self._batches: Prefetcher[Any] | None = None
        self._end_wait: weakref.finalize[Any, Any] | None = None
        self._ticket = -1

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Start over: from the plan's first batch, or from ``initial_state``."""
        super().reset(initial_state)
        if initial_state is None:
            self._position.rewind()
        else:
            self._position.load(initial_state)
        self.start()

    def start(self) -> None:
        """Start to build from where the position stands; whoever moved it before may not any more."""
        super().reset(None)
        if self._check is not None:
            self._check.restart()
        self._position.ticket += 1
        self._ticket = self._position.ticket
        self.close()
        first = _BuilderNode(self._builder, self._position.step, self._position.micro_batch)
        # Also when this node is dropped: before the Prefetcher is, whose end waits for its thread.
        self._end_wait = weakref.finalize(self, first.stop.set)
        # snapshot_frequency 0: a snapshot per item would say what was built, not what was handed out.
        self._batches = Prefetcher(first, prefetch_factor=self._prefetch, snapshot_frequency=0)
        # Start the thread now; it would start with the first batch that is asked for.
        self._batches.reset()

    def next(self) -> Batch:
        built = self.take()
        self._position.move_past(built)
        return built.batch

    def take(self) -> BuiltBatch:
        """Return the next batch without moving the position (``Loader.steps`` moves it by steps)."""
        if self._ticket != self._position.ticket:
            self.close()
            raise RuntimeError(
                "this iteration was overtaken: since it began, the loader was iterated again or a state "
                "was loaded; keep one iteration of a Loader at a time"
            )
        if self._batches is None:
            raise StopIteration
        began = time.monotonic()
        try:
            built: BuiltBatch | _Failure = next(self._batches)
        except StopIteration:
            self.close()
            raise
        if isinstance(built, _Failure):
            self.close()
            raise built.error
        waited = time.monotonic() - began
        if self._check is not None:
            self._compare(self._check, built)
        built.placed.wait()
        self._metrics.batch(tokens=built.num_tokens, seconds=waited)
        return built

    def _compare(self, check: BatchCheck, built: BuiltBatch) -> None:
        try:
            check.see(built.batch.info)
        except RankMismatchError:
            self.close()
            raise

    def get_state(self) -> dict[str, Any]:
        return self._position.save()

    def close(self) -> None:
        """End the thread and drop what was built ahead."""
        if self._end_wait is not None:
            self._end_wait()
        # The Prefetcher has no method for this: its thread ends when it is dropped.
        self._batches = None


def _next_place(step: int, micro_batch: int, num_micro_batches: int) -> tuple[int, int]:
    return (step, micro_batch + 1) if micro_batch + 1 < num_micro_batches else (step + 1, 0)
