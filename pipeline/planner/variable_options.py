"""What a user may set for variable packs of like work, and what the defaults are.

In:   ``PlanOptions`` (``options.py``)
Out:  ``VariableWork``: mean and longest lengths, work of a pack at most, steps that a long piece may wait
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.pack_lengths import PackShape

if TYPE_CHECKING:
    from ringfeed.pipeline.planner.options import PlanOptions

__all__ = ["VARIABLE_FIELDS", "VariableWork", "variable_work"]

VARIABLE_FIELDS = ("mean_tokens", "piece_tokens", "work_budget", "max_delay")
"""Fields of ``PlanOptions`` that belong to variable packs of like work alone."""
_MEAN_SHARE = (7, 8)
"""Of ``pack_tokens``, by default: an eighth of room evens out all but corpora without short documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariableWork:
    """How variable packs of like work are made; all defaults are filled in."""

    mean_tokens: int
    """Slots of a pack on average: a step draws so many for each of its packs."""
    piece_tokens: int
    """The longest piece: longer documents are cut or left out (``Overflow``)."""
    work_budget: int | None
    """What a pack may cost at most; None for no limit."""
    max_delay: int
    """Steps that a long piece may wait for others like it."""


def variable_work(options: PlanOptions, *, is_work: bool) -> VariableWork | None:
    """Return the numbers for variable packs of like work, None where a plan has no such packs.

    Args:
        options: of the plan; lengths and multiples are checked.
        is_work: is the balance one that evens out work?

    Raises:
        ValueError: if a number makes no sense, or has nothing to do; names the way out.
    """
    given = {name: getattr(options, name) for name in VARIABLE_FIELDS}
    if options.pack_shape is not PackShape.VARIABLE or not is_work:
        useless = [f"{name}={value}" for name, value in given.items() if value is not None]
        if useless:
            raise ValueError(
                f"{', '.join(useless)}: only for pack_shape=variable with balance=work, this plan has "
                f"pack_shape={options.pack_shape}, balance={options.balance}; leave it out"
            )
        return None
    wide, parts = _MEAN_SHARE
    found = VariableWork(
        mean_tokens=_or(options.mean_tokens, max(1, options.pack_tokens * wide // parts)),
        piece_tokens=_or(options.piece_tokens, options.pack_tokens),
        work_budget=options.work_budget,
        max_delay=_or(options.max_delay, options.window - 1),
    )
    _check_lengths(found, options)
    _check_budget(found, options)
    if not 0 <= found.max_delay < options.window:
        raise ValueError(
            f"max_delay={found.max_delay} must be at least 0 and below window={options.window}, the steps "
            "that are looked ahead; lower it, or raise window"
        )
    return found


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _check_lengths(found: VariableWork, options: PlanOptions) -> None:
    for name in ("mean_tokens", "piece_tokens"):
        value = getattr(found, name)
        if not 1 <= value <= options.pack_tokens:
            raise ValueError(
                f"{name}={value} must be at least 1 and at most pack_tokens={options.pack_tokens}, the most "
                "that a pack may have; lower it, or raise pack_tokens"
            )
    multiple = options.document_multiple
    if found.piece_tokens % multiple:
        below = found.piece_tokens // multiple * multiple
        nearest = [n for n in (below, below + multiple) if n > 0]
        raise ValueError(
            f"piece_tokens={found.piece_tokens} is not a multiple of {multiple}, what documents are padded "
            f"to; nearest valid: {nearest}"
        )


def _check_budget(found: VariableWork, options: PlanOptions) -> None:
    """Refuse a budget that the longest piece alone would break."""
    if found.work_budget is None:
        return
    cost = _cost(options, found.piece_tokens)
    if found.work_budget >= cost:
        return
    multiple = options.document_multiple
    low, high = 0, found.piece_tokens // multiple
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if _cost(options, middle * multiple) <= found.work_budget else (low, middle - 1)
        )
    shorter = f", or piece_tokens={low * multiple} at most" if low else ""
    raise ValueError(
        f"work_budget={found.work_budget} is below {cost}, what a piece of piece_tokens={found.piece_tokens} "
        f"costs by cost_model={options.cost_model.name}: no pack could hold it; pass work_budget={cost} at "
        f"least{shorter}"
    )


def _cost(options: PlanOptions, length: int) -> int:
    return int(options.cost_model.piece_costs(np.array([length], dtype=np.int64))[0])
