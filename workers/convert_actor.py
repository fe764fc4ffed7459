"""A worker that converts batches: a thin shell for Ray around ``pipeline/conversion.py``.

In:   batches of numpy arrays, over the object store's memory
Out:  views of every chunk and cp rank, put into the object store

It holds nothing between two batches, and imports no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.conversion import convert_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfeed.pipeline.conversion import ConvertOptions
    from ringfeed.pipeline.views import RankView

__all__ = ["ConvertActor"]


class ConvertActor:
    """Converts one batch after the other."""

    def __init__(self, options: ConvertOptions) -> None:
        self._options = options

    def pid(self) -> int:
        """Return the process id, once the actor is up."""
        return os.getpid()

    def convert(self, batch: Mapping[str, Any]) -> tuple[int, list[list[RankView]]]:
        """Return the number of chunks and their views; as two results, so that the second need not move.

        Raises:
            ValueError: if the batch cannot be converted.
        """
        chunks = convert_batch(batch, self._options)
        return len(chunks), chunks
