"""What to watch in a batch for TransformerEngine's THD attention, from its offsets alone.

In:   how many boundaries a chunk has; its real and slot offsets [N + 1]
Out:  a warning's text, and a count of pieces that are all padding

Shapes: N slots' count, R cp ranks.
"""

from typing import Any

import numpy as np

from ringfeed.sharding.layout_contract import check_ranks
from ringfeed.sharding.offsets import as_offsets, as_real_offsets
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["MAX_BOUNDARIES", "boundary_warning", "count_padding_pieces"]

MAX_BOUNDARIES = 12_288
"""int32 offsets that fit in the 48 KiB of shared memory which TransformerEngine's kernel gets by default."""


def boundary_warning(num_boundaries: int) -> str | None:
    """Return what to warn of when a chunk has N + 1 = ``num_boundaries`` offsets, None for nothing."""
    if num_boundaries <= MAX_BOUNDARIES:
        return None
    return (
        f"the chunk has {num_boundaries} boundaries; TransformerEngine's THD kernels keep them in shared "
        f"memory, where about {MAX_BOUNDARIES} fit, and may not start; use shorter packs or fewer per chunk"
    )


def count_padding_pieces(cu_seqlens: Any, cu_seqlens_padded: Any, *, cp_size: int) -> Int64Array:
    """Count on each rank the real documents whose second piece is nothing but padding, int64 [R].

    In the layout ``te`` rank r holds pieces r and 2R - 1 - r of a document. Some versions of
    TransformerEngine made NaN gradients where the second was all padding; documents much longer than
    2R tokens have none. The layout ``whole_document`` keeps short documents whole on one rank, for
    attention that takes it (``allgather``, ``flex``).

    Args:
        cu_seqlens: real offsets [N + 1], 1-D integers (tensor, array or list).
        cu_seqlens_padded: slot offsets [N + 1], slots a multiple of 2R.
        cp_size: R; at 1 nothing is cut, and the count is 0.

    Raises:
        ValueError: if the offsets are none or do not fit each other, or ``cp_size`` is below 1.
    """
    check_ranks(cp_size)
    slots = as_offsets(cu_seqlens_padded)
    real = np.diff(as_real_offsets(cu_seqlens, slots))
    if cp_size == 1:
        return np.zeros(1, dtype=np.int64)
    is_real = real > 0
    pieces = np.diff(slots)[is_real] // (2 * cp_size)
    first_token = pieces[:, None] * np.arange(2 * cp_size - 1, cp_size - 1, -1)
    counts: Int64Array = (real[is_real][:, None] <= first_token).sum(axis=0)
    return counts
