"""Which blocks of keys a block of queries sees, and which of these whole; compiled by numba on first use.

In:   one range of keys for each query (``sharding/window.py``)
Out:  tables as FlexAttention's ``BlockMask`` has them (``flex_mask.py``)

Shapes: Q queries, K keys, B tokens in a block, M and P blocks of queries and of keys.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["list_blocks"]

Int32Array: TypeAlias = npt.NDArray[np.int32]


@njit(cache=True, nogil=True)
def list_blocks(
    starts: Int64Array, stops: Int64Array, num_keys: int, block: int
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Return the key blocks of each query block: those seen in part, and those all its queries see whole.

    A block that reaches beyond the last query or key is never whole, as torch has it.

    Args:
        starts: int64 [Q], first key that each query sees.
        stops: int64 [Q], one past the last; at most ``starts`` where it sees none.
        num_keys: K.
        block: B.

    Returns:
        How many in part [M] and which [M, P], how many whole [M] and which [M, P]: rising, then zeros.
    """
    num_rows, num_columns = -(-len(starts) // block), -(-num_keys // block)
    num_part, num_full = np.zeros(num_rows, dtype=np.int32), np.zeros(num_rows, dtype=np.int32)
    part_ids = np.empty((num_rows, num_columns), dtype=np.int32)
    full_ids = np.empty((num_rows, num_columns), dtype=np.int32)
    # Where one more query begins to see a block, in part or whole, and where one fewer does.
    seen_steps = np.zeros(num_columns + 1, dtype=np.int32)
    full_steps = np.zeros(num_columns + 1, dtype=np.int32)
    for row in range(num_rows):
        seen_steps[:] = 0
        full_steps[:] = 0
        for query in range(row * block, min(row * block + block, len(starts))):
            if stops[query] <= starts[query]:
                continue
            seen_steps[starts[query] // block] += 1
            seen_steps[(stops[query] - 1) // block + 1] -= 1
            first_full, end_full = -(-starts[query] // block), stops[query] // block
            if first_full < end_full:
                full_steps[first_full] += 1
                full_steps[end_full] -= 1
        num_part[row], num_full[row] = _split(seen_steps, full_steps, block, part_ids[row], full_ids[row])
    return num_part, part_ids, num_full, full_ids


@njit(cache=True, nogil=True)
def _split(
    seen_steps: Int32Array, full_steps: Int32Array, block: int, part_ids: Int32Array, full_ids: Int32Array
) -> tuple[int, int]:
    """Write one row of both lists, and return how long they are; zeros follow."""
    num_part = num_full = 0
    seen = full = 0
    for column in range(len(part_ids)):
        seen += seen_steps[column]
        full += full_steps[column]
        is_full = full == block
        if is_full:
            full_ids[num_full] = column
            num_full += 1
        if seen > 0 and not is_full:
            part_ids[num_part] = column
            num_part += 1
    # Entries behind a list are never read as blocks, but they must be columns.
    part_ids[num_part:] = 0
    full_ids[num_full:] = 0
    return num_part, num_full
