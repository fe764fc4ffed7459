"""Arrow columns of text or tokens as flat arrays.

In:   one column of Parquet or Arrow data, of any string, binary or integer-list type
Out:  ``TextRows`` or ``TokenRows``; a null is an empty row
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ringfeed.pipeline.sources.inputs import InputError, InputFile
from ringfeed.pipeline.sources.masks import MASK_FLAGS, MaskValues
from ringfeed.pipeline.sources.packed_rows import ListValues, PackedValues
from ringfeed.pipeline.sources.parts import Part
from ringfeed.pipeline.sources.rows import ColumnChoice, TextRows, TokenRows

__all__ = ["check_column", "has_narrow_tokens", "rows_of_columns"]


def check_column(schema: pa.Schema, column: ColumnChoice, file: InputFile) -> pa.DataType:
    """Return the type of the chosen column.

    Raises:
        InputError: if the file has none of that name, or it is of another kind; so for its mask column.
    """
    if column.mask is not None:
        name = column.mask.name
        mask_kind = _find(schema, name, file, way_out=f"name one with {MASK_FLAGS[column.mask.kind]}")
        if not _is_flag_list(mask_kind):
            raise InputError(
                f"{file.path}: column {name!r} is {mask_kind}, not lists of integers or booleans"
            )
    for name in [] if column.packing is None else column.packing.names:
        lengths_kind = _find(schema, name, file, way_out="name one with --lengths-column")
        if not _is_token_list(lengths_kind):
            raise InputError(f"{file.path}: column {name!r} is {lengths_kind}, not lists of integers")
    kind = _find(schema, column.name, file, way_out="name one with --text-column or --tokens-column")
    if column.is_tokens and not _is_token_list(kind):
        raise InputError(f"{file.path}: column {column.name!r} is {kind}, not lists of integers")
    if not column.is_tokens and not _is_text(kind):
        raise InputError(
            f"{file.path}: column {column.name!r} is {kind}, not text; "
            "lists of tokens are read with --tokens-column"
        )
    return kind


def _find(schema: pa.Schema, name: str, file: InputFile, *, way_out: str) -> pa.DataType:
    found = [schema.field(i) for i in range(len(schema)) if schema.field(i).name == name]
    if len(found) != 1:
        raise InputError(
            f"{file.path} has {len(found)} columns {name!r} (it has {', '.join(schema.names)}); {way_out}"
        )
    return found[0].type


def has_narrow_tokens(kind: pa.DataType) -> bool:
    """Return whether all tokens of a list type fit uint16, negative ones left aside."""
    narrow = (pa.uint8(), pa.int8(), pa.uint16(), pa.int16())
    return _is_token_list(kind) and kind.value_type in narrow


def rows_of_columns(
    columns: Sequence[pa.ChunkedArray], choice: ColumnChoice, part: Part
) -> TextRows | TokenRows:
    """Return the rows of ``choice.names``; ``part`` is where they come from, for errors.

    Raises:
        InputError: if a token, or what its mask says, is null.
    """
    column = columns[0]
    rows = np.arange(len(column), dtype=np.int64)
    if choice.is_tokens:
        tokens, lengths = _list_values(column, part, what="token")
        mask = packed = None
        by_name = dict(zip(choice.names, columns, strict=True))
        if choice.packing is not None:
            lists = [_lists(by_name[name], part, name) for name in choice.packing.names]
            packed = PackedValues(lengths=lists[0], slots=lists[1] if lists[1:] else None)
        if choice.mask is not None:
            what = f"value in {choice.mask.name!r}"
            values, of_rows = _list_values(by_name[choice.mask.name], part, what=what)
            values = values.astype(np.uint8) if values.dtype == np.bool_ else values
            mask = MaskValues(values=values, lengths=of_rows, kind=choice.mask.kind)
        return TokenRows(
            tokens=tokens, lengths=lengths, rows=rows, num_rows=len(rows), mask=mask, packed=packed
        )
    texts = [_texts(chunk) for chunk in column.chunks]
    text = np.concatenate([np.empty(0, dtype=np.uint8), *(part[0] for part in texts)])
    lengths = np.concatenate([np.empty(0, dtype=np.int64), *(part[1] for part in texts)])
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return TextRows(text=text, offsets=offsets, rows=rows, num_rows=len(rows))


def _texts(chunk: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if pa.types.is_dictionary(chunk.type):
        chunk = chunk.dictionary_decode()
    # Through binary: a string column may hold bytes that are no UTF-8, and a policy decides on them.
    chunk = chunk.cast(pa.large_binary()).fill_null(b"")
    offsets = np.frombuffer(chunk.buffers()[1], dtype=np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
    data = chunk.buffers()[2]
    text = np.frombuffer(data, dtype=np.uint8) if data else np.empty(0, dtype=np.uint8)
    if len(offsets) == 0:
        return text[:0], np.empty(0, dtype=np.int64)
    return text[offsets[0] : offsets[-1]], np.diff(offsets)


def _lists(column: pa.ChunkedArray, part: Part, name: str) -> ListValues:
    values, counts = _list_values(column, part, what=f"value in {name!r}")
    return ListValues(values=values, counts=counts)


def _list_values(
    column: pa.ChunkedArray, part: Part, *, what: str
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Return the values of all lists end to end, and the length of each list."""
    lists = [_token_lists(chunk) for chunk in column.chunks]
    lengths = np.concatenate([np.empty(0, dtype=np.int64), *(item[1] for item in lists)])
    values = pa.chunked_array([item[0] for item in lists], type=column.type.value_type)
    _refuse_nulls(values, lengths, part, what)
    return values.to_numpy(), lengths


def _token_lists(chunk: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    lengths = pc.list_value_length(chunk).fill_null(0).cast(pa.int64())
    # flatten() honours slices, and leaves out what null lists cover.
    return chunk.flatten(), lengths.to_numpy()


def _refuse_nulls(values: pa.ChunkedArray, lengths: NDArray[np.int64], part: Part, what: str) -> None:
    if not values.null_count:
        return
    first = pc.index(values.is_null(), value=True).as_py()
    row = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
    raise InputError(
        f"{part.files[0].path} row {(part.first_row or 0) + row} (from 0) has a {what} that is null; "
        "each must be an integer"
    )


def _is_text(kind: Any) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    checks = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
    )
    return any(check(kind) for check in checks)


def _is_token_list(kind: Any) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_integer(kind.value_type))


def _is_flag_list(kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return _is_token_list(kind) or bool(is_list and pa.types.is_boolean(kind.value_type))
