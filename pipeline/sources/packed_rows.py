"""Rows that somebody else has packed: token lists with a table of the sequences in each.

In:   rows of token ids, and beside each the lengths of its sequences (``seq_lens``, ``seq_lens_padded``)
Out:  rows of token ids, one a sequence, that remember which row they came from

Where sequences lie is told by lengths alone; what lies between them is padding, and is left out. Labels of
such rows are shifted already, as in a BSHD batch: each is the next token of its sequence, or -100.

Shapes: n rows, P sequences, M real tokens.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.sources.masks import MaskKind, MaskValues

__all__ = ["ListValues", "PackedColumns", "PackedValues", "Sequences", "find_sequences", "shifted_fault"]

Int64 = NDArray[np.int64]

_IGNORE = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedColumns:
    """Which columns tell the sequences of a row."""

    lengths: str
    """Real lengths; entries of 0 and below stand for no sequence."""
    slots: str | None = None
    """Tokens that each one occupies in the row; None: they lie end to end."""

    @property
    def names(self) -> list[str]:
        """The columns to read."""
        return [self.lengths] if self.slots is None else [self.lengths, self.slots]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ListValues:
    """Lists of integers end to end."""

    values: NDArray[np.integer]
    """Any integer type, [sum of counts]."""
    counts: Int64
    """int64 [n]"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedValues:
    """The tables of n rows, not checked yet."""

    lengths: ListValues
    slots: ListValues | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sequences:
    """The sequences of n rows; a row that has none is there with one of length 0."""

    rows: Int64
    """int64 [P], which of the n rows each is in; rising."""
    lengths: Int64
    """int64 [P]"""
    tokens: Int64
    """int64 [M], where their tokens lie among those of all rows."""

    def take_mask(self, mask: MaskValues) -> MaskValues:
        """Return the mask of the sequences, of one of the n rows without a fault; shifted labels as flags."""
        values = mask.values[self.tokens]
        if mask.kind is not MaskKind.SHIFTED:
            return replace(mask, values=values, lengths=self.lengths)
        flags = np.zeros(len(values), dtype=np.uint8)
        # The label of the last token of the sequence before is -100, so that a first token gets no flag.
        flags[1:] = values[:-1] != _IGNORE
        return MaskValues(values=flags, lengths=self.lengths, kind=MaskKind.FLAGS)


def find_sequences(packed: PackedValues, row_lengths: Int64) -> Sequences | tuple[int, str]:
    """Return the sequences of n rows; or the first row whose table is wrong, and what is wrong there.

    Args:
        packed: the tables.
        row_lengths: int64 [n], tokens of each row.
    """
    real, counts = packed.lengths.values.astype(np.int64), packed.lengths.counts
    of_row, slots, name = np.repeat(np.arange(len(counts)), counts), real, "lengths"
    if packed.slots is not None:
        fault = _slot_fault(packed.lengths, packed.slots, of_row)
        if fault is not None:
            return fault
        slots, name = packed.slots.values.astype(np.int64), "padded lengths"
    present = real > 0
    real, slots, of_row = real[present], slots[present], of_row[present]
    used = np.zeros(len(counts), dtype=np.int64)
    np.add.at(used, of_row, slots)
    if (used > row_lengths).any():
        row = int((used > row_lengths).argmax())
        return row, f"has {row_lengths[row]} tokens, its {name} sum to {used[row]}"
    # Where each begins, had rows no tokens behind their last slot; then what those take.
    unused = row_lengths - used
    starts = np.cumsum(slots) - slots + (np.cumsum(unused) - unused)[of_row]
    tokens = np.repeat(starts - (np.cumsum(real) - real), real) + np.arange(int(real.sum()))
    bare = np.flatnonzero(used == 0)
    rows = np.concatenate([of_row, bare])
    order = np.argsort(rows, kind="stable")
    lengths = np.concatenate([real, np.zeros(len(bare), dtype=np.int64)])
    return Sequences(rows=rows[order], lengths=lengths[order], tokens=tokens)


def _slot_fault(lengths: ListValues, slots: ListValues, of_row: Int64) -> tuple[int, str] | None:
    unlike = np.flatnonzero(slots.counts != lengths.counts)
    if len(unlike):
        row = int(unlike[0])
        return row, f"has {lengths.counts[row]} lengths and {slots.counts[row]} padded lengths"
    real, held = lengths.values.astype(np.int64), slots.values.astype(np.int64)
    wrong = np.flatnonzero(((held > 0) != (real > 0)) | ((real > 0) & (held < real)))
    if not len(wrong):
        return None
    place = int(wrong[0])
    return int(of_row[place]), (
        f"has a sequence of length {real[place]} with padded length {held[place]}; a slot is at least as "
        "long as its sequence, and absent in both or in neither"
    )


def shifted_fault(
    sequences: Sequences, labels: MaskValues, tokens: NDArray[np.integer], row_lengths: Int64
) -> tuple[int, str] | None:
    """Return the first row whose shifted labels are not the next tokens, and what is wrong there.

    Args:
        sequences: of n rows.
        labels: of the n rows.
        tokens: of all rows.
        row_lengths: int64 [n], tokens of each row.
    """
    unlike = np.flatnonzero(labels.lengths != row_lengths)
    if len(unlike):
        row = int(unlike[0])
        return row, f"has {row_lengths[row]} tokens and {labels.lengths[row]} labels; each token needs one"
    given, own = labels.values[sequences.tokens], tokens[sequences.tokens]
    expected = np.full(len(own), _IGNORE, dtype=np.int64)
    expected[:-1] = own[1:]
    ends = np.cumsum(sequences.lengths)
    expected[ends[sequences.lengths > 0] - 1] = _IGNORE
    wrong = np.flatnonzero((given != _IGNORE) & (given != expected))
    if not len(wrong):
        return None
    place = int(wrong[0])
    sequence = int(np.searchsorted(ends, place, side="right"))
    offset = place - int(ends[sequence] - sequences.lengths[sequence])
    what = f"has label {given[place]} at token {offset} of a sequence of {sequences.lengths[sequence]}"
    if expected[place] == _IGNORE:
        what += ", its last one; a corpus has no token behind it: set this label to -100"
    else:
        what += (
            f", whose next token is {expected[place]}; labels of packed rows are shifted, so the next token"
        )
        what += " or -100"
    return int(sequences.rows[sequence]), f"{what}; ringfeed.workers.convert takes labels as they are"
