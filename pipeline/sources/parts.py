"""A part of the input: what is read at once, on its own, anywhere.

In:   input files (``pipeline/sources/inputs.py``)
Out:  ``Part``s of a few megabytes, in reading order (``pipeline/sources/read_part.py`` reads one)

The cut depends on the files alone, so a rerun has the same parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringfeed.pipeline.sources.inputs import InputFile

__all__ = ["Part", "cut_by_size"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Several whole text files, or a range of one file of another kind."""

    files: tuple[InputFile, ...]
    start: int = 0
    """JSONL: first byte. Parquet: first row group. Arrow: first record batch."""
    stop: int = 0
    """One past the last."""
    first_row: int | None = 0
    """Row of the file at ``start``; None where only reading all before it would tell (JSONL)."""
    bytes: int
    """Share of the input's bytes, for progress."""


def cut_by_size(file: InputFile, rows: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[Part]:
    """Group the row groups or batches of one file into parts of at most ``limit`` bytes.

    Args:
        file: a Parquet or Arrow file.
        rows: of each row group or batch.
        sizes: bytes of each in memory; one beyond ``limit`` is a part of its own.
        limit: see above.
    """
    start = first_row = 0
    total = max(1, sum(sizes))
    while start < len(rows):
        stop, size = start + 1, sizes[start]
        while stop < len(rows) and size + sizes[stop] <= limit:
            size += sizes[stop]
            stop += 1
        share = file.bytes * size // total
        yield Part(files=(file,), start=start, stop=stop, first_row=first_row, bytes=share)
        first_row += sum(rows[start:stop])
        start = stop
