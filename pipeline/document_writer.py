"""Append documents to token files, so that a killed writer goes on where it was.

In:   ``TokenBatch``es in input order (``pipeline/ingest.py``)
Out:  finished token files, and the rows of ``documents.arrow`` (``pipeline/corpus_writer.py``)

Where one token file ends and the next begins depends on the documents alone. Each finished file is
committed to a journal with the point in the input that it reaches; after a kill, what was not
committed is made again, and comes out the same.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.documents_table import COLUMNS, MASK_COLUMNS, map_documents
from ringfeed.pipeline.manifest import CorruptDataError, FileEntry, check_size, file_entry
from ringfeed.pipeline.mask_runs import RUN_COLUMNS, MaskRuns
from ringfeed.pipeline.paged_table import Columns, map_table, merge_columns, read_rows, write_table
from ringfeed.pipeline.sources.token_batch import TokenBatch
from ringfeed.pipeline.staging import StagedFolder, write_atomically
from ringfeed.pipeline.supervision import supervised_tokens
from ringfeed.pipeline.token_files import TOKEN_DTYPES, token_file_name, write_token_file

__all__ = ["TOKEN_FILE_BYTES", "DocumentWriter", "WriterState"]

TOKEN_FILE_BYTES = 64 << 20
_MAX_DOCUMENTS_PER_FILE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterState:
    """The point in the input up to which token files are finished."""

    part: int = 0
    """Parts of the input before this one are in finished files."""
    documents: int = 0
    """So are this many documents of this part."""
    next_row: int = 0
    """First row of ``part``, if it goes on in the file of the part before."""
    skipped_empty: int = 0
    """In the parts before ``part``."""
    skipped_encoding: int = 0
    num_tokens: int = 0
    """In finished files."""
    num_documents: int = 0
    num_runs: int = 0
    """Mask runs of the documents in finished files."""


class DocumentWriter:
    """Appends documents; holds at most one token file in memory."""

    state: WriterState
    """Where to go on: the next batch to ``append`` is that of part ``state.part``."""

    def __init__(
        self, staged: StagedFolder, *, token_dtype: str, token_file_bytes: int = TOKEN_FILE_BYTES
    ) -> None:
        self._folder = staged.path
        self._journal = staged.scratch
        self._dtype = TOKEN_DTYPES[token_dtype]
        self._limit = max(1, token_file_bytes // self._dtype.itemsize)
        self.entries: list[FileEntry] = []
        """Finished token files."""
        self.state = WriterState()
        self._recover()
        self._to_drop = self.state.documents
        # The file being filled.
        self._tokens = np.empty(self._limit, dtype=self._dtype)
        self._num_tokens = 0
        self._rows: list[Columns] = []
        self._num_rows = 0
        self._runs: list[MaskRuns] = []
        """Of the documents in ``_rows``, where the corpus has masks."""

    @property
    def num_documents(self) -> int:
        """All that were appended, in finished files or not."""
        return self.state.num_documents + self._num_rows

    def append(self, batch: TokenBatch) -> None:
        """Add the documents of the next part."""
        columns = _columns_of(batch, first_row=self._first_row(batch))
        ends = np.cumsum(batch.lengths)
        done, self._to_drop = self._to_drop, 0
        while done < len(ends):
            fits = self._count_fitting(ends, done)
            if fits == 0:
                self._close_file(documents=done)
                continue
            begin = int(ends[done - 1]) if done else 0
            self._take(batch.tokens[begin : int(ends[done + fits - 1])], columns, slice(done, done + fits))
            if batch.masks is not None:
                self._runs.append(batch.masks.slice(done, done + fits))
            done += fits
        self._finish_part(batch)

    def finish(self) -> tuple[Columns, Columns | None]:
        """Write what is left; return the tables of all documents and of all mask runs, mapped.

        The second one is None for a corpus without masks.
        """
        if self._num_rows:
            self._close_file(documents=0)
        numbers = range(len(self.entries))
        is_masked = bool(numbers) and self._runs_path(0).exists()
        types = {**COLUMNS, **MASK_COLUMNS} if is_masked else COLUMNS
        rows = (map_documents(self._rows_path(i)) for i in numbers)
        columns = merge_columns(rows, self._journal / "columns", types)
        if not is_masked:
            return columns, None
        runs = (map_table(self._runs_path(i), RUN_COLUMNS) for i in numbers)
        return columns, merge_columns(runs, self._journal / "runs", RUN_COLUMNS)

    def _count_fitting(self, ends: NDArray[np.int64], done: int) -> int:
        """Return how many documents from ``done`` on go into the current file."""
        begin = int(ends[done - 1]) if done else 0
        room = self._limit - self._num_tokens
        fits = int(np.searchsorted(ends, begin + room, side="right")) - done
        fits = min(fits, _MAX_DOCUMENTS_PER_FILE - self._num_rows)
        # A document longer than a file has one to itself.
        return max(fits, 1) if self._num_rows == 0 else max(fits, 0)

    def _take(self, tokens: NDArray[np.integer], columns: Columns, rows: slice) -> None:
        end = self._num_tokens + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.empty(end, dtype=self._dtype)
        self._tokens[self._num_tokens : end] = tokens
        part = read_rows(columns, rows)
        lengths = part["length"].astype(np.int64)
        part["token_file"] = np.full(len(lengths), len(self.entries), dtype=np.int32)
        part["token_start"] = self._num_tokens + np.cumsum(lengths) - lengths
        self._rows.append(part)
        self._num_rows += len(lengths)
        self._num_tokens = end

    def _close_file(self, *, documents: int) -> None:
        """Finish the current token file; ``documents`` of the current part are in finished files then."""
        index = len(self.entries)
        columns = {name: np.concatenate([rows[name] for rows in self._rows]) for name in self._rows[0]}
        name = token_file_name(index)
        with write_atomically(self._folder / name) as temporary:
            write_token_file(temporary, self._tokens[: self._num_tokens], columns["length"].astype(np.int64))
        num_runs = self._write_runs(index, columns)
        with write_atomically(self._rows_path(index)) as temporary:
            write_table(temporary, columns, {**COLUMNS, **MASK_COLUMNS} if self._runs else COLUMNS)
        self.state = _advance(
            self.state,
            documents=documents,
            num_runs=self.state.num_runs + num_runs,
            num_tokens=self.state.num_tokens + self._num_tokens,
            num_documents=self.state.num_documents + self._num_rows,
        )
        entry = file_entry(self._folder, name, self._num_rows)
        # The commit: before it the file does not count, after it the file is never made again.
        with write_atomically(self._commit_path(index)) as temporary:
            temporary.write_text(json.dumps({"state": asdict(self.state), "entry": asdict(entry)}))
        self.entries.append(entry)
        self._rows, self._runs, self._num_rows, self._num_tokens = [], [], 0, 0
        if len(self._tokens) > self._limit:
            self._tokens = np.empty(self._limit, dtype=self._dtype)

    def _write_runs(self, index: int, columns: Columns) -> int:
        """Write the mask runs of the current file's documents, and note in ``columns`` which are whose."""
        if not self._runs:
            return 0
        runs = MaskRuns.concat(self._runs)
        columns["num_runs"] = runs.counts
        columns["first_run"] = self.state.num_runs + np.cumsum(runs.counts) - runs.counts
        with write_atomically(self._runs_path(index)) as temporary:
            write_table(temporary, runs.columns(), RUN_COLUMNS)
        return len(runs.starts)

    def _finish_part(self, batch: TokenBatch) -> None:
        self.state = _advance(
            self.state,
            part=self.state.part + 1,
            documents=0,
            next_row=self._first_row(batch) + batch.num_rows,
            skipped_empty=self.state.skipped_empty + batch.skipped_empty,
            skipped_encoding=self.state.skipped_encoding + batch.skipped_encoding,
        )

    def _first_row(self, batch: TokenBatch) -> int:
        return self.state.next_row if batch.first_row is None else batch.first_row

    def _recover(self) -> None:
        while (path := self._commit_path(len(self.entries))).exists():
            commit = json.loads(path.read_bytes())
            entry = FileEntry(**commit["entry"])
            try:
                check_size(self._folder, entry)
            except CorruptDataError:
                # Somebody has been at it: this file and those after it are made again.
                return
            self.state = WriterState(**commit["state"])
            self.entries.append(entry)

    def _rows_path(self, index: int) -> Path:
        return self._journal / f"rows-{index:05d}.arrow"

    def _runs_path(self, index: int) -> Path:
        return self._journal / f"runs-{index:05d}.arrow"

    def _commit_path(self, index: int) -> Path:
        return self._journal / f"commit-{index:05d}.json"


def _columns_of(batch: TokenBatch, *, first_row: int) -> Columns:
    starts = np.zeros_like(batch.lengths)
    supervised = supervised_tokens(batch.lengths, starts, batch.lengths, boundary="next")
    return {
        "length": batch.lengths,
        "supervised": supervised if batch.masks is None else batch.masks.targets,
        "source": batch.sources,
        "file": batch.files,
        "row": batch.rows + first_row,
        "xxh3_64": batch.hashes,
    }


def _advance(state: WriterState, **changes: int) -> WriterState:
    return WriterState(**{**asdict(state), **changes})
