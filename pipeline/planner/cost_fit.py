"""Fit a cost table to measured packs.

In:   a CSV file of samples, ``lengths,milliseconds``: the document lengths of a pack, with spaces between
      them, and how long the pack took
Out:  ``CostFit``: a table (``cost_table.py``), and how far each sample is from it

A pack's time is fitted as a sum over its documents of a curve that starts at 0 or above, never falls and
never bends down, plus a fixed time per pack. Errors count in proportion to the time, as timings scatter. The
fixed time per pack is not in the table: it is the same for every pack, so that it moves no balance.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.choices import Basis
from ringfeed.pipeline.planner.cost_table import TableCost, parse_milliseconds, read_rows
from ringfeed.pipeline.planner.nonnegative import nonnegative_least_squares

__all__ = ["Basis", "CostFit", "Sample", "fit_cost", "read_samples"]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_COLUMNS = ("lengths", "milliseconds")
_LONGEST = (1 << 31) - 1
_ROWS_PER_DOUBLING = 8
_NANOSECONDS = 1_000_000
# Timings scatter by a per cent or so: what differs by less cannot be told apart.
_LEAST_DIFFERENCE = 0.01
_LINEAR = ("tokens", "documents", "packs")
_BEND = "beyond "


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One pack that was measured."""

    place: str
    """``FILE:LINE``."""
    lengths: Int64
    """int64 [D], D >= 1, each at least 1."""
    milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostFit:
    """A table, and how well it says what was measured."""

    table: TableCost
    coefficients: dict[str, float]
    """Milliseconds per unit of each term; terms that samples do not tell apart are left out."""
    left_out: tuple[str, ...]
    """Terms that the samples do not tell from others."""
    residuals: Float64
    """float64 [N], (fitted - measured) / measured of each sample."""

    @property
    def typical_error(self) -> float:
        """Root mean square of the residuals."""
        return float(np.sqrt(np.square(self.residuals).mean()))

    @property
    def largest_error(self) -> float:
        return float(np.abs(self.residuals).max())

    def worst(self, samples: list[Sample], *, count: int = 3) -> list[dict[str, Any]]:
        """Return place, milliseconds and error of the ``samples`` furthest off, JSON-able."""
        order = np.argsort(-np.abs(self.residuals), kind="stable")[:count].tolist()
        return [
            {
                "place": samples[i].place,
                "milliseconds": samples[i].milliseconds,
                "error": float(self.residuals[i]),
            }
            for i in order
        ]


def read_samples(path: Path) -> list[Sample]:
    """Read measured packs; lines that begin with ``#`` are comments.

    Raises:
        ValueError: if there is no such file, or a line is no sample, with its number.
    """
    samples = []
    for place, (words, time) in read_rows(path, columns=_COLUMNS):
        lengths = words.split()
        # int() alone would also take 1_000, +1 and the digits of every script.
        wrong = [word for word in lengths if not (word.isascii() and word.isdecimal())]
        if wrong or not lengths:
            raise ValueError(f"{place}: {' '.join(wrong)[:40]!r} is no document length; write 4096 512 512")
        numbers = [int(word) for word in lengths]
        if not 1 <= min(numbers) <= max(numbers) <= _LONGEST:
            raise ValueError(
                f"{place}: document lengths go from 1 to {_LONGEST}, got {min(numbers)} to {max(numbers)}"
            )
        milliseconds = float(parse_milliseconds(time, place))
        if milliseconds <= 0:
            raise ValueError(f"{place}: a pack took {time} ms; times are above 0")
        samples.append(Sample(place=place, lengths=np.array(numbers, np.int64), milliseconds=milliseconds))
    return samples


