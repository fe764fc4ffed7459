"""A table whose columns are memory-mapped arrays, hashed page by page.

In:   columns of one length, however long, in parts
Out:  an Arrow file of one record batch, a file with the digest of each page, and the columns mapped again

A table of a billion rows is larger than memory, and readers want a few rows of it at once: so each column
lies in one piece in the file, and whoever reads a few rows checks the pages that they are in, not the file.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.token_files import DAMAGE

__all__ = [
    "PAGE_ROWS",
    "CheckedPages",
    "ColumnTypes",
    "Columns",
    "map_table",
    "merge_columns",
    "read_rows",
    "write_pages",
    "write_table",
]

ColumnTypes = Mapping[str, np.dtype]
"""Names and types of columns, in the order of the file."""
Columns = dict[str, NDArray[np.generic]]
"""Arrays of one length, by name."""

PAGE_ROWS = 4096
"""Rows that are hashed together: a shuffled plan reads 256 neighbours at a time, far apart."""


def write_table(path: Path, columns: Columns, types: ColumnTypes) -> None:
    """Write one record batch with ``columns``; mapped ones stream from the page cache."""
    schema = pa.schema(
        [pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in types.items()]
    )
    batch = pa.record_batch([pa.array(columns[name]) for name in types], schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)


def map_table(path: Path, types: ColumnTypes, *, optional: ColumnTypes | None = None) -> Columns:
    """Return the columns of a table, read-only and memory-mapped.

    Args:
        path: from ``write_table``.
        types: columns that it has.
        optional: columns that it has all of, or none.

    Raises:
        CorruptDataError: if the file is not there, or no such table any more.
    """
    try:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        # Checks buffer sizes, so that damaged metadata cannot point past the mapping.
        batch.validate()
        wanted = dict(types)
        if optional and set(optional) & set(batch.schema.names):
            wanted |= optional
        return {name: _as_array(batch.column(name), dtype) for name, dtype in wanted.items()}
    except DAMAGE as error:
        raise CorruptDataError(f"{path} cannot be read: {error}") from None


def read_rows(columns: Columns, rows: slice) -> Columns:
    """Return a slice of every column."""
    return {name: column[rows] for name, column in columns.items()}


def merge_columns(parts: Iterable[Columns], scratch: Path, types: ColumnTypes) -> Columns:
    """Lay parts end to end in files below ``scratch``, and return them mapped.

    Memory stays at one part. An earlier try's files are overwritten.
    """
    scratch.mkdir(exist_ok=True)
    paths = {name: scratch / name for name in types}
    streams = {name: path.open("wb") for name, path in paths.items()}
    try:
        for part in parts:
            for name, stream in streams.items():
                stream.write(np.ascontiguousarray(part[name], dtype=types[name]).data)
    finally:
        for stream in streams.values():
            stream.close()
    return {name: _map_column(path, types[name]) for name, path in paths.items()}


def write_pages(path: Path, columns: Columns) -> int:
    """Write the digests of all pages of ``columns``; return how many there are."""
    num_pages = -(-_num_rows(columns) // PAGE_ROWS)
    digests = np.fromiter((_page_digest(columns, page) for page in range(num_pages)), np.uint64, num_pages)
    batch = pa.record_batch([pa.array(digests)], names=["xxh3_64"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return num_pages


class CheckedPages:
    """Hashes pages of a mapped table, each once, when rows in them are used."""

    def __init__(self, columns: Columns, *, table: Path, pages: Path) -> None:
        self._columns = columns
        self._table = table
        self._pages = pages
        self._digests: NDArray[np.uint64] | None = None
        # A byte for 4,096 rows: this is all that grows with the table.
        self._checked = np.zeros(-(-_num_rows(columns) // PAGE_ROWS), dtype=np.bool_)

    def check_all(self) -> None:
        """Compare every page with its digest; errors as ``check``."""
        self.check(np.arange(len(self._checked)) * PAGE_ROWS)

    def check(self, rows: NDArray[np.integer]) -> None:
        """Compare the pages that ``rows`` (int [D], which exist) are in with their digests.

        Raises:
            CorruptDataError: if a byte of such a page changed; names the table.
        """
        pages = np.asarray(rows, dtype=np.int64) // PAGE_ROWS
        for page in np.unique(pages[~self._checked[pages]]).tolist():
            if self._digests is None:
                self._digests = _map_pages(self._pages)
            if _page_digest(self._columns, page) != int(self._digests[page]):
                raise CorruptDataError(
                    f"{self._table} is damaged in rows {page * PAGE_ROWS} and following (their xxh3_64 is "
                    f"not what {self._pages.name} says); restore both from a copy or ingest again"
                )
            self._checked[page] = True


def _page_digest(columns: Columns, page: int) -> int:
    """Return xxh3_64 over the rows of one page, column after column."""
    digest = xxhash.xxh3_64()
    rows = slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS)
    for column in columns.values():
        digest.update(np.ascontiguousarray(column[rows]).data)
    return digest.intdigest()


def _map_pages(path: Path) -> NDArray[np.uint64]:
    return map_table(path, {"xxh3_64": np.dtype(np.uint64)})["xxh3_64"].view(np.uint64)


def _map_column(path: Path, dtype: np.dtype) -> NDArray[np.generic]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _num_rows(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def _as_array(column: pa.Array, dtype: np.dtype) -> NDArray[np.generic]:
    array: NDArray[np.generic] = column.to_numpy(zero_copy_only=True)
    if array.dtype != dtype:
        raise KeyError(f"column of {array.dtype}, not {dtype}")
    return array
