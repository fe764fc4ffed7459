"""``documents.arrow``: one row per document, each column one memory-mapped array (``paged_table.py``).

In:   rows of finished token files (``pipeline/corpus_writer.py``)
Out:  its columns, and the digest of what documents say
"""

from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.paged_table import Columns, ColumnTypes, map_table

__all__ = ["COLUMNS", "MASK_COLUMNS", "content_digest", "map_documents", "row_starts"]

COLUMNS: ColumnTypes = {
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

MASK_COLUMNS: ColumnTypes = {"first_run": np.dtype(np.int64), "num_runs": np.dtype(np.int64)}
"""Of a corpus with masks: which rows of ``mask_runs.arrow`` are the document's (``mask_runs.py``)."""

_DIGESTED = ("length", "supervised", "xxh3_64")
_HASH_ROWS = 1 << 20


def map_documents(path: Path) -> Columns:
    """Return the columns of a table, read-only and memory-mapped; ``MASK_COLUMNS`` are in it if it has them.

    Raises:
        CorruptDataError: if the file is not there, or no such table any more.
    """
    return map_table(path, COLUMNS, optional=MASK_COLUMNS)


def row_starts(columns: Columns) -> NDArray[np.int64]:
    """Return the first document of each input row, and the number of documents: int64 [R + 1].

    A row that was packed before has several documents, one after another; any other has one.
    """
    file, row = columns["file"].view(np.int32), columns["row"].view(np.int64)
    firsts = [np.zeros(min(len(file), 1), dtype=np.int64)]
    for start in range(1, len(file), _HASH_ROWS):
        now, before = slice(start, start + _HASH_ROWS), slice(start - 1, start - 1 + _HASH_ROWS)
        count = len(file[now])
        is_first = (file[now] != file[before][:count]) | (row[now] != row[before][:count])
        firsts.append(start + np.flatnonzero(is_first))
    return np.concatenate([*firsts, [len(file)]])


def content_digest(columns: Columns, *, runs: Columns | None) -> str:
    """Return xxh3_128 over what documents say: lengths, supervised counts, token hashes, and masks.

    It leaves out where they came from and where their tokens lie.

    Args:
        columns: of the documents.
        runs: of the mask runs, None for a corpus without masks.
    """
    digest = xxhash.xxh3_128()
    parts = [columns[name] for name in _DIGESTED]
    if runs is not None:
        parts += [columns["num_runs"], runs["start"], runs["stop"]]
    for column in parts:
        for start in range(0, len(column), _HASH_ROWS):
            digest.update(np.ascontiguousarray(column[start : start + _HASH_ROWS]).data)
    return digest.hexdigest()
