"""``documents.arrow``: one row per document, each column one memory-mapped array.

In:   rows of finished token files (``pipeline/corpus_writer.py``)
Out:  one record batch, however many documents there are, written with bounded memory

A corpus of a billion documents has a table larger than memory, and a loader must read single rows
of it at once: so each column lies in one piece in the file, and is mapped, not read. For the same reason
the rows are hashed page by page (``documents.pages.arrow``): whoever reads a few rows checks their pages.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.token_files import DAMAGE

__all__ = [
    "COLUMNS",
    "PAGE_ROWS",
    "Columns",
    "content_digest",
    "map_documents",
    "map_pages",
    "merge_columns",
    "page_digest",
    "read_rows",
    "write_documents",
    "write_pages",
]

COLUMNS: dict[str, np.dtype] = {
    "length": np.dtype(np.int64),
    "supervised": np.dtype(np.int64),
    "source": np.dtype(np.int32),
    "file": np.dtype(np.int32),
    "row": np.dtype(np.int64),
    "token_file": np.dtype(np.int32),
    "token_start": np.dtype(np.int64),
    "xxh3_64": np.dtype(np.uint64),
}
"""length: tokens. supervised: labels other than -100 after the shift. source: which SRC of the
command. file: row of ``inputs.arrow``. row: of the input file, from 0. token_file, token_start:
where the tokens are, in elements. xxh3_64: of the document's token bytes, little-endian."""

Columns = dict[str, NDArray[np.generic]]
"""Arrays of one length, under the names of ``COLUMNS``."""

PAGE_ROWS = 4096
"""Rows that are hashed together: a shuffled plan reads 256 neighbours at a time, far apart."""

_DIGESTED = ("length", "supervised", "xxh3_64")
_HASH_ROWS = 1 << 20


def write_documents(path: Path, columns: Columns) -> None:
    """Write one record batch with ``columns``; mapped ones stream from the page cache."""
    schema = pa.schema(
        [pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in COLUMNS.items()]
    )
    batch = pa.record_batch([pa.array(columns[name]) for name in COLUMNS], schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)


def map_documents(path: Path) -> Columns:
    """Return the columns of a table, read-only and memory-mapped.

    Raises:
        CorruptDataError: if the file is not there, or no such table any more.
    """
    try:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        # Checks buffer sizes, so that damaged metadata cannot point past the mapping.
        batch.validate()
        return {name: _as_array(batch.column(name), dtype) for name, dtype in COLUMNS.items()}
    except DAMAGE as error:
        raise CorruptDataError(f"{path} cannot be read: {error}") from None


def read_rows(columns: Columns, rows: slice) -> Columns:
    """Return a slice of every column."""
    return {name: column[rows] for name, column in columns.items()}


def merge_columns(parts: Iterable[Columns], scratch: Path) -> Columns:
    """Lay parts end to end in files below ``scratch``, and return them mapped.

    Memory stays at one part. An earlier try's files are overwritten.
    """
    scratch.mkdir(exist_ok=True)
    paths = {name: scratch / name for name in COLUMNS}
    streams = {name: path.open("wb") for name, path in paths.items()}
    try:
        for part in parts:
            for name, stream in streams.items():
                stream.write(np.ascontiguousarray(part[name], dtype=COLUMNS[name]).data)
    finally:
        for stream in streams.values():
            stream.close()
    return {name: np.memmap(path, dtype=COLUMNS[name], mode="r") for name, path in paths.items()}


def page_digest(columns: Columns, page: int) -> int:
    """Return xxh3_64 over the rows of one page, column after column."""
    digest = xxhash.xxh3_64()
    rows = slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS)
    for name in COLUMNS:
        digest.update(np.ascontiguousarray(columns[name][rows]).data)
    return digest.intdigest()


def write_pages(path: Path, columns: Columns) -> int:
    """Write the digests of all pages of ``columns``; return how many there are."""
    num_pages = -(-len(columns["length"]) // PAGE_ROWS)
    digests = np.fromiter((page_digest(columns, page) for page in range(num_pages)), np.uint64, num_pages)
    batch = pa.record_batch([pa.array(digests)], names=["xxh3_64"])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return num_pages


def map_pages(path: Path) -> NDArray[np.uint64]:
    """Return the digest of each page, uint64 [pages], read-only and memory-mapped.

    Raises:
        CorruptDataError: if the file is not there, or no such table any more.
    """
    try:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        batch.validate()
        return _as_array(batch.column("xxh3_64"), np.dtype(np.uint64)).view(np.uint64)
    except DAMAGE as error:
        raise CorruptDataError(f"{path} cannot be read: {error}") from None


def content_digest(columns: Columns) -> str:
    """Return xxh3_128 over lengths, supervised counts and token hashes: what documents say.

    It leaves out where they came from and where their tokens lie.
    """
    digest = xxhash.xxh3_128()
    for name in _DIGESTED:
        column = columns[name]
        for start in range(0, len(column), _HASH_ROWS):
            digest.update(np.ascontiguousarray(column[start : start + _HASH_ROWS]).data)
    return digest.hexdigest()


def _as_array(column: pa.Array, dtype: np.dtype) -> NDArray[np.generic]:
    array: NDArray[np.generic] = column.to_numpy(zero_copy_only=True)
    if array.dtype != dtype:
        raise KeyError(f"column of {array.dtype}, not {dtype}")
    return array