def fit_cost(samples: list[Sample], *, basis: Basis, tolerance: float) -> CostFit:
    """Fit a table to ``samples``; it ends at the longest document that was measured.

    Args:
        samples: measured packs; they must differ in how long their documents are.
        basis: shape of the curve.
        tolerance: share of its time that a sample may lie off the curve.

    Raises:
        ValueError: if there is no sample, there are too few, they are too alike, or one lies further off than
            ``tolerance``; names the sample and the way out.
    """
    if not samples:
        raise ValueError(f"there is no sample; a sample is a line of {','.join(_COLUMNS)}")
    terms = _terms(samples, basis)
    times = np.array([sample.milliseconds for sample in samples])
    kept = _independent({name: column / times for name, column in terms.items()})
    if all(name in _LINEAR for name in kept):
        raise ValueError(
            f"{len(samples)} samples do not tell how cost grows with length: their documents are too alike; "
            "measure packs of few long and packs of many short documents"
        )
    if len(samples) < 2 * len(kept):
        raise ValueError(
            f"{len(samples)} samples are too few for the {len(kept)} terms of basis={basis}; measure at "
            f"least {2 * len(kept)}" + (", or use basis=quadratic" if basis is Basis.PIECEWISE else "")
        )
    columns = np.stack([terms[name] / times for name in kept], axis=1)
    found = nonnegative_least_squares(columns, np.ones(len(samples)))
    coefficients = dict(zip(kept, found.tolist(), strict=True))
    table = _table(coefficients, longest=max(int(sample.lengths.max()) for sample in samples))
    residuals = _residuals(samples, table, coefficients.get("packs", 0.0))
    _check_residuals(samples, residuals, tolerance)
    left_out = tuple(name for name in terms if name not in kept)
    return CostFit(table=table, coefficients=coefficients, left_out=left_out, residuals=residuals)


def _terms(samples: list[Sample], basis: Basis) -> dict[str, Float64]:
    """Return what each sample has of each term: float64 [N] each, those first that tell the most."""
    lengths = np.concatenate([sample.lengths for sample in samples]).astype(np.float64)
    counts = np.array([len(sample.lengths) for sample in samples])
    firsts = np.cumsum(counts) - counts
    curves = {"tokens": lengths}
    if basis is Basis.QUADRATIC:
        curves["squares"] = lengths * lengths
    else:
        shortest, longest = int(lengths.min()), int(lengths.max())
        bends = [1 << power for power in range(32) if shortest < 1 << power < longest]
        curves |= {f"{_BEND}{bend}": np.maximum(lengths - bend, 0) for bend in bends}
    terms = {name: np.add.reduceat(values, firsts) for name, values in curves.items()}
    return {**terms, "documents": counts.astype(np.float64), "packs": np.ones(len(samples))}


def _independent(columns: dict[str, Float64]) -> list[str]:
    """Return the columns that are more than a sum of multiples of those before them."""
    basis: list[Float64] = []
    kept = []
    for name, column in columns.items():
        rest = column / np.linalg.norm(column)
        for direction in basis:
            rest = rest - (rest @ direction) * direction
        size = float(np.linalg.norm(rest))
        if size > _LEAST_DIFFERENCE:
            basis.append(rest / size)
            kept.append(name)
    return kept


def _table(coefficients: dict[str, float], *, longest: int) -> TableCost:
    """Return the curve's values, closely enough that straight lines between them follow it."""
    steps = np.arange(32 * _ROWS_PER_DOUBLING)
    grid = np.unique(np.round(2.0 ** (steps / _ROWS_PER_DOUBLING)).astype(np.int64))
    lengths = np.array([0, *grid[grid < longest], longest], dtype=np.int64)
    times = np.full(len(lengths), coefficients.get("documents", 0.0))
    for name, coefficient in coefficients.items():
        if name == "tokens":
            times += coefficient * lengths
        elif name == "squares":
            times += coefficient * np.square(lengths.astype(np.float64))
        elif name.startswith(_BEND):
            times += coefficient * np.maximum(lengths - int(name.removeprefix(_BEND)), 0)
    nanoseconds = np.maximum.accumulate(np.round(times * _NANOSECONDS).astype(np.int64))
    return TableCost(lengths=lengths, nanoseconds=nanoseconds)


def _residuals(samples: list[Sample], table: TableCost, per_pack: float) -> Float64:
    fitted = [per_pack + int(table.piece_costs(sample.lengths).sum()) / _NANOSECONDS for sample in samples]
    return np.array(fitted) / [sample.milliseconds for sample in samples] - 1


def _check_residuals(samples: list[Sample], residuals: Float64, tolerance: float) -> None:
    worst = int(np.abs(residuals).argmax())
    if abs(residuals[worst]) <= tolerance:
        return
    num_off = int((np.abs(residuals) > tolerance).sum())
    measured = samples[worst].milliseconds
    fitted = measured * (1 + float(residuals[worst]))
    raise ValueError(
        f"{samples[worst].place}: measured {measured:g} ms, the fit says {fitted:.4g}; {num_off} of "
        f"{len(samples)} samples lie off by more than tolerance={tolerance:g}; leave bad ones out, or raise "
        "the tolerance"
    )
