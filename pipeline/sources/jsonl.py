"""JSON lines: each line is an object, one of its fields is the document.

In:   a JSONL file
Out:  ``TextRows`` or ``TokenRows``, one row a line; blank lines are no rows

A part begins with the first line that starts in its bytes. Which line of the file that is, only
those who read the parts before it know; the reader counts them where an error must name the line.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.sources.inputs import InputError, InputFile
from ringfeed.pipeline.sources.masks import MASK_FLAGS, MaskValues
from ringfeed.pipeline.sources.packed_rows import ListValues, PackedValues
from ringfeed.pipeline.sources.parts import Part
from ringfeed.pipeline.sources.rows import ColumnChoice, TextRows, TokenRows, join_texts

__all__ = ["cut_jsonl", "line_number", "read_jsonl"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COUNT_BLOCK = 1 << 20
_MAX_SHOWN = 60


def cut_jsonl(file: InputFile, *, part_bytes: int) -> Iterator[Part]:
    """Cut the file into ranges of ``part_bytes`` bytes; lines go to the range they begin in."""
    for start in range(0, max(file.bytes, 1), part_bytes):
        stop = min(start + part_bytes, file.bytes)
        yield Part(
            files=(file,),
            start=start,
            stop=stop,
            first_row=0 if start == 0 else None,
            bytes=stop - start,
        )


def read_jsonl(part: Part, column: ColumnChoice) -> TextRows | TokenRows:
    """Read the lines that begin in the part's range.

    Raises:
        InputError: if a line is no JSON object with the wanted field; names file and line.
    """
    lines = _read_lines(part)
    if not part.files[0].bytes:
        # One empty input, as an empty text file is.
        lines = [json.dumps(dict.fromkeys(column.names)).encode()]
    rows = [row for row, line in enumerate(lines) if line and not line.isspace()]
    values, masks = [], []
    tables: dict[str, list[list[int]]] = {}
    packing = [] if column.packing is None else column.packing.names
    for row in rows:
        try:
            fields = _object(lines[row], column)
            values.append(_value(fields, column))
            if column.mask is not None:
                masks.append(_mask_list(fields[column.mask.name], column.mask.name))
            for name in packing:
                tables.setdefault(name, []).append(_token_list(fields[name], name))
        except InputError as error:
            raise InputError(f"{part.files[0].path} line {line_number(part, row)}: {error}") from None
    row_numbers = np.array(rows, dtype=np.int64)
    if not column.is_tokens:
        text, offsets = join_texts([_encode(value) for value in values])
        return TextRows(text=text, offsets=offsets, rows=row_numbers, num_rows=len(lines))
    tokens, lengths = _join_lists(values)
    mask = None
    if column.mask is not None:
        flags, flag_lengths = _join_lists(masks)
        mask = MaskValues(values=flags, lengths=flag_lengths, kind=column.mask.kind)
    packed = None
    if packing:
        lists = [_joined(tables.get(name, [])) for name in packing]
        packed = PackedValues(lengths=lists[0], slots=lists[1] if lists[1:] else None)
    return TokenRows(
        tokens=tokens, lengths=lengths, rows=row_numbers, num_rows=len(lines), mask=mask, packed=packed
    )


def line_number(part: Part, row: int) -> int:
    """Return the line of the file, counted from 1, of a row of the part."""
    before, left = 0, 0
    with part.files[0].path.open("rb") as stream:
        _seek_first_line(stream, part.start)
        left = stream.tell()
        stream.seek(0)
        while left > 0 and (block := stream.read(min(left, _COUNT_BLOCK))):
            before += block.count(b"\n")
            left -= len(block)
    return before + row + 1


def _read_lines(part: Part) -> list[bytes]:
    with part.files[0].path.open("rb") as stream:
        _seek_first_line(stream, part.start)
        # The last line may end, and even begin, beyond the range.
        size = part.stop - stream.tell()
        data = stream.read(size) if size > 0 else b""
        if data and not data.endswith(b"\n"):
            data += stream.readline()
    if part.start == 0:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    lines = data.split(b"\n")
    return lines[:-1] if not lines[-1] else lines


def _seek_first_line(stream: Any, start: int) -> None:
    if start > 0:
        # One byte back: a line that begins exactly at ``start`` belongs to this range.
        stream.seek(start - 1)
        stream.readline()


def _object(line: bytes, column: ColumnChoice) -> dict[str, Any]:
    """Return the fields of a line that is an object with the wanted ones."""
    # Bytes that are no UTF-8 survive as surrogates; the policy for them comes later.
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        raise InputError(f"no JSON ({error.msg} at column {error.colno}): {_shown(line)}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"no JSON ({error}): {_shown(line)}") from None
    if not isinstance(row, dict):
        raise InputError(f"a JSON {type(row).__name__}, not an object with a field {column.name!r}")
    for name in column.names:
        if name not in row:
            way_out = "--text-column or --tokens-column"
            if column.mask is not None and name == column.mask.name:
                way_out = MASK_FLAGS[column.mask.kind]
            if column.packing is not None and name in column.packing.names:
                way_out = "--lengths-column"
            raise InputError(
                f"no field {name!r} (it has {', '.join(map(repr, row)) or 'none'}); name another one with "
                f"{way_out}"
            )
    return row


def _value(row: dict[str, Any], column: ColumnChoice) -> Any:
    value = row[column.name]
    if column.is_tokens:
        return _token_list(value, column.name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"field {column.name!r} is a {type(value).__name__}, not text")
    return value


def _token_list(value: object, name: str) -> list[int]:
    if value is None:
        return []
    # type, not isinstance: true and false are no tokens.
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise InputError(f"field {name!r} is no list of integers")
    if value and not (min(value) >= -(2**63) and max(value) < 2**63):
        raise InputError(f"field {name!r} has a token beyond 64 bits")
    return value


def _mask_list(value: object, name: str) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or any(type(flag) not in (int, bool) for flag in value):
        raise InputError(f"field {name!r} is no list of integers or of true and false")
    if value and not (min(value) >= -(2**63) and max(value) < 2**63):
        raise InputError(f"field {name!r} has a number beyond 64 bits")
    return value


def _join_lists(values: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all lists end to end, and the length of each."""
    lengths = np.array([len(value) for value in values], dtype=np.int64)
    joined = np.concatenate([np.empty(0, dtype=np.int64), *(np.array(v, dtype=np.int64) for v in values)])
    return joined, lengths


def _joined(values: list[list[int]]) -> ListValues:
    joined, counts = _join_lists(values)
    return ListValues(values=joined, counts=counts)


def _encode(value: str) -> bytes:
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # Half a surrogate pair, written as an escape: no UTF-8 either, and the policy decides.
        return value.encode("utf-8", "surrogatepass")


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
