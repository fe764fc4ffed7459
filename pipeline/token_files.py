"""One ``tokens-NNNNN.arrow``: the tokens of many documents, end to end.

In:   flat tokens and the documents' lengths (``pipeline/corpus_writer.py``)
Out:  an Arrow IPC file that any reader opens, and a flat memory-mapped view of it

Column ``tokens``, large_list<uint16 | int32>, one record batch, one row per document. The values
begin at a multiple of 64 bytes in the file, so that a memory-mapped view is aligned.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ringfeed.pipeline.manifest import CorruptDataError

__all__ = ["DAMAGE", "TOKEN_DTYPES", "map_tokens", "token_file_name", "write_token_file"]

TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype(np.uint16), "int32": np.dtype(np.int32)}

DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, AttributeError, TypeError)
"""What reading an Arrow file may raise when bytes of its metadata changed."""

_ALIGNMENT = 64
# The IPC writer aligns to 8 only. This text in the schema's metadata moves what follows.
_PADDING_KEY = b"ringfeed.padding"


def token_file_name(index: int) -> str:
    """Return the name of token file ``index`` of a corpus."""
    return f"tokens-{index:05d}.arrow"


def write_token_file(path: Path, tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> None:
    """Write documents of ``lengths`` (int64 [N]) whose tokens are ``tokens`` (uint16 | int32 [sum])."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Without the values first, to see where they would begin; eight more bytes move them by eight.
    _write(path, tokens[:0], np.zeros_like(offsets), padding=0)
    _write(path, tokens, offsets, padding=-_misalignment(path) % _ALIGNMENT)
    if _misalignment(path):
        raise RuntimeError(f"{path}: this pyarrow does not lay out IPC files in steps of 8 bytes")


def map_tokens(path: Path) -> NDArray[np.integer]:
    """Return all tokens of a token file, uint16 | int32 [sum], read-only, memory-mapped.

    Raises:
        CorruptDataError: if the file is not there, or no token file any more.
    """
    try:
        values = _values(path)
        return np.asarray(values.to_numpy(zero_copy_only=True))
    except DAMAGE as error:
        raise CorruptDataError(f"{path} cannot be read: {error}") from None


def _write(path: Path, tokens: NDArray[np.integer], offsets: NDArray[np.int64], padding: int) -> None:
    values = pa.array(tokens)
    column = pa.LargeListArray.from_arrays(pa.array(offsets), values)
    schema = pa.schema(
        [pa.field("tokens", pa.large_list(values.type))], metadata={_PADDING_KEY: b" " * padding}
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))


def _values(path: Path) -> pa.Array:
    # The arrays keep the mapping alive; the descriptor goes with it.
    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    # Checks buffer sizes, so that damaged metadata cannot point past the mapping.
    batch.validate()
    return batch.column("tokens").values


def _misalignment(path: Path) -> int:
    """Return by how many bytes the values miss a multiple of 64; the mapping begins at a page."""
    with pa.memory_map(str(path)) as source:
        offsets = pa.ipc.open_file(source).get_batch(0).column(0).buffers()[1]
        return int(offsets.address + offsets.size) % _ALIGNMENT
