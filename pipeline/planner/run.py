"""Plan: from corpora and options to a finished plan folder.

In:   ``PlanOptions`` (``options.py``)
Out:  the plan folder, by one rename (``pipeline/staging.py``), and a ``PlanReport``

Killed at any moment, the same call goes on at the last finished block and ends with the same bytes.
"""

from ringfeed.pipeline.planner.extend import Extension
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.report import PlanReport
from ringfeed.pipeline.planner.session import PlanSession
from ringfeed.pipeline.progress import Progress, SilentProgress

__all__ = ["run_extension", "run_plan"]


def run_plan(options: PlanOptions, *, progress: Progress | None = None) -> PlanReport:
    """Make the plan that ``options`` ask for; nothing is done where it is finished already.

    Raises:
        ValueError: if a corpus, the file of lengths or the mixture cannot be planned with these options, or
            the output holds something else.
        CorruptDataError: if a corpus is damaged.
    """
    with PlanSession.open(options) as session:
        session.advance(progress=progress or SilentProgress())
        return session.report()


def run_extension(extension: Extension, *, progress: Progress | None = None) -> PlanReport:
    """Make a finished plan longer; nothing is done where it is that long already.

    Raises:
        ValueError: if the plan cannot go on like that, with what may change.
        CorruptDataError: if the plan or a corpus is damaged.
    """
    with PlanSession.extend(extension) as session:
        session.advance(progress=progress)
        return session.report()
