"""What the planner tells a user whose plan wastes slots on padding.

In:   figures of a plan (``report.py``); layouts (``sharding/layouts.py``) and who attends over them
      (``pipeline/batch_kwargs.py``)
Out:  sentences for the report and the log; none for a plan that wastes little
"""

from ringfeed.pipeline.batch_kwargs import backends_for_packs
from ringfeed.pipeline.planner.report import PlanReport
from ringfeed.sharding.layouts import LAYOUT_NAMES, make_layout

__all__ = ["padding_advice"]

_WORTH_A_WORD = 0.05


def padding_advice(report: PlanReport) -> list[str]:
    """Say which layouts would do without the padding of documents, where that is a large part of the plan."""
    if report.slot_waste < _WORTH_A_WORD:
        return []
    # The largest cp that the padding is good for: layout te pads to 2 * cp.
    cp_size = max(2, report.pad_multiple // 2)
    ways_out = []
    for name in LAYOUT_NAMES:
        backends = backends_for_packs(name, cp_size=cp_size)
        # identity pads nothing because it shards nothing.
        if name != "identity" and backends and make_layout(name).length_multiple(cp_size) == 1:
            ways_out.append(f"{name} (attention: {', '.join(backends)})")
    return [
        f"{report.slot_waste:.1%} of all slots pad documents, of {report.tokens / report.pieces:,.0f} tokens "
        f"on average, to a multiple of {report.pad_multiple}. Layouts that pad no document: "
        f"{', '.join(ways_out)}. With one of them, plan with --pad-multiple 1; or lower --max-cp"
    ]
