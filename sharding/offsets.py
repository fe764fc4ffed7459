"""Read and check the offsets that say where the slots of a chunk begin and end.

In:   ``cu_seqlens`` / ``cu_seqlens_padded`` in any form a caller has (tensor, array, list)
Out:  checked int64 arrays for the layouts (``layouts.py``)

N slots have N + 1 offsets; slot i is ``offsets[i]:offsets[i + 1]``, the last offset is T.
"""

from typing import Any

import numpy as np

from ringfeed.sharding.run_kernels import Int64Array, first_falling_offset, first_overfull_slot

__all__ = ["as_integers", "as_offsets", "as_real_offsets"]


def as_integers(values: Any, *, name: str) -> Int64Array:
    """Return ``values`` as a new int64 array [N], N >= 0.

    Args:
        values: 1-D integers: a torch tensor on any device, an array, or a list.
        name: what an error calls them.

    Raises:
        ValueError: if they are not 1-D integers.
    """
    # A tensor brings its own way to numpy, so this module need not import torch.
    found = values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
    if found.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {list(found.shape)}")
    if found.dtype.kind not in "iu" and found.size:
        raise ValueError(f"{name} must be integers, got {found.dtype}")
    # Always a copy: what is built from it must not change with the caller's buffer.
    return np.array(found, dtype=np.int64)


def as_offsets(values: Any, *, name: str = "cu_seqlens_padded") -> Int64Array:
    """Return ``values`` as a new, checked int64 array [N + 1] with N >= 1.

    Args:
        values: 1-D integers: a torch tensor on any device, an array, or a list.
        name: what an error calls them.

    Raises:
        ValueError: if they are not 1-D integers, fewer than two, do not begin at 0, or fall.
    """
    offsets = as_integers(values, name=name)
    if len(offsets) < 2:
        raise ValueError(f"{name} needs at least 2 offsets (0 and the end of slot 0), got {offsets.tolist()}")
    if offsets[0] != 0:
        raise ValueError(f"{name} must begin at 0, but slot 0 begins at {offsets[0]}")
    slot = first_falling_offset(offsets)
    if slot >= 0:
        raise ValueError(
            f"{name} must not fall, but slot {slot} begins at {offsets[slot]} and ends at {offsets[slot + 1]}"
        )
    return offsets


def as_real_offsets(cu_seqlens: Any, offsets: Int64Array) -> Int64Array:
    """Return the real offsets as a new, checked int64 array [N + 1].

    Args:
        cu_seqlens: real offsets [N + 1], 1-D integers (tensor, array or list).
        offsets: slot offsets [N + 1] from ``as_offsets``.

    Raises:
        ValueError: if the two disagree on N, or a slot holds less than its real length.
    """
    real = as_offsets(cu_seqlens, name="cu_seqlens")
    if len(real) != len(offsets):
        raise ValueError(
            f"cu_seqlens describes {len(real) - 1} slots, but cu_seqlens_padded {len(offsets) - 1}"
        )
    slot = first_overfull_slot(real, offsets)
    if slot >= 0:
        raise ValueError(
            f"slot {slot} has {offsets[slot + 1] - offsets[slot]} tokens of room, but cu_seqlens "
            f"puts {real[slot + 1] - real[slot]} real tokens into it"
        )
    return real
