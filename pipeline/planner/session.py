"""Plan a portion at a time: each block can be read before the next one is planned.

In:   ``PlanOptions`` (``options.py``)
Out:  blocks in ``PLAN.partial``, which ``pipeline/plan_growth.py`` reads at once; the finished plan, by one
      rename (``pipeline/staging.py``)

``run_plan`` goes through in one go. A service keeps a session open and stays ahead of its fastest reader.
Killed at any moment, a session with the same options goes on at the last finished block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from ringfeed.pipeline.plan import PLAN_FORMAT, Plan
from ringfeed.pipeline.planner.advice import padding_advice
from ringfeed.pipeline.planner.block_planner import BlocksDone, PlanTask, plan_blocks
from ringfeed.pipeline.planner.documents import open_documents
from ringfeed.pipeline.planner.draw_rules import draw_rules
from ringfeed.pipeline.planner.extend import Extension, extend_plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.plan_manifest import (
    announcement,
    finished_manifest,
    plan_recipe,
    plan_request,
)
from ringfeed.pipeline.planner.report import PlanReport
from ringfeed.pipeline.progress import Progress, SilentProgress
from ringfeed.pipeline.recipe import RecipeSegment
from ringfeed.pipeline.staging import StagedFolder

__all__ = ["PlanSession"]


class PlanSession:
    """The one planner of a plan. Use ``open`` as a context manager; leaving early keeps finished blocks."""

    def __init__(self, task: PlanTask, *, staged: StagedFolder, request: dict[str, Any]) -> None:
        """Use ``PlanSession.open`` or ``PlanSession.extend``."""
        self._task = task
        self._staged = staged
        self._request = request
        self._blocks = plan_blocks(task)
        self.manifest = staged.finished
        """Of the finished plan; None while there are steps to plan."""
        self._done: BlocksDone | None = None
        if self.manifest is None:
            staged.announce(announcement(task, request=request, output=staged.output))
            self._done = next(self._blocks)

    @classmethod
    def open(cls, options: PlanOptions) -> Self:
        """Become the planner of ``options.output``, or find it finished.

        Raises:
            ValueError: if a corpus, the file of lengths or the mixture cannot be planned with these options,
                the output holds something else, or another process plans it now.
            CorruptDataError: if a corpus is damaged.
        """
        documents = open_documents(options)
        segments = (RecipeSegment(first_step=0, recipe=plan_recipe(options, documents)),)
        rules = draw_rules(documents, options)
        request = plan_request(options, segments)
        staged = StagedFolder.open(options.output, format=PLAN_FORMAT, made_from=request)
        with _closed_on_error(staged):
            task = PlanTask.of(options, documents, rules=rules, segments=segments, folder=staged.path)
            return cls(task, staged=staged, request=request)

    @classmethod
    def extend(cls, extension: Extension) -> Self:
        """Become the planner who makes a finished plan longer, or find that done.

        Raises:
            ValueError: if the plan cannot go on like that, with what may change; or as ``open``.
            CorruptDataError: if the plan or a corpus is damaged.
        """
        StagedFolder.recover(extension.plan, format=PLAN_FORMAT)
        longer = extend_plan(Plan.open(extension.plan), extension)
        options, base = longer.options, longer.base
        rules = draw_rules(longer.documents, options, segments=longer.segments)
        request = longer.request()
        replaces = base.manifest.fingerprint if longer.changes else None
        staged = StagedFolder.open(options.output, format=PLAN_FORMAT, made_from=request, replaces=replaces)
        with _closed_on_error(staged):
            if staged.finished is None:
                longer.keep_blocks(staged.path)
            task = PlanTask.of(
                options, longer.documents, rules=rules, segments=longer.segments, folder=staged.path
            )
            return cls(task, staged=staged, request=request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._blocks.close()
        self._staged.__exit__(kind, error, traceback)

    @property
    def num_steps(self) -> int:
        """Steps that can be read now: those in finished blocks."""
        if self.manifest is not None:
            return int(self.manifest.facts["num_steps"])
        return 0 if self._done is None else self._done.num_steps

    def report(self) -> PlanReport:
        """Return the figures of the finished plan.

        Raises:
            ValueError: if it is not finished.
        """
        if self.manifest is None:
            raise ValueError(f"{self._staged.output} is not planned to its end; advance() first")
        return PlanReport(**self.manifest.facts["report"])

    def advance(self, *, until_step: int | None = None, progress: Progress | None = None) -> int:
        """Plan until ``until_step`` steps can be read, or to the end, which finishes the plan.

        Args:
            until_step: how many steps must be in finished blocks; None plans all.
            progress: where to show how far it is.

        Returns:
            How many steps can be read now: at least ``until_step``, unless the plan is finished.

        Raises:
            ValueError: if a step or a document cannot be planned. The partial plan is deleted: a rerun could
                not finish it either.
        """
        shown = _Shown(progress or SilentProgress(), self._task)
        while self.manifest is None and (until_step is None or self.num_steps < until_step):
            try:
                self._done = next(self._blocks)
            except StopIteration as end:
                shown.update(end.value)
                self._publish(end.value)
                shown.log(padding_advice(self.report()))
            except ValueError:
                self._staged.discard()
                raise
            else:
                shown.update(self._done)
        shown.end()
        return self.num_steps

    def _publish(self, done: BlocksDone) -> None:
        task = self._task
        manifest = finished_manifest(task, done, request=self._request, output=self._staged.output)
        self._staged.publish(manifest)
        self.manifest = manifest


@contextmanager
def _closed_on_error(staged: StagedFolder) -> Iterator[None]:
    try:
        yield
    except BaseException:
        staged.close()
        raise


class _Shown:
    """Tells a person how far the planner is: in documents where their number is known, else in steps."""

    def __init__(self, progress: Progress, task: PlanTask) -> None:
        self._progress = progress
        self._documents: int | None = None
        self._shown = 0
        if task.options.mixture is None:
            self._documents = task.documents.num_documents
            progress.begin("plan", total=self._documents * task.options.epochs, unit="documents")
        else:
            progress.begin("plan", total=task.options.steps, unit="steps")

    def update(self, done: BlocksDone) -> None:
        """Show what is done after a window."""
        if done.window is None:
            return
        now = done.window.after.first_step
        if self._documents is not None:
            now = done.window.after.cursor.documents_drawn(self._documents)
        self._progress.advance(now - self._shown)
        self._shown = now

    def log(self, sentences: Sequence[str]) -> None:
        """Print lines that stay."""
        for sentence in sentences:
            self._progress.log(sentence)

    def end(self) -> None:
        self._progress.end()
