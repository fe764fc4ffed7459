"""What reading one part of the input gives: documents as tokens, and what was left out.

In:   a part of the input (``pipeline/sources/parts.py``), a tokenizer
Out:  one ``TokenBatch``, appended to the corpus in order (``pipeline/corpus_writer.py``)
"""

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.mask_runs import MaskRuns

__all__ = ["TokenBatch", "hash_documents"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """Documents in input order, n >= 0 of them, none without a token."""

    tokens: NDArray[np.integer]
    """uint16 | int32 [sum of lengths], in the corpus's dtype."""
    lengths: NDArray[np.int64]
    """int64 [n], each at least 1."""
    hashes: NDArray[np.uint64]
    """uint64 [n], xxh3_64 of each document's bytes in ``tokens``."""
    sources: NDArray[np.int32]
    """int32 [n], which SRC of the command."""
    files: NDArray[np.int32]
    """int32 [n], which input file, counted over all SRC."""
    rows: NDArray[np.int64]
    """int64 [n], row of the input file, counted from ``first_row``."""
    first_row: int | None
    """Row of its file that this part begins with; None: goes on where the part before ended."""
    num_rows: int
    """Rows of the input that the part covers, documents or not."""
    skipped_empty: int
    """Rows without a token."""
    skipped_encoding: int
    """Rows left out because they are not UTF-8."""
    masks: MaskRuns | None = None
    """Which tokens are trained on, of the n documents; None: all but the first of each."""


def hash_documents(tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return xxh3_64 of each document's bytes: flat tokens, int64 [n] -> uint64 [n]."""
    data = np.ascontiguousarray(tokens).data.cast("B")
    ends = (np.cumsum(lengths) * tokens.itemsize).tolist()
    digest, start = xxhash.xxh3_64_intdigest, 0
    out = np.empty(len(ends), dtype=np.uint64)
    for i, end in enumerate(ends):
        out[i] = digest(data[start:end])
        start = end
    return out
