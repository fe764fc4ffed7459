"""What a piece costs by measurement: a table of lengths and times, straight lines between its rows.

In:   a CSV file with the columns ``length,milliseconds`` (``ringfeed fit-cost`` makes one)
Out:  ``TableCost``, in whole nanoseconds

The numbers of the table are hashed into the model's name, and so into the recipe: a plan made with another
table is another plan, wherever the file lies.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.staging import write_atomically

__all__ = ["TableCost", "parse_milliseconds", "read_rows", "read_table", "write_table"]

Int64 = NDArray[np.int64]

_COLUMNS = ("length", "milliseconds")
_NANOSECONDS = 1_000_000
_LONGEST = (1 << 31) - 1
# A thousand seconds: sums over a step stay inside int64.
_LARGEST = 10**12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableCost:
    """Costs that rise along straight lines between measured lengths.

    Raises:
        ValueError: if lengths do not rise, costs fall, or either is negative or too large.
    """

    lengths: Int64
    """int64 [K], K >= 1, rising. Below the first one, costs rise from 0 tokens at no cost."""
    nanoseconds: Int64
    """int64 [K], never falling, the last one above 0."""

    def __post_init__(self) -> None:
        if self.lengths.ndim != 1 or self.lengths.shape != self.nanoseconds.shape:
            raise ValueError(
                f"a cost table has as many times as lengths, got {self.lengths.shape} and "
                f"{self.nanoseconds.shape}"
            )
        _check_rows(self._rows(), [f"cost table, row {row}" for row in range(len(self.lengths))])

    @property
    def name(self) -> str:
        digest = xxhash.xxh3_64(self.lengths.astype("<i8").tobytes())
        digest.update(self.nanoseconds.astype("<i8").tobytes())
        return f"table:xxh3_64={digest.hexdigest()}"

    def piece_costs(self, lengths: Int64) -> Int64:
        """Return the cost of each piece in nanoseconds, rounded down: int64 [P] -> int64 [P].

        Raises:
            ValueError: if a piece is longer than the table goes: what it costs was not measured.
        """
        longest = int(lengths.max(initial=0))
        if longest > int(self.lengths[-1]):
            raise ValueError(
                f"the cost table ends at {self.lengths[-1]} tokens and says nothing of a piece of {longest}; "
                "measure longer documents, or make packs no longer than that"
            )
        knots, costs = self.lengths, self.nanoseconds
        if knots[0] > 0:
            knots, costs = np.append(0, knots), np.append(0, costs)
        below = np.clip(np.searchsorted(knots, lengths, side="right") - 1, 0, len(knots) - 2)
        beyond, widths = lengths - knots[below], np.diff(knots)[below]
        # In two parts, since rise * beyond may leave int64.
        whole, rest = np.divmod(np.diff(costs)[below], widths)
        return np.asarray(costs[below] + whole * beyond + rest * beyond // widths, dtype=np.int64)

    def _rows(self) -> list[tuple[int, int]]:
        return list(zip(self.lengths.tolist(), self.nanoseconds.tolist(), strict=True))


def read_table(path: Path) -> TableCost:
    """Read a table; lines that begin with ``#`` are comments.

    Raises:
        ValueError: if there is no such file, or a line is no row of a table, with its number.
    """
    rows, places = [], []
    for place, (length, time) in read_rows(path, columns=_COLUMNS):
        if not (length.isascii() and length.isdecimal()):
            raise ValueError(f"{place}: length {length[:40]!r} is no whole number of tokens")
        rows.append((int(length), int((parse_milliseconds(time, place) * _NANOSECONDS).to_integral_value())))
        places.append(place)
    if not rows:
        raise ValueError(f"{path} has no row; a cost table has lines of {','.join(_COLUMNS)}")
    _check_rows(rows, places)
    lengths, nanoseconds = np.array(rows, dtype=np.int64).T
    return TableCost(lengths=lengths.copy(), nanoseconds=nanoseconds.copy())


def write_table(path: Path, table: TableCost, *, comments: Sequence[str] = ()) -> None:
    """Write a table that ``read_table`` reads back exactly, under lines of ``comments``."""
    lines = [f"# {comment}" for comment in comments]
    lines.append(",".join(_COLUMNS))
    for length, cost in zip(table.lengths.tolist(), table.nanoseconds.tolist(), strict=True):
        lines.append(f"{length},{cost // _NANOSECONDS}.{cost % _NANOSECONDS:06d}")
    with write_atomically(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_rows(path: Path, *, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the place (``FILE:LINE``) and the cells of each row of a CSV file with these columns.

    Raises:
        ValueError: if the file is missing, is no text, has other columns, or a row has more or fewer cells.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file; give a CSV file with the columns {','.join(columns)}")
    # Damaged text must end as a named line, not as a decoding error without one.
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    has_header = False
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        place = f"{path}:{number}"
        if not has_header:
            if cells != list(columns):
                raise ValueError(f"{place}: the columns must be {','.join(columns)}, got {line[:80]!r}")
            has_header = True
            continue
        if len(cells) != len(columns):
            raise ValueError(f"{place}: {len(cells)} cells, need {len(columns)}: {','.join(columns)}")
        yield place, cells


def parse_milliseconds(cell: str, place: str) -> Decimal:
    """Return the time in ``cell``, exactly.

    Raises:
        ValueError: if it is no finite number.
    """
    try:
        time = Decimal(cell)
    except InvalidOperation:
        time = Decimal("nan")
    if not time.is_finite():
        raise ValueError(f"{place}: {cell[:40]!r} is no time in milliseconds")
    return time


def _check_rows(rows: Sequence[tuple[int, int]], places: Sequence[str]) -> None:
    before = (-1, 0)
    for (length, cost), place in zip(rows, places, strict=True):
        if not (0 <= length <= _LONGEST and 0 <= cost <= _LARGEST):
            raise ValueError(
                f"{place}: {length} tokens in {cost} ns; lengths go from 0 to {_LONGEST}, times from 0 to "
                f"{_LARGEST // _NANOSECONDS} ms"
            )
        if length <= before[0]:
            raise ValueError(f"{place}: length {length} does not rise above {before[0]}; sort the rows")
        if cost < before[1]:
            raise ValueError(
                f"{place}: {length} tokens cost {cost} ns, fewer ({before[0]}) cost {before[1]} ns; a longer "
                "piece never costs less: leave the row out, or fit the table again (ringfeed fit-cost)"
            )
        before = (length, cost)
    if before[0] < 1 or before[1] == 0:
        raise ValueError("the longest piece of a cost table has at least one token, and costs something")
