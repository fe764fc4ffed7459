"""Arrow IPC: each row is one document.

In:   an IPC file, or an IPC stream (what the ``datasets`` library writes)
Out:  ``TextRows`` or ``TokenRows``, one row a row; a part is a few record batches
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from ringfeed.pipeline.sources.columns import check_column, rows_of_columns
from ringfeed.pipeline.sources.inputs import InputError, InputFile
from ringfeed.pipeline.sources.parts import Part, cut_by_size
from ringfeed.pipeline.sources.rows import ColumnChoice, TextRows, TokenRows

__all__ = ["arrow_column_type", "cut_arrow", "read_arrow"]

_FILE_MAGIC = b"ARROW1"


def arrow_column_type(file: InputFile, column: ColumnChoice) -> pa.DataType:
    """Return the type of the chosen column.

    Raises:
        InputError: if this is no Arrow data, or has no such column.
    """
    with _mapped(file) as source:
        return check_column(_open(source).schema, column, file)


def cut_arrow(file: InputFile, *, part_bytes: int) -> Iterator[Part]:
    """Group record batches; the file is mapped, so only their metadata is read."""
    with _mapped(file) as source:
        batches = [(batch.num_rows, batch.nbytes) for batch in _batches(source, 0, None)]
    yield from cut_by_size(file, [rows for rows, _ in batches], [size for _, size in batches], part_bytes)


def read_arrow(part: Part, column: ColumnChoice) -> TextRows | TokenRows:
    """Read the chosen columns of the part's record batches."""
    file = part.files[0]
    with _mapped(file) as source:
        batches = list(_batches(source, part.start, part.stop))
        columns = [pa.chunked_array([batch.column(name) for batch in batches]) for name in column.names]
        return rows_of_columns(columns, column, part)


@contextmanager
def _mapped(file: InputFile) -> Iterator[pa.MemoryMappedFile]:
    try:
        with pa.memory_map(str(file.path)) as source:
            yield source
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise InputError(f"{file.path} is no Arrow IPC file or stream: {error}") from None


def _batches(source: pa.MemoryMappedFile, start: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    reader = _open(source)
    if isinstance(reader, pa.RecordBatchFileReader):
        for i in range(start, reader.num_record_batches if stop is None else stop):
            yield reader.get_batch(i)
        return
    for i, batch in enumerate(reader):
        if stop is not None and i >= stop:
            return
        if i >= start:
            yield batch


def _open(source: pa.MemoryMappedFile) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    is_file = source.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
