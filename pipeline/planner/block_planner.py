"""The loop of the planner: window after window, into blocks.

In:   documents and options, and whatever blocks an earlier run left in the folder
Out:  blocks, snapshots and losses in the folder (``writer.py``); how far it is after each window
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.piece_stream import DrawRule
from ringfeed.pipeline.planner.rows import window_rows
from ringfeed.pipeline.planner.windows import Window, plan_windows
from ringfeed.pipeline.planner.writer import PlanWriter, WriteRule, find_progress
from ringfeed.pipeline.recipe import RecipeSegment

__all__ = ["BlocksDone", "PlanTask", "plan_blocks"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanTask:
    """What is planned, and where to."""

    folder: Path
    documents: DocumentTable
    options: PlanOptions
    rules: Sequence[DrawRule]
    """What the draw follows, by step."""
    beginning: str
    """Chain value before the first step: fingerprint of the first recipe segment."""
    segments: Mapping[int, str]
    """Fingerprints of the later recipe segments by their first steps."""

    @classmethod
    def of(
        cls,
        options: PlanOptions,
        documents: DocumentTable,
        *,
        rules: Sequence[DrawRule],
        segments: Sequence[RecipeSegment],
        folder: Path,
    ) -> "PlanTask":
        """Return the task of planning ``segments`` into ``folder``."""
        return cls(
            folder=folder,
            documents=documents,
            options=options,
            rules=rules,
            beginning=segments[0].recipe.fingerprint,
            segments={segment.first_step: segment.recipe.fingerprint for segment in segments[1:]},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksDone:
    """How far the planner is."""

    num_blocks: int
    num_steps: int
    """Steps in those blocks."""
    flush_step: int | None
    """First of the steps that flush the plan's end; None before, and where nothing is flushed."""
    window: Window | None = None
    """The window that was planned last."""


def plan_blocks(task: PlanTask) -> Generator[BlocksDone, None, BlocksDone]:
    """Write the blocks that are not there yet; yield after each window, return when all are done.

    Raises:
        ValueError: if a document or a step cannot be planned, or there is nothing to plan.
    """
    options = task.options
    number, snapshot = find_progress(task.folder, beginning=task.beginning)
    rule = WriteRule(
        limits=options.block_limits,
        overflow=options.overflow,
        end_step=options.steps,
        segments=task.segments,
    )
    writer = PlanWriter(task.folder, rule=rule, number=number, snapshot=snapshot)
    yield _progress(writer, None)
    steps_done = snapshot.steps_done
    if options.steps is not None and writer.num_steps >= options.steps:
        return _progress(writer, None)
    windows = plan_windows(task.documents, options, start=snapshot.window, rules=task.rules)
    last: Window | None = None
    for window in windows:
        last = window
        rows, tally = window_rows(window, task.documents, options)
        writer.add(window, rows, tally, steps_done=steps_done)
        steps_done = 0
        if window.final or writer.is_full(window):
            writer.finish(window)
            break
        yield _progress(writer, window)
    windows.close()
    if writer.num_blocks == 0:
        raise ValueError(
            f"no pack to plan: all {task.documents.num_documents} documents are empty or longer than "
            f"{options.longest_piece_field}={options.longest_piece} with overflow={options.overflow}"
        )
    return _progress(writer, last)


def _progress(writer: PlanWriter, window: Window | None) -> BlocksDone:
    return BlocksDone(
        num_blocks=writer.num_blocks,
        num_steps=writer.num_steps,
        flush_step=writer.flush_step,
        window=window,
    )
