"""``--report`` and ``--plot`` of the commands ``plan`` and ``inspect``.

In:   an opened plan, and what the user wants to see of it (``config.py``)
Out:  text for a person, facts for a program, and the picture

What was counted while planning is stored in the plan. Bounds, other dp sizes and other cost models take a
reading of all its pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.planner.advice import padding_advice
from ringfeed.pipeline.planner.cost import cost_model_of
from ringfeed.pipeline.planner.measure import MeasureOptions, measure
from ringfeed.pipeline.planner.plot import plot_plan
from ringfeed.pipeline.planner.report import PlanReport
from ringfeed.pipeline.planner.report_text import report_text

if TYPE_CHECKING:
    from ringfeed.pipeline.config import ReportConfig
    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.planner.cost import CostModel

__all__ = ["make_report"]


def make_report(
    plan: Plan, config: ReportConfig, *, planned_by: CostModel | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the report of ``plan`` as text and as JSON-able facts, and draw it if a picture is wanted.

    Args:
        plan: a finished plan.
        config: what to measure.
        planned_by: the cost model that the plan was made with, if it is at hand.

    Raises:
        ValueError: if a dp does not divide the packs of a step, or a cost model does not know a length.
        MissingDependencyError: if a picture is wanted and matplotlib is not installed.
        CorruptDataError: if a block of the plan is damaged.
    """
    models = [cost_model_of(spec) for spec in config.report_cost_model]
    known = [] if planned_by is None else [planned_by]
    options = MeasureOptions(dp_sizes=config.report_dp, cost_models=(*models, *known))
    report, measured = PlanReport(**plan.report), measure(plan, options)
    advice = padding_advice(report)
    if config.plot is not None:
        plot_plan(config.plot, report, measured)
    facts = {**report.as_dict(), **measured.as_dict(), "advice": advice}
    text = report_text(report, measured, advice)
    return text if config.plot is None else f"{text}\n  picture         {config.plot}", facts
