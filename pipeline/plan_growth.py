"""Read a plan while it is being made: each block can be used before the next one is planned.

In:   ``PLAN.partial``: what its planner announced, and blocks that are done (``planner/session.py``)
Out:  a ``Plan`` whose ``num_steps`` grows; once the planner is through, the finished plan

A block is done once the snapshot after it is there, which has the block's size and hash. So nothing is
written for readers but one announcement, and a reader never sees half a block.
"""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfeed.pipeline.manifest import (
    MANIFEST_NAME,
    CorruptDataError,
    FileEntry,
    Manifest,
    partial_folder,
    read_manifest,
)
from ringfeed.pipeline.plan import PLAN_FORMAT, Plan
from ringfeed.pipeline.plan_blocks import (
    Block,
    BlockFacts,
    block_name,
    read_block_facts,
    read_finished,
    snapshot_name,
    sum_facts,
)
from ringfeed.pipeline.staging import announced

__all__ = ["GrowingPlan", "follow_plan"]

_POLL_SECONDS = 0.2


def follow_plan(path: str | Path, *, timeout_s: float = 1800.0) -> Plan:
    """Open the plan at ``path``, finished or still being made.

    Args:
        path: the plan folder; while it is made, its name to be.
        timeout_s: seconds to wait for the next block of a growing plan before giving up on its planner.

    Raises:
        ValueError: if there is no plan, and nobody makes one; ``timeout_s`` is not above 0.
        CorruptDataError: if its manifest is damaged.
    """
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be above 0")
    folder = Path(path)
    if not (folder / MANIFEST_NAME).is_file():
        manifest = announced(folder, format=PLAN_FORMAT)
        # It may have got its name between the two looks.
        if manifest is not None and not (folder / MANIFEST_NAME).is_file():
            return GrowingPlan(folder, manifest, timeout_s=timeout_s)
    return Plan.open(folder)


class GrowingPlan(Plan):
    """A plan that another process, or thread, is making. What it says of the whole is said so far."""

    def __init__(self, folder: Path, announcement: Manifest, *, timeout_s: float) -> None:
        """Use ``follow_plan``."""
        self._announcement = announcement
        self._timeout_s = timeout_s
        self._entries: list[FileEntry] = []
        self._block_facts: list[BlockFacts] = []
        self._growth = threading.Lock()
        self._is_finished = False
        super().__init__(folder, self._so_far())
        self._folder = partial_folder(Path(os.path.realpath(folder)))
        self.refresh()

    @property
    def is_growing(self) -> bool:
        return not self._is_finished

    @property
    def report(self) -> dict[str, Any]:
        """What ``plan --report --json`` prints, once the plan is finished."""
        if self.is_growing:
            raise ValueError(f"{self.path} is still being planned: it is measured when it is finished")
        return super().report

    def refresh(self) -> int:
        """Look for blocks that were finished since the last look; return how many steps there are.

        Raises:
            ValueError: if the planner gave the plan up, or another plan has its name now.
            CorruptDataError: if a block or the manifest is damaged.
        """
        with self._growth:
            if not self._is_finished:
                self._look()
        return self.num_steps

    def wait_for_step(self, i: int, *, stop: threading.Event | None = None) -> bool:
        """Wait until the plan has step ``i``, or has ended before it.

        Args:
            i: the step.
            stop: ends the wait when it is set, from another thread.

        Returns:
            False if the plan ends before ``i``, or once ``stop`` is set.

        Raises:
            TimeoutError: if no block was finished for ``timeout_s`` seconds.
            ValueError: as ``refresh``.
        """
        begun, known = time.monotonic(), self.num_steps
        stop = stop or threading.Event()
        while i >= self.refresh() and self.is_growing:
            if self.num_steps > known:
                begun, known = time.monotonic(), self.num_steps
            if time.monotonic() - begun > self._timeout_s:
                raise TimeoutError(
                    f"{self.path} is still being planned and has {known} steps; step {i} did not come, and "
                    f"no block was finished for {self._timeout_s:g} s. Is its planner running? Run the same "
                    "`ringfeed plan` again: it goes on at the last finished block"
                )
            if stop.wait(_POLL_SECONDS):
                return False
        return 0 <= i < self.num_steps

    def _read_block(self, number: int) -> Block:
        folder = self._folder
        try:
            return super()._read_block(number)
        except CorruptDataError:
            # Its folder may have got its name in the middle of this.
            self.refresh()
            if self._folder == folder:
                raise
        return super()._read_block(number)

    def _look(self) -> None:
        if not (self.path / MANIFEST_NAME).is_file():
            self._look_for_blocks()
            if self._folder.is_dir() or not (self.path / MANIFEST_NAME).is_file():
                return
        finished = read_manifest(self.path, format=PLAN_FORMAT)
        if finished.fingerprint != self._announcement.fingerprint:
            raise ValueError(
                f"{self.path} is another plan than the one that was being made when it was opened; open it "
                "again"
            )
        self._take(finished)
        self._folder = self.path
        self._is_finished = True

    def _look_for_blocks(self) -> None:
        found = len(self._entries)
        while (after := self._folder / snapshot_name(len(self._entries) + 1)).exists():
            number = len(self._entries)
            try:
                entry, facts = read_finished(after), read_block_facts(self._folder / block_name(number))
            except FileNotFoundError:
                # The folder got its name in the middle of this.
                break
            if entry is None:
                raise CorruptDataError(f"{after} does not tell of block {number}")
            self._entries.append(entry)
            self._block_facts.append(facts)
        if len(self._entries) > found:
            self._take(self._so_far())
        elif not self._folder.is_dir() and not (self.path / MANIFEST_NAME).is_file():
            raise ValueError(
                f"{self._folder} is gone: its planner met a mistake and gave the plan up; see what it said"
            )

    def _so_far(self) -> Manifest:
        facts = self._block_facts
        return replace(
            self._announcement,
            files=tuple(self._entries),
            facts={
                **self._announcement.facts,
                **sum_facts(facts),
                "num_steps": sum(block.num_steps for block in facts),
                "num_packs": sum(block.tally["packs"] for block in facts),
                "num_pieces": sum(block.tally["pieces"] for block in facts),
            },
        )

    def _take(self, manifest: Manifest) -> None:
        # The number of steps last: whoever sees a step finds its block, too.
        self.manifest = manifest
        self._first_steps = manifest.facts["first_steps"]
        self._facts = manifest.facts
