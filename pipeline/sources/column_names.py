"""Which columns an input file has, so that the usual ones need not be named.

In:   the first input file (``inputs.py``)
Out:  names, in the file's order
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from ringfeed.pipeline.sources.inputs import InputError, InputFile, SourceKind

__all__ = ["column_names"]


def column_names(file: InputFile) -> list[str]:
    """Return the columns of Parquet and Arrow files, the fields of the first line of JSONL.

    Raises:
        InputError: if it is text, or not what its name says.
    """
    try:
        match file.kind:
            case SourceKind.PARQUET:
                return list(pq.read_schema(file.path).names)
            case SourceKind.ARROW:
                with pa.memory_map(str(file.path)) as source:
                    return _arrow_names(source)
            case SourceKind.JSONL:
                with file.path.open("rb") as lines:
                    first = json.loads(next((line for line in lines if line.strip()), b"{}"))
                return list(first) if isinstance(first, dict) else []
            case SourceKind.TEXT:
                raise InputError(f"{file.path} is text, and no rows of tokens")
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file.path} cannot be read: {error}") from None


def _arrow_names(source: pa.MemoryMappedFile) -> list[str]:
    try:
        return list(pa.ipc.open_file(source).schema.names)
    except pa.ArrowInvalid:
        source.seek(0)
        return list(pa.ipc.open_stream(source).schema.names)
