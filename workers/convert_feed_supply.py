"""What a feed of converted batches gives to ranks, and how the input waits for the slowest of them.

In:   steps as they are converted, from one thread (``workers/convert_serving.py``)
Out:  a ``BlockSupply`` for a Flight server: facts that grow, blocks of the steps that are held

Steps are held until all ranks have them, and longer while there is room: a rank that asks again, since a
block was damaged or its stream broke, finds it. Beyond the byte budget ``put`` waits. A budget that the
blocks under way fill holds less: the oldest step goes once every rank was given all.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ringfeed.pipeline.rank_progress import RankProgress
from ringfeed.workers.block_builder import BlockBuilder

if TYPE_CHECKING:
    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.held_steps import HeldSteps
    from ringfeed.pipeline.step_block import EncodedBlock
    from ringfeed.pipeline.views import RankView

__all__ = ["ConvertSupply", "FeedStoppedError"]

_LOG = logging.getLogger("ringfeed.convert")
_SECONDS_TO_TELL = 60.0
# Blocks are copies: of those that cp peers share, a few are enough.
_KEEP_BLOCKS = 2


class FeedStoppedError(Exception):
    """Nobody wants more steps."""


class ConvertSupply:
    """Serves held steps to a fixed set of ranks."""

    def __init__(
        self, held: HeldSteps, *, dp_size: int, hold_bytes: int, block_bytes: int, under_way: int
    ) -> None:
        """Serve ``held``.

        Args:
            held: steps, as they are put.
            dp_size: data-parallel ranks; each has cp_size ranks of its own.
            hold_bytes: of the steps that are held.
            block_bytes: ids and labels of one rank in a full block.
            under_way: blocks that were given to a rank last and may be lost with its stream.
        """
        self._held = held
        self._dp_size = dp_size
        self._hold_bytes = hold_bytes
        cp_size = held.spec.cp_size
        keep_bytes = _KEEP_BLOCKS * cp_size * block_bytes
        self._builder = BlockBuilder(lambda: held, block_bytes=block_bytes, keep_bytes=keep_bytes)
        ranks = [(dp, cp) for dp in range(dp_size) for cp in range(cp_size)]
        self._progress = RankProgress(ranks, under_way=under_way)
        self._changed = threading.Condition()
        self._is_stopped = False
        self._error: Exception | None = None

    def facts(self) -> FeedFacts:
        """Return what is served now.

        Raises:
            ValueError: if the input or its conversion failed.
        """
        held = self._held
        facts = self._builder.facts()
        with self._changed:
            if self._error is not None:
                raise ValueError(f"the conversion behind this feed ended: {self._error}")
            return facts.grown(
                num_steps=held.num_steps, is_growing=held.is_growing, max_slots=held.max_slots()
            )

    def block(self, request: BlockRequest) -> EncodedBlock:
        """Return a block, and note that its rank was given it; errors as ``BlockSupply.block``."""
        place = request.place
        if place.dp_size != self._dp_size:
            raise ValueError(
                f"dp_size={place.dp_size}: this feed holds steps for dp_size={self._dp_size}, and lets go of "
                "what all ranks were given; start one for the other dp size"
            )
        block = self._builder.block(request)
        if request.columns:
            # Counted in packs of all dp ranks: a loader may be opened again with other chunks.
            group = place.dp_size * place.packs_per_chunk
            first = request.first_step * self._held.packs_per_step + request.first_micro_batch * group
            with self._changed:
                rank = (place.dp_rank, place.cp_rank)
                self._progress.given(rank, first, first + request.num_micro_batches * group)
                self._changed.notify_all()
        return block

    @property
    def is_served(self) -> bool:
        """Whether the input has ended and every rank was given all of it."""
        with self._changed:
            return not self._held.is_growing and self._steps_past >= self._held.num_steps

    @property
    def _steps_past(self) -> int:
        return self._progress.past // self._held.packs_per_step

    @property
    def _steps_not_needed(self) -> int:
        held = self._held
        if self._steps_past >= held.num_steps:
            # Nobody asks on before there is more, so that nothing would show that these have arrived.
            return held.num_steps
        return self._progress.arrived // held.packs_per_step

    def put(self, rows: list[list[RankView]]) -> None:
        """Add the next step once there is room for it.

        Raises:
            ValueError: if it fits no step.
            FeedStoppedError: if the feed was stopped.
        """
        nbytes = sum(view.input_ids.nbytes + view.labels.nbytes for views in rows for view in views)
        held, patience = self._held, _SECONDS_TO_TELL
        with self._changed:
            while not self._is_stopped and held.bytes_held and held.bytes_held + nbytes > self._hold_bytes:
                if not held.let_go(self._steps_not_needed) and not self._changed.wait(patience):
                    self._tell_slowest()
                    patience *= 2
            if self._is_stopped:
                raise FeedStoppedError
            held.add(rows)

    def _tell_slowest(self) -> None:
        dp_rank, cp_rank = self._progress.slowest
        _LOG.warning(
            "the input waits: %d bytes in steps %d to %d are held for dp rank %d, cp rank %d, which was "
            "given all before step %d (hold_bytes=%d)",
            self._held.bytes_held,
            self._held.first_step,
            self._held.num_steps - 1,
            dp_rank,
            cp_rank,
            self._steps_past,
            self._hold_bytes,
        )

    def end(self, error: Exception | None = None) -> None:
        """Say that no step follows, or why."""
        with self._changed:
            self._error = error
            self._held.end()
            self._changed.notify_all()

    def stop(self) -> None:
        """Let go of everything; ``put`` waits no more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._builder.close()
