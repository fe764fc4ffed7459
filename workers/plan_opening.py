"""What a job or a service opens before any worker starts: refused here, and not by each worker.

In:   what a user chose of a plan
Out:  a ``PlanOpener`` (``workers/block_builder.py``), picklable, which opens without a mistake anywhere
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING

from ringfeed.pipeline.opening import OpenOptions, check_footprints, open_spec
from ringfeed.pipeline.plan_growth import follow_plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.skip import check_steps, read_skip_list
from ringfeed.workers.block_builder import PlanOpener

if TYPE_CHECKING:
    from ringfeed.sharding.layouts import Layout

__all__ = ["PlanChoice", "open_checked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """Which views of which plan are wanted."""

    plan: Path
    layout: Layout
    cp_size: int
    tp_size: int = 1
    unit: int = 1
    slot_budget: int | None = None
    skip: Path | None = None
    """A text file of document ids to leave out."""
    corpora: tuple[Path, ...] = ()
    """In command order; empty takes the plan's own."""


def open_checked(choice: PlanChoice) -> PlanOpener:
    """Open what workers will read, and refuse what cannot work.

    Raises:
        ValueError: if plan, layout, sizes or skip list do not fit, or a folder is missing.
        CorruptDataError: if plan or corpora are damaged.
    """
    options = OpenOptions(
        layout=choice.layout,
        cp_size=choice.cp_size,
        tp_size=choice.tp_size,
        unit=choice.unit,
        slot_budget=choice.slot_budget,
    )
    plan = follow_plan(choice.plan)
    if plan.is_growing and choice.skip is not None:
        raise ValueError(
            f"skip={str(choice.skip)!r}: {choice.plan} is still being planned, and each of its steps must "
            "keep a supervised token; finish the plan first"
        )
    corpora = plan.open_corpora(list(choice.corpora) or None)
    spec = open_spec(plan, options, pad_id=corpora.pad_id)
    # Of a plan that grows, each step is looked at when it is reached.
    if not plan.is_growing and plan.largest_footprint(spec.multiple) is None:
        # A loader may find a pack that is too large when it gets there; workers run for hours before.
        check_footprints(plan, spec)
    overlay = None
    if choice.skip is not None:
        overlay = read_skip_list(choice.skip, num_documents=corpora.num_documents)
    if overlay is not None:
        check_steps(PlanSource(plan, corpora, spec=spec, overlay=overlay))
    return PlanOpener(
        # Workers may run elsewhere: only the whole path means the same there.
        plan=plan.path.resolve(),
        spec=spec,
        corpora=tuple(path.resolve() for path in corpora.paths),
        overlay=overlay,
    )
