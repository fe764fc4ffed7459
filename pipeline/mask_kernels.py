"""Labels that a document's mask leaves out: set to -100 after the labels have been filled in.

In:   one rank's labels and runs (``view_kernels.fill_tokens``), the masks of its pieces (``corpus_masks.py``)
Out:  the labels, changed in place, and how many are left
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from ringfeed.pipeline.view_kernels import IGNORE, first_slot

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["mask_labels"]


@njit(nogil=True, cache=True)
def mask_labels(
    runs: npt.NDArray[np.int64],
    cu_padded: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    masks: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    labels: npt.NDArray[np.int32],
) -> int:
    """Ignore every label whose target is in no run of its document.

    The label at offset k of a piece asks for token start + k + 1 of the document.

    Args:
        runs: [K, 2] start and length in the pack, in local order.
        cu_padded: [N + 1] slot offsets.
        starts: [P] first token of each piece in its document; piece p fills slot p, later slots have none.
        masks: offsets [P + 1], starts [R] and stops [R] of the targets of each piece's document.
        labels: [L], changed.

    Returns:
        How many labels are not ``IGNORE``.
    """
    offsets, run_starts, run_stops = masks
    local, slot, supervised = 0, 0, 0
    for run in range(len(runs)):
        position, end = runs[run, 0], runs[run, 0] + runs[run, 1]
        while position < end:
            slot = first_slot(cu_padded, position, slot)
            width = min(end, np.int64(cu_padded[slot + 1])) - position
            if slot < len(starts):
                target = starts[slot] + position - cu_padded[slot] + 1
                first, last = offsets[slot], offsets[slot + 1]
                # The first run that goes on beyond the target.
                at = first + np.searchsorted(run_stops[first:last], target, side="right")
                for i in range(width):
                    while at < last and run_stops[at] <= target + i:
                        at += 1
                    if at == last or run_starts[at] > target + i:
                        labels[local + i] = IGNORE
                    elif labels[local + i] != IGNORE:
                        supervised += 1
            local += width
            position += width
    return supervised
