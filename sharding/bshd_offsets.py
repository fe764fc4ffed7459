"""Where the sequences of BSHD rows lie, told by their lengths alone.

In:   ``seq_lens`` and ``seq_lens_padded`` [B, K] of rows that somebody else has packed
Out:  ``RowSequences``, from which ``pipeline/bshd.py`` lays rows out again and
      ``automodel_thd.py`` makes the offsets of a THD stream

Shapes: B rows, S tokens in a row, K entries of a row, N sequences of all rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["RowSequences", "read_row_sequences"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowSequences:
    """The sequences of B rows, row after row."""

    counts: Int64Array
    """int64 [B], sequences of each row."""
    lengths: Int64Array
    """int64 [N], their real tokens."""
    slots: Int64Array
    """int64 [N], the tokens each one occupies in its row; its length where that is not told."""
    width: int
    """S."""

    @property
    def starts(self) -> Int64Array:
        """int64 [N], where each sequence begins in its row."""
        starts: Int64Array = np.cumsum(self.slots) - self.slots
        first = np.append(starts, 0)[np.cumsum(self.counts) - self.counts]
        within: Int64Array = starts - np.repeat(first, self.counts)
        return within

    @property
    def tails(self) -> Int64Array:
        """int64 [N], padding between the slot of a sequence and the next one in the stream of all rows.

        The last entry is the padding at the end of the stream, that of rows without a sequence included.

        Raises:
            ValueError: if the first row has no sequence, so its padding is behind none.
        """
        if not len(self.slots) or not self.counts[0]:
            raise ValueError(
                "row 0 of seq_lens has no sequence, so nothing says whose padding it is; "
                "put rows without a sequence last, or leave them out"
            )
        row_of = np.repeat(np.arange(len(self.counts)), self.counts)
        starts = self.starts + row_of * self.width
        ends: Int64Array = np.append(starts[1:], len(self.counts) * self.width)
        return ends - starts - self.slots

    def of_rows(self, first: int, last: int) -> "RowSequences":
        """Return the sequences of rows ``first`` to ``last - 1``."""
        bounds = np.concatenate([[0], np.cumsum(self.counts)])
        here = slice(int(bounds[first]), int(bounds[last]))
        return RowSequences(
            counts=self.counts[first:last],
            lengths=self.lengths[here],
            slots=self.slots[here],
            width=self.width,
        )


def read_row_sequences(
    seq_lens: Any, seq_lens_padded: Any, *, num_rows: int, width: int, absent: int | None = None
) -> RowSequences:
    """Return the sequences of all rows after checking that the lengths fit together.

    Args:
        seq_lens: real lengths, integers [B, K] (tensor on any device, or array).
        seq_lens_padded: slots, integers [B, K]; None where sequences lie end to end.
        num_rows: B.
        width: S.
        absent: the value of entries that stand for no sequence, in both arrays; without it these are
            all entries of 0 and below.

    Raises:
        ValueError: if the arrays are no integers [B, K], a length is negative, a slot is shorter than its
            sequence or absent in one array only, or the slots of a row do not fit into it. Row and field
            are named.
    """
    real = _matrix(seq_lens, "seq_lens", num_rows)
    present = _is_present(real, absent)
    if absent is not None:
        _check_sign(real, present, "seq_lens")
    slots, field = real, "seq_lens"
    if seq_lens_padded is not None:
        slots, field = _matrix(seq_lens_padded, "seq_lens_padded", num_rows), "seq_lens_padded"
        _check_slots(real, slots, present, absent)
    used = np.where(present, slots, 0).sum(axis=1)
    if (used > width).any():
        row = int((used > width).argmax())
        raise ValueError(f"row {row}: {field} sums to {used[row]}, input_ids has {width} tokens in a row")
    return RowSequences(counts=present.sum(axis=1), lengths=real[present], slots=slots[present], width=width)


def _matrix(values: Any, name: str, num_rows: int) -> Int64Array:
    # A tensor brings its own way to numpy, so this module need not import torch.
    found = values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
    if found.ndim != 2 or found.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers [B, K], got {found.dtype} {list(found.shape)}")
    if len(found) != num_rows:
        raise ValueError(f"{name} has {len(found)} rows, input_ids {num_rows}")
    return found.astype(np.int64)


def _is_present(entries: Int64Array, absent: int | None) -> npt.NDArray[np.bool_]:
    return entries > 0 if absent is None else entries != absent


def _check_sign(entries: Int64Array, present: npt.NDArray[np.bool_], name: str) -> None:
    wrong = present & (entries < 0)
    if wrong.any():
        row, k = np.argwhere(wrong)[0]
        raise ValueError(f"row {row}: {name}[{k}]={entries[row, k]}, but a length is at least 0")


def _check_slots(
    real: Int64Array, slots: Int64Array, present: npt.NDArray[np.bool_], absent: int | None
) -> None:
    if slots.shape != real.shape:
        raise ValueError(f"row 0: seq_lens has {real.shape[1]} entries, seq_lens_padded {slots.shape[1]}")
    wrong = (present != _is_present(slots, absent)) | (present & (slots < real))
    if wrong.any():
        row, k = np.argwhere(wrong)[0]
        raise ValueError(
            f"row {row}: seq_lens_padded[{k}]={slots[row, k]} does not fit seq_lens[{k}]={real[row, k]}; a "
            "slot is at least as long as its sequence, and absent in both or in neither"
        )
