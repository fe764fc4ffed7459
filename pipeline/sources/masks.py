"""Which tokens of a row are trained on, from a column of flags or of labels beside the tokens.

In:   rows of token ids, and rows of flags or labels for them
Out:  one flag per token (``pipeline/mask_runs.py`` makes runs of them)

Labels are those of the ``transformers`` library: each stands at its own token, and -100 leaves that out. They
are not shifted: the label that the token before is asked for is made later, of whole documents. Only rows
that were packed before have shifted ones (``packed_rows.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["MASK_FLAGS", "MaskChoice", "MaskKind", "MaskValues", "find_fault", "flags_of"]

_IGNORE = -100


class MaskKind(StrEnum):
    """What the column holds per token."""

    FLAGS = "flags"
    """1 or true: trained on. 0 or false: not."""
    LABELS = "labels"
    """The token itself: trained on. -100: not."""
    SHIFTED = "shifted labels"
    """Of rows that were packed before: the next token, where that is trained on. -100: not."""


MASK_FLAGS: Mapping[MaskKind, str] = {
    MaskKind.FLAGS: "--mask-column",
    MaskKind.LABELS: "--labels-column",
    MaskKind.SHIFTED: "--labels-column",
}
"""How a user names the column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskChoice:
    """Which column says what is trained on."""

    name: str
    kind: MaskKind


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskValues:
    """What the column holds, of n rows, not checked yet."""

    values: NDArray[np.integer]
    """Any integer type, [sum of lengths]; false and true are 0 and 1."""
    lengths: NDArray[np.int64]
    """int64 [n]"""
    kind: MaskKind


def find_fault(
    mask: MaskValues, tokens: NDArray[np.integer], lengths: NDArray[np.int64]
) -> tuple[int, str] | None:
    """Return the first row whose mask does not go with its tokens, and what is wrong there; None: all do.

    Args:
        mask: of n rows.
        tokens: any integers, [sum of lengths].
        lengths: int64 [n], tokens of each row.
    """
    unlike = np.flatnonzero(mask.lengths != lengths)
    if len(unlike):
        row = int(unlike[0])
        return row, f"has {lengths[row]} tokens and {mask.lengths[row]} {mask.kind}; each token needs one"
    allowed = (mask.values == _IGNORE) | (mask.values == tokens)
    if mask.kind is MaskKind.FLAGS:
        allowed = (mask.values == 0) | (mask.values == 1)
    wrong = np.flatnonzero(~allowed)
    if len(wrong) == 0:
        return None
    place = int(wrong[0])
    ends = np.cumsum(lengths)
    row = int(np.searchsorted(ends, place, side="right"))
    offset, value = place - int(ends[row] - lengths[row]), mask.values[place]
    if mask.kind is MaskKind.FLAGS:
        return row, f"has flag {value} at token {offset}; flags are 0 or 1"
    return row, (
        f"has label {value} at token {offset}, which is {tokens[place]}; a label is its own token or -100, "
        "not the next one"
    )


def flags_of(mask: MaskValues) -> NDArray[np.bool_]:
    """Return which tokens are trained on, bool [sum of lengths], of a mask without a fault."""
    wanted = mask.values == 1 if mask.kind is MaskKind.FLAGS else mask.values != _IGNORE
    return np.asarray(wanted, dtype=np.bool_)
