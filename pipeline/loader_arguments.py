"""Check what a trainer passes to ``Loader`` before anything is opened.

In:   arguments as they were passed (``pipeline/loader.py``)
Out:  the same in one form, or a ValueError that names the argument
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfeed.pipeline.batch import OFFSET_COLUMNS, TOKEN_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_counts", "checked_columns"]


def checked_columns(columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the wanted names of ``Batch.tensors`` in their order; None is all."""
    known = (*TOKEN_COLUMNS, *OFFSET_COLUMNS)
    if columns is None:
        return known
    wanted = [columns] if isinstance(columns, str) else list(columns)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ValueError(f"columns={wanted}: need at least one of {', '.join(known)}, got unknown {unknown}")
    return tuple(name for name in known if name in wanted)


def check_counts(*, prefetch_bytes: int, max_documents: int | None) -> None:
    """Refuse sizes that make no sense."""
    if prefetch_bytes < 0:
        raise ValueError(f"prefetch_bytes must be at least 0, got {prefetch_bytes}")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents must be at least 1, got {max_documents}")
