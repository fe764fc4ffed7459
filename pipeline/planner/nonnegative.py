"""Least squares whose coefficients are not negative.

In:   columns that were measured together, and what they should add up to
Out:  the coefficients, by the active-set method of Lawson and Hanson (1974, "Solving Least Squares Problems",
      chapter 23)
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["nonnegative_least_squares"]

Float64 = NDArray[np.float64]

_TOLERANCE = 1e-10


def nonnegative_least_squares(columns: Float64, target: Float64) -> Float64:
    """Return the x >= 0 that makes |columns @ x - target| least: float64 [N, K], [N] -> [K].

    Columns are scaled to length 1 inside, so that their units do not matter.

    Raises:
        ValueError: if columns depend on each other so closely that no coefficients can be told.
    """
    scale = np.linalg.norm(columns, axis=0)
    if not scale.all() or not np.isfinite(columns).all() or not np.isfinite(target).all():
        raise ValueError("every column needs a value other than 0, and all values must be finite")
    scaled = columns / scale
    size = scaled.shape[1]
    found, active = np.zeros(size), np.zeros(size, dtype=np.bool_)
    barred = np.zeros(size, dtype=np.bool_)
    # Each column enters at most a few times; the limit only stops rounding from going round in circles.
    for _ in range(10 * size):
        gradient = scaled.T @ (target - scaled @ found)
        gradient[active | barred] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= _TOLERANCE * np.linalg.norm(target):
            return np.asarray(found / scale, dtype=np.float64)
        active[entering] = True
        if _solve(scaled, target, active)[entering] <= 0:
            # Rounding alone made it look useful; it would leave again at once.
            active[entering], barred[entering] = False, True
            continue
        found = _settle(scaled, target, found, active)
        barred[:] = False
    raise ValueError(
        "the columns depend on each other too closely for coefficients to be told; use fewer of them"
    )


def _solve(columns: Float64, target: Float64, active: NDArray[np.bool_]) -> Float64:
    wanted = np.zeros(len(active))
    wanted[active] = np.linalg.lstsq(columns[:, active], target, rcond=None)[0]
    return wanted


def _settle(columns: Float64, target: Float64, found: Float64, active: NDArray[np.bool_]) -> Float64:
    """Solve for the active columns; those that would be negative leave them. Changes ``active``."""
    while True:
        wanted = _solve(columns, target, active)
        falling = active & (wanted <= 0)
        if not falling.any():
            return wanted
        shares = found[falling] / (found[falling] - wanted[falling])
        found = found + float(shares.min()) * (wanted - found)
        # The one that reaches 0 first leaves, also where rounding kept it a little above.
        found[np.flatnonzero(falling)[shares.argmin()]] = 0.0
        active &= found > 0
        found[~active] = 0.0
