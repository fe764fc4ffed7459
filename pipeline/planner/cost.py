"""What a piece costs to train on, in whole units, so that sums are exact everywhere.

In:   piece lengths
Out:  int64 costs; a pack's cost is the sum over its pieces (``pipeline/planner/rows.py``)
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["COST_MODEL", "LINEAR_TOKENS", "piece_costs"]

LINEAR_TOKENS = 24_576
"""Length at which a 7B-like model spends as much on attention as on everything else."""
COST_MODEL = f"l + l*l // {LINEAR_TOKENS}"
"""How a recipe names this model."""


def piece_costs(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return l + l*l // 24,576 for each real length: int64 [P] -> int64 [P]."""
    return lengths + lengths * lengths // LINEAR_TOKENS
