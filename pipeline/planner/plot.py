"""A picture of a plan: fill and cost of every step, ranks against each other, displacements.

In:   ``PlanReport`` (``report.py``), ``Measurement`` (``measure.py``)
Out:  an image file; matplotlib (extra ``report``) is imported here and nowhere else, and needs no display
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.measure import Measurement, StepSeries
from ringfeed.pipeline.planner.report import PlanReport
from ringfeed.pipeline.planner.tally import DISTANCES
from ringfeed.pipeline.staging import write_atomically
from ringfeed.sharding.optional import load_optional

__all__ = ["check_plot", "plot_plan"]

_FORMATS = ("png", "svg", "pdf")
# More than that is not to be seen on a picture 14 inches wide.
_MOST_BINS = 700


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before any work starts.

    Raises:
        ValueError: if the name of the file ends in no format that is drawn.
        MissingDependencyError: if matplotlib is not installed.
    """
    if _format(path) not in _FORMATS:
        raise ValueError(f"plot={str(path)!r}: the name must end in .{', .'.join(_FORMATS)}")
    load_optional("matplotlib", extra="report", needed_for="--plot")


def plot_plan(path: Path, report: PlanReport, measured: Measurement) -> None:
    """Draw the plan into ``path``; a file that is there is replaced.

    Raises:
        ValueError: if the name of the file ends in no format that is drawn.
        MissingDependencyError: if matplotlib is not installed.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, which keeps figures and looks for a display.
    figure = Figure(figsize=(14, 11), layout="constrained")
    FigureCanvasAgg(figure)
    fill, cost, heat, distance = figure.subplots(4, 1)
    edges = _bin_edges(len(measured.series.fill))
    _draw_fill(fill, measured, edges)
    _draw_cost(cost, measured.series, edges)
    _draw_heat(figure, heat, measured.series, edges)
    _draw_distances(distance, report)
    own = measured.balances[0]
    size = f"{report.steps:,} steps, {report.packs:,} packs"
    figure.suptitle(f"{size}, {report.balance}, dp {own.dp_size}, {own.cost_model}")
    with write_atomically(path) as temporary:
        figure.savefig(temporary, format=_format(path), dpi=100)


def _format(path: Path) -> str:
    return path.suffix.lstrip(".").lower()


def _bin_edges(num_steps: int) -> NDArray[np.int64]:
    """Return the first step of each bin, and the number of steps: a bin is a step, or several."""
    return np.unique(np.linspace(0, num_steps, min(num_steps, _MOST_BINS) + 1).astype(np.int64))


def _draw_fill(axes: Any, measured: Measurement, edges: NDArray[np.int64]) -> None:
    counts = np.diff(edges)
    axes.stairs(np.add.reduceat(measured.series.fill, edges[:-1]) / counts, edges, label="fill", fill=True)
    axes.axhline(
        measured.fill_bound,
        color="black",
        linewidth=0.8,
        label=f"of all steps, at most: {measured.fill_bound:.4f}",
    )
    lowest = float(measured.series.fill.min())
    axes.set(title="Fill", ylabel="real tokens / slots", ylim=(max(0.0, min(lowest, 0.99) - 0.01), 1.0))
    axes.set_xlim(0, int(edges[-1]))
    axes.legend(loc="lower left")


def _draw_cost(axes: Any, series: StepSeries, edges: NDArray[np.int64]) -> None:
    mean, worst = series.loads.mean(axis=1), series.loads.max(axis=1)
    axes.stairs(np.maximum.reduceat(worst, edges[:-1]), edges, label="most expensive rank")
    axes.stairs(np.add.reduceat(mean, edges[:-1]) / np.diff(edges), edges, label="mean rank")
    axes.set(title="Cost of a step", ylabel="units of cost", xlim=(0, int(edges[-1])), ylim=(0, None))
    axes.legend(loc="lower left")


def _draw_heat(figure: Any, axes: Any, series: StepSeries, edges: NDArray[np.int64]) -> None:
    ratios = series.loads / np.maximum(series.loads.mean(axis=1, keepdims=True), 1)
    # The largest of a bin: a mean would hide the one step that everybody waits in.
    values = np.maximum.reduceat(ratios, edges[:-1], axis=0).T
    mesh = axes.pcolormesh(edges, np.arange(len(values) + 1), values, cmap="viridis")
    figure.colorbar(mesh, ax=axes, label="rank / mean rank")
    axes.set(title="Cost of each rank in each step", ylabel="dp rank", xlabel="step")


def _draw_distances(axes: Any, report: PlanReport) -> None:
    counts = report.displacement_counts
    shown = max((place for place, count in enumerate(counts) if count), default=0) + 1
    axes.bar(np.arange(shown), counts[:shown], width=0.9)
    last = f" ({DISTANCES - 1}: that or more)" if shown == DISTANCES else ""
    axes.set(
        title=f"Displacement: mean {report.displacement_mean:.3f}, largest {report.displacement_max} steps",
        xlabel=f"steps between where a piece arrived and where it stands{last}",
        ylabel="pieces",
        yscale="log",
    )
