"""The numbers that the loops for variable packs work with, in a form that compiled code takes.

In:   pieces of a pool, the sizes of a plan (``variable_packs.py``)
Out:  ``PoolPieces`` and ``StepRules`` for ``variable_steps.py`` and the loops below it
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEFT", "Int64", "PoolPieces", "StepRules"]

Int64 = NDArray[np.int64]

LEFT = -1
"""In place of a pack: the piece is in none."""


class PoolPieces(NamedTuple):
    """Pieces of a pool in arrival order."""

    slots: Int64
    """int64 [P]"""
    costs: Int64
    """int64 [P]"""


class StepRules(NamedTuple):
    """What steps are made by."""

    packs: int
    """K, of a step."""
    ranks: int
    """R, among which the work of a step is evened out; divides K. Pack k is of rank k % R, row k // R."""
    capacity: int
    """Slots of a pack at most."""
    budget: int
    """Work of a pack at most; no piece alone costs more."""
    target: int
    """Slots of a step: beyond, no new piece is drawn."""
    delay: int
    """Steps that a piece may wait, D."""
    outlier: int
    """A piece that costs more waits for others like it."""
    tolerance: int
    """Work by which the pieces of a group may differ."""
    buckets: Int64
    """int64 [B], the lengths that packs may have, rising to the capacity; none: any length."""
    final: bool
    """Nothing comes after this pool."""
