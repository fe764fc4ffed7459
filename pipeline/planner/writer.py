"""Collects steps into blocks and writes each block once, whole.

In:   windows with their rows and sums (``windows.py``, ``rows.py``)
Out:  ``block-NNNNN.arrow``, ``snapshot-NNNNN``, and ``losses-NNNNN.arrow`` where documents lost tokens

A block is closed when the step after it is known: only then is the state written from which the next block is
planned, and with it the block counts as done. A run that was killed goes on there (``find_progress``). The
state after the last block says what was drawn, and what of it is in no step (``verify_coverage.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ringfeed.pipeline.chain import next_link
from ringfeed.pipeline.manifest import CorruptDataError, FileEntry, file_entry
from ringfeed.pipeline.plan_blocks import (
    FOOTPRINT_MULTIPLES,
    BlockFacts,
    block_name,
    losses_name,
    pack_footprints,
    snapshot_name,
    write_block,
)
from ringfeed.pipeline.planner.options import BlockLimits, Overflow
from ringfeed.pipeline.planner.snapshots import Snapshot, state_after, write_snapshot
from ringfeed.pipeline.planner.stream import Losses
from ringfeed.pipeline.planner.tally import BlockTally, StepTally
from ringfeed.pipeline.planner.windows import Window, WindowStart
from ringfeed.pipeline.staging import write_atomically
from ringfeed.pipeline.step_packs import PackRows, packs_before

__all__ = ["PlanWriter", "WriteRule", "find_progress"]


def find_progress(folder: Path, *, beginning: str) -> tuple[int, Snapshot]:
    """Return the first block that is not done in ``folder``, and the state to plan it from.

    Args:
        folder: where an earlier run may have left blocks. A damaged one counts as not done.
        beginning: chain value before the first step.
    """
    done = 0
    snapshot = Snapshot(window=WindowStart.beginning(), steps_done=0, chain=beginning)
    while (after := _finished_block(folder, done)) is not None:
        done, snapshot = done + 1, after
    return done, snapshot


def _finished_block(folder: Path, number: int) -> Snapshot | None:
    """Return the state after block ``number`` if that block is whole."""
    if not (folder / snapshot_name(number + 1)).exists():
        return None
    try:
        return state_after(folder, number)
    except (CorruptDataError, OSError):
        return None


@dataclass(slots=True)
class _OpenBlock:
    """Steps collected so far for one block."""

    begin: Snapshot
    parts: list[PackRows] = field(default_factory=list)
    chains: list[str] = field(default_factory=list)
    tallies: list[BlockTally] = field(default_factory=list)
    losses: list[Losses] = field(default_factory=list)
    num_pieces: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRule:
    """What blocks of a plan are like."""

    limits: BlockLimits
    overflow: Overflow
    end_step: int | None = None
    """No step from here on is written."""
    segments: Mapping[int, str] = field(default_factory=dict)
    """Fingerprint of each recipe segment but the first, by its first step; blocks begin there."""


class PlanWriter:
    """Writes blocks into ``folder`` from block ``number`` on, which begins at ``snapshot``."""

    def __init__(self, folder: Path, *, rule: WriteRule, number: int, snapshot: Snapshot) -> None:
        self._folder = folder
        self._rule = rule
        self._number = number
        self._chain = snapshot.chain
        self._finished: FileEntry | None = snapshot.finished
        self._losses: FileEntry | None = snapshot.losses
        self._flush_step = snapshot.flush_step
        self._block = _OpenBlock(snapshot)
        if not (folder / snapshot_name(number)).exists():
            write_snapshot(folder / snapshot_name(number), snapshot)

    @property
    def num_blocks(self) -> int:
        """Blocks written, with those of earlier runs."""
        return self._number

    @property
    def num_steps(self) -> int:
        """Steps in blocks that are done, with those of earlier runs."""
        return self._block.begin.first_step

    @property
    def flush_step(self) -> int | None:
        """First of the steps that flush the plan's end; None where nothing was flushed."""
        return self._flush_step

    def add(self, window: Window, rows: PackRows, tally: StepTally, *, steps_done: int) -> None:
        """Take the steps of ``window`` but for the first ``steps_done``, which are in earlier blocks."""
        last = self._last_step(window)
        if window.final and window.num_steps:
            if self._block.chains:
                # So that a plan with more epochs can go on from the state before the flush.
                self._close_at(window.start, 0)
            self._flush_step = window.start.first_step
        first = steps_done
        if window.num_steps == 0:
            self._block.losses.append(window.losses)
        for step in range(steps_done, last):
            num_pieces = int(tally.pieces[step])
            if self._is_full(num_pieces):
                self._collect(window, rows, tally, slice(first, step))
                self._close_at(window.start, step)
                first = step
            if step == 0:
                # With the first step, so that whoever plans its block again finds them again.
                self._block.losses.append(window.losses)
            low, high = window.first_packs[step : step + 2].tolist()
            segment = self._rule.segments.get(window.start.first_step + step)
            self._chain = next_link(self._chain, rows.step_packs(low, high, chain=""), segment=segment)
            self._block.chains.append(self._chain)
            self._block.num_pieces += num_pieces
        self._collect(window, rows, tally, slice(first, last))

    def is_full(self, window: Window) -> bool:
        """Is the plan as long as it may be, with the steps of ``window``?"""
        return self._rule.end_step is not None and window.after.first_step >= self._rule.end_step

    def finish(self, window: Window) -> None:
        """Write the last block, and the state after it; ``window`` is the last one that was added."""
        if not self._block.chains:
            return
        steps_done = self._last_step(window)
        if steps_done == window.num_steps:
            self._close_at(window.after, 0)
        else:
            self._close_at(window.start, steps_done)

    def _last_step(self, window: Window) -> int:
        """Return how many steps of ``window`` are in the plan."""
        end = self._rule.end_step
        return window.num_steps if end is None else min(window.num_steps, end - window.start.first_step)

    def _is_full(self, num_pieces: int) -> bool:
        block = self._block
        return bool(block.chains) and (
            len(block.chains) >= self._rule.limits.steps
            or block.num_pieces + num_pieces > self._rule.limits.pieces
        )

    def _collect(self, window: Window, rows: PackRows, tally: StepTally, steps: slice) -> None:
        if steps.start == steps.stop:
            return
        first, last = window.first_packs[[steps.start, steps.stop]].tolist()
        self._block.parts.append(rows.slice(first, last))
        self._block.tallies.append(BlockTally.of_steps(tally, steps.start, steps.stop))

    def _close_at(self, window: WindowStart, steps_done: int) -> None:
        self._write()
        begin = Snapshot(
            window=window,
            steps_done=steps_done,
            chain=self._chain,
            flush_step=self._flush_step,
            finished=self._finished,
            losses=self._losses,
        )
        write_snapshot(self._folder / snapshot_name(self._number), begin)
        self._block = _OpenBlock(begin)

    def _write(self) -> None:
        block = self._block
        rows = PackRows.concat(block.parts)
        losses = Losses.concat(block.losses)
        lost = BlockTally.of_losses(losses, self._rule.overflow)
        facts = BlockFacts(
            first_step=block.begin.first_step,
            previous_chain=block.begin.chain,
            chains=tuple(block.chains),
            footprints=tuple(
                int(pack_footprints(rows, multiple=multiple).max()) for multiple in FOOTPRINT_MULTIPLES
            ),
            largest_num_pieces=int(np.diff(rows.offsets).max()),
            least_supervised=_least_supervised(rows),
            num_epochs=int(rows.pieces.epochs.max()) + 1,
            source_tokens=_source_sums(rows.tokens) or (),
            source_supervised=_source_sums(rows.supervised),
            tally=BlockTally.sum_of([*block.tallies, lost]).to_json(),
        )
        self._losses = None
        if len(losses.documents):
            name = losses_name(self._number)
            with write_atomically(self._folder / name) as temporary:
                _write_losses(temporary, losses)
            self._losses = file_entry(self._folder, name, rows=len(losses.documents))
        with write_atomically(self._folder / block_name(self._number)) as temporary:
            write_block(temporary, rows, facts)
        self._finished = file_entry(self._folder, block_name(self._number), rows=len(rows.steps))
        self._number += 1


def _least_supervised(rows: PackRows) -> int | None:
    if rows.supervised is None:
        return None
    return int(np.add.reduceat(rows.supervised.sum(axis=1), packs_before(rows.steps)[:-1]).min())


def _source_sums(counts: NDArray[np.int64] | None) -> tuple[int, ...] | None:
    return None if counts is None else tuple(counts.sum(axis=0).tolist())


def _write_losses(path: Path, losses: Losses) -> None:
    """Name the documents that were dropped or truncated: document, epoch, tokens lost."""
    table = pa.table({"document": losses.documents, "epoch": losses.epochs, "tokens": losses.tokens})
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
