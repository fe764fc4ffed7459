"""Batches one after the other, whatever they are kept in.

In:   any iterable of batches, or a Ray Dataset of batches or of single rows
Out:  an iterator of batches (``workers/convert_stream.py``)
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["is_dataset", "open_batches"]


def is_dataset(batches: object) -> bool:
    """Return whether this is a Ray Dataset; ``ray.data`` is not imported for it."""
    module = sys.modules.get("ray.data")
    return module is not None and isinstance(batches, module.Dataset)


def open_batches(batches: Iterable[Any], *, num_chunks: int) -> Iterator[Any]:
    """Return the batches in order.

    Args:
        batches: an iterable; or a Ray Dataset whose rows are batches (``input_ids`` [B, S]), or rows of
            batches (``input_ids`` [S]).
        num_chunks: rows that make a batch, where a Dataset has single ones.
    """
    return _from_dataset(batches, num_chunks) if is_dataset(batches) else iter(batches)


def _from_dataset(dataset: Any, num_chunks: int) -> Iterator[Any]:
    options = dataset.context.execution_options
    before = options.preserve_order
    # Without it blocks come as they are ready.
    options.preserve_order = True
    try:
        rows = iter(dataset.iter_rows())
        for row in rows:
            if np.ndim(row["input_ids"]) > 1:
                yield row
                continue
            several = [row, *islice(rows, num_chunks - 1)]
            yield {name: [entry[name] for entry in several] for name in row}
    finally:
        options.preserve_order = before
