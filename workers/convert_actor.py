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

    def convert(self, batch: Mapping[str, Any]) -> tuple[str | None, list[list[RankView]]]:
        """Return what is wrong with a batch, None for nothing, and the views of its chunks.

        Two results, so that the second one need not move. What is wrong is no exception, since Ray logs each
        that nobody asks for.
        """
        try:
            return None, convert_batch(batch, self._options)
        except ValueError as error:
            return str(error), []
