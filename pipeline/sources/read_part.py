"""Read one part of the input and make documents of it: a pure, picklable function.

In:   a ``Part`` (``pipeline/sources/parts.py``), and how to read it
Out:  a ``TokenBatch`` (``pipeline/sources/token_batch.py``)

Runs in the ingesting process or in any worker; the result is the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ringfeed.pipeline.mask_runs import MaskRuns, runs_from_flags
from ringfeed.pipeline.sources.arrow import arrow_column_type, cut_arrow, read_arrow
from ringfeed.pipeline.sources.encoding import EncodingErrors, find_broken
from ringfeed.pipeline.sources.inputs import InputError, InputFile, SourceKind, check_unchanged
from ringfeed.pipeline.sources.jsonl import cut_jsonl, line_number, read_jsonl
from ringfeed.pipeline.sources.masks import MaskKind, find_fault, flags_of
from ringfeed.pipeline.sources.packed_rows import find_sequences, shifted_fault
from ringfeed.pipeline.sources.parquet import cut_parquet, parquet_column_type, read_parquet
from ringfeed.pipeline.sources.parts import Part
from ringfeed.pipeline.sources.rows import ColumnChoice, TextRows, TokenRows
from ringfeed.pipeline.sources.text_folder import cut_text_files, read_text_files
from ringfeed.pipeline.sources.token_batch import TokenBatch, hash_documents
from ringfeed.pipeline.token_files import TOKEN_DTYPES
from ringfeed.pipeline.tokenizer import Tokenizer

__all__ = ["PartReader", "column_type", "cut_parts"]


def cut_parts(files: Sequence[InputFile], *, part_bytes: int) -> Iterator[Part]:
    """Cut all input files into parts, in reading order."""
    for kind, run in groupby(files, key=lambda file: file.kind):
        if kind is SourceKind.TEXT:
            yield from cut_text_files(list(run), part_bytes=part_bytes)
            continue
        cut = {SourceKind.JSONL: cut_jsonl, SourceKind.PARQUET: cut_parquet, SourceKind.ARROW: cut_arrow}[
            kind
        ]
        for file in run:
            yield from cut(file, part_bytes=part_bytes)


def column_type(file: InputFile, column: ColumnChoice) -> pa.DataType | None:
    """Return the type of the chosen column; None where the file does not say (text, JSONL).

    Raises:
        InputError: if there is no such column, or it is of the wrong kind.
    """
    if file.kind is SourceKind.PARQUET:
        return parquet_column_type(file, column)
    if file.kind is SourceKind.ARROW:
        return arrow_column_type(file, column)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartReader:
    """Reads any part; all that decides its documents is in these fields."""

    column: ColumnChoice
    tokenizer: Tokenizer | None
    """None: the column holds tokens."""
    token_dtype: str
    encoding_errors: EncodingErrors

    def __call__(self, part: Part) -> TokenBatch:
        """Return the documents of ``part``.

        Raises:
            InputError: if something in it cannot be read; names file and row.
        """
        for file in part.files:
            check_unchanged(file)
        rows = self._read(part)
        if isinstance(rows, TextRows):
            return self._tokenize(part, rows)
        rows = self._unpack(part, rows)
        self._check_range(part, rows)
        batch = self._batch(part, rows, rows.tokens, rows.lengths, skipped_encoding=0)
        return replace(batch, masks=self._mask_runs(part, rows, batch.lengths))

    def _unpack(self, part: Part, rows: TokenRows) -> TokenRows:
        """Return rows that were packed before as one row a sequence."""
        if rows.packed is None:
            return rows
        found = find_sequences(rows.packed, rows.lengths)
        if isinstance(found, tuple):
            row, what = found
            raise InputError(f"{_place(part, rows, row)} {what}")
        mask = rows.mask
        if mask is not None:
            if mask.kind is MaskKind.SHIFTED:
                fault = shifted_fault(found, mask, rows.tokens, rows.lengths)
            else:
                fault = find_fault(mask, rows.tokens, rows.lengths)
            if fault is not None:
                raise InputError(f"{_place(part, rows, fault[0])} {fault[1]}")
            mask = found.take_mask(mask)
        return TokenRows(
            tokens=rows.tokens[found.tokens],
            lengths=found.lengths,
            rows=rows.rows[found.rows],
            num_rows=rows.num_rows,
            mask=mask,
        )

    def _mask_runs(self, part: Part, rows: TokenRows, lengths: NDArray[np.int64]) -> MaskRuns | None:
        """Return the targets of the documents, whose ``lengths`` are those of the rows that are not empty."""
        if rows.mask is None:
            return None
        fault = find_fault(rows.mask, rows.tokens, rows.lengths)
        if fault is not None:
            row, what = fault
            raise InputError(f"{_place(part, rows, row)} {what}")
        return runs_from_flags(flags_of(rows.mask), lengths)

    def _read(self, part: Part) -> TextRows | TokenRows:
        match part.files[0].kind:
            case SourceKind.TEXT:
                return read_text_files(part)
            case SourceKind.JSONL:
                return read_jsonl(part, self.column)
            case SourceKind.PARQUET:
                return read_parquet(part, self.column)
            case SourceKind.ARROW:
                return read_arrow(part, self.column)

    def _tokenize(self, part: Part, rows: TextRows) -> TokenBatch:
        if self.tokenizer is None:
            raise InputError(f"{part.files[0].path} is text, but tokens are asked for (--tokens-column)")
        text, lengths = rows.text, np.diff(rows.offsets)
        broken = np.zeros(len(lengths), dtype=np.bool_)
        if self.encoding_errors is not EncodingErrors.BYTES:
            broken = find_broken(text, rows.offsets)
        if self.encoding_errors is EncodingErrors.FAIL and broken.any():
            raise self._encoding_error(part, rows, int(np.flatnonzero(broken)[0]))
        wanted = (lengths > 0) & ~broken
        if not wanted.all():
            text = text[np.repeat(wanted, lengths)]
        offsets = np.concatenate([[0], np.cumsum(lengths[wanted])])
        tokens, token_lengths = self.tokenizer.encode(text, offsets)
        all_lengths = np.zeros(len(lengths), dtype=np.int64)
        all_lengths[wanted] = token_lengths
        return self._batch(part, rows, tokens, all_lengths, skipped_encoding=int(broken.sum()))

    def _batch(
        self,
        part: Part,
        rows: TextRows | TokenRows,
        tokens: NDArray[np.integer],
        lengths: NDArray[np.int64],
        *,
        skipped_encoding: int,
    ) -> TokenBatch:
        kept = lengths > 0
        stored = np.ascontiguousarray(tokens, dtype=TOKEN_DTYPES[self.token_dtype])
        in_part = np.zeros(len(lengths), dtype=np.int32)
        if isinstance(rows, TextRows) and rows.files is not None:
            in_part = rows.files
        files = np.array([file.index for file in part.files], dtype=np.int32)[in_part]
        sources = np.array([file.source for file in part.files], dtype=np.int32)[in_part]
        return TokenBatch(
            tokens=stored,
            lengths=lengths[kept],
            hashes=hash_documents(stored, lengths[kept]),
            sources=sources[kept],
            files=files[kept],
            rows=rows.rows[kept],
            first_row=part.first_row,
            num_rows=rows.num_rows,
            skipped_empty=int((~kept).sum()) - skipped_encoding,
            skipped_encoding=skipped_encoding,
        )

    def _check_range(self, part: Part, rows: TokenRows) -> None:
        limit = np.iinfo(TOKEN_DTYPES[self.token_dtype]).max
        tokens = rows.tokens
        if len(tokens) == 0 or (int(tokens.min()) >= 0 and int(tokens.max()) <= limit):
            return
        wrong = int(np.flatnonzero((tokens < 0) | (tokens > limit))[0])
        row = int(np.searchsorted(np.cumsum(rows.lengths), wrong, side="right"))
        raise InputError(f"{_place(part, rows, row)} has token {tokens[wrong]}; tokens must be 0 to {limit}")

    def _encoding_error(self, part: Part, rows: TextRows, row: int) -> InputError:
        data = rows.text[rows.offsets[row] : rows.offsets[row + 1]].tobytes()
        try:
            data.decode()
        except UnicodeDecodeError as error:
            what = f"is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start})"
        return InputError(
            f"{_place(part, rows, row)} {what}; leave such text out with --encoding-errors skip, "
            "or keep its bytes with --encoding-errors bytes"
        )


def _place(part: Part, rows: Any, row: int) -> str:
    """Return file and line or row, as a user finds it."""
    number = int(rows.rows[row])
    match part.files[0].kind:
        case SourceKind.TEXT:
            return str(part.files[int(rows.files[row])].path)
        case SourceKind.JSONL:
            return f"{part.files[0].path} line {line_number(part, number)}"
        case _:
            return f"{part.files[0].path} row {(part.first_row or 0) + number} (from 0)"
