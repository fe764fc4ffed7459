"""Rows as they come out of an input file: text, or tokens that somebody else made.

In:   the reader of one kind of file (``text_folder.py``, ``jsonl.py``, ``parquet.py``, ``arrow.py``)
Out:  ``TextRows`` or ``TokenRows``, made into documents by ``pipeline/sources/read_part.py``
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.sources.masks import MaskChoice, MaskValues
from ringfeed.pipeline.sources.packed_rows import PackedColumns, PackedValues

__all__ = ["ColumnChoice", "TextRows", "TokenRows", "join_texts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChoice:
    """Which column of JSONL, Parquet and Arrow holds the documents."""

    name: str = "text"
    is_tokens: bool = False
    """Token lists, not text."""
    mask: MaskChoice | None = None
    """What tells which tokens are trained on; goes with token lists."""
    packing: PackedColumns | None = None
    """What tells the documents of a row that was packed before; None: a row is a document."""

    @property
    def names(self) -> list[str]:
        """The columns to read."""
        mask = [] if self.mask is None else [self.mask.name]
        return [self.name, *mask, *([] if self.packing is None else self.packing.names)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TextRows:
    """n rows of bytes that should be UTF-8; empty ones included."""

    text: NDArray[np.uint8]
    """uint8 [B]"""
    offsets: NDArray[np.int64]
    """int64 [n + 1], from 0 to B."""
    rows: NDArray[np.int64]
    """int64 [n], row of the file, counted from the first row of the part."""
    num_rows: int
    """Rows that the part covers."""
    files: NDArray[np.int32] | None = None
    """int32 [n], place of the row's file in the part; None: the part has one file."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRows:
    """n rows of token ids, not checked yet; empty ones included."""

    tokens: NDArray[np.integer]
    """Any integer type, [sum of lengths]."""
    lengths: NDArray[np.int64]
    """int64 [n]"""
    rows: NDArray[np.int64]
    """int64 [n], row of the file, counted from the first row of the part."""
    num_rows: int
    mask: MaskValues | None = None
    """Of the n rows; None: all is trained on."""
    packed: PackedValues | None = None
    """Of the n rows; None: each is a document."""


def join_texts(texts: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of n texts end to end, uint8 [B], and their offsets, int64 [n + 1]."""
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return np.frombuffer(b"".join(texts), dtype=np.uint8), offsets
