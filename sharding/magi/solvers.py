"""The solvers, and ``make_solver`` which finds one by MagiAttention's name for it.

In:   a name and its options
Out:  a ``Solver`` (``solver.py``)
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ringfeed.sharding.magi.backtracking import BacktracingPruning
from ringfeed.sharding.magi.heap_solvers import BatchToppHeap, MinHeap, ToppHeap
from ringfeed.sharding.magi.sequential_solvers import SequentialSelect, SortedSequentialSelect
from ringfeed.sharding.magi.solver import Solver

__all__ = ["make_solver", "solver_names"]

_SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (
        MinHeap,
        SequentialSelect,
        ToppHeap,
        BatchToppHeap,
        SortedSequentialSelect,
        BacktracingPruning,
    )
}


def make_solver(name: str, options: Mapping[str, Any]) -> Solver:
    """Return the solver called ``name``, set up with its own ``options``.

    MagiAttention has more names: ``lower_bound`` and ``dynamic_programming`` return no partition there,
    ``binary_search`` may return an empty one, ``random_select`` none that a second process would find.

    Raises:
        ValueError: if there is no such solver or option, or an option's value is wrong.
    """
    if not isinstance(name, str) or name not in _SOLVERS:
        raise ValueError(f"algorithm={name!r} is not supported; supported: {', '.join(_SOLVERS)}")
    solver: Any = _SOLVERS[name]
    known = [option.name for option in fields(solver)]
    for option in options:
        if option not in known:
            raise ValueError(f"algorithm {name!r} has no {option}; it has: {', '.join(known) or 'no option'}")
    made: Solver = solver(**options)
    return made


def solver_names(*, uneven: bool) -> list[str]:
    """Return the names of all solvers, or of those that take uneven shards."""
    return [name for name, solver in _SOLVERS.items() if solver.takes_uneven or not uneven]
