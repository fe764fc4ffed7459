"""Parquet: each row is one document.

In:   a Parquet file
Out:  ``TextRows`` or ``TokenRows``, one row a row; a part is a few row groups
"""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from ringfeed.pipeline.sources.columns import check_column, rows_of_columns
from ringfeed.pipeline.sources.inputs import InputError, InputFile
from ringfeed.pipeline.sources.parts import Part, cut_by_size
from ringfeed.pipeline.sources.rows import ColumnChoice, TextRows, TokenRows

__all__ = ["cut_parquet", "parquet_column_type", "read_parquet"]


def parquet_column_type(file: InputFile, column: ColumnChoice) -> pa.DataType:
    """Return the type of the chosen column.

    Raises:
        InputError: if this is no Parquet file, or has no such column.
    """
    with _open(file) as parquet:
        return check_column(parquet.schema_arrow, column, file)


def cut_parquet(file: InputFile, *, part_bytes: int) -> Iterator[Part]:
    """Group row groups; a row group is read at once, so its size bounds memory from below."""
    with _open(file) as parquet:
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
    rows = [group.num_rows for group in groups]
    yield from cut_by_size(file, rows, [group.total_byte_size for group in groups], part_bytes)


def read_parquet(part: Part, column: ColumnChoice) -> TextRows | TokenRows:
    """Read the chosen columns of the part's row groups."""
    file = part.files[0]
    with _open(file) as parquet:
        try:
            table = parquet.read_row_groups(
                list(range(part.start, part.stop)), columns=column.names, use_threads=False
            )
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{file.path} cannot be read: {error}") from None
    return rows_of_columns([table.column(name) for name in column.names], column, part)


def _open(file: InputFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.path)
    except pa.ArrowInvalid as error:
        raise InputError(f"{file.path} is no Parquet file: {error}") from None
