"""Documents as tokens, by random access, without reading more than is asked for.

In:   a folder written by ``ringfeed ingest`` (``pipeline/ingest.py``)
Out:  ``Corpus``: lengths and supervised counts as arrays, tokens of any document

Everything is memory-mapped: the memory of a process does not grow with the corpus.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.documents_table import MASK_COLUMNS, map_documents, row_starts
from ringfeed.pipeline.environment import max_mapped_files
from ringfeed.pipeline.manifest import (
    CorruptDataError,
    FileEntry,
    Manifest,
    check_file,
    check_size,
    check_sizes_at_open,
    read_manifest,
)
from ringfeed.pipeline.mask_runs import RUN_COLUMNS, rows_of_documents
from ringfeed.pipeline.paged_table import CheckedPages, Columns, map_table
from ringfeed.pipeline.token_files import TOKEN_DTYPES, map_tokens, token_file_name

__all__ = [
    "CORPUS_FORMAT",
    "DOCUMENTS_FILE",
    "INPUTS_FILE",
    "PAGES_FILE",
    "RUNS_FILE",
    "RUN_PAGES_FILE",
    "Corpus",
]

CORPUS_FORMAT = "ringfeed-corpus"
DOCUMENTS_FILE = "documents.arrow"
PAGES_FILE = "documents.pages.arrow"
INPUTS_FILE = "inputs.arrow"
RUNS_FILE = "mask_runs.arrow"
RUN_PAGES_FILE = "mask_runs.pages.arrow"


class Corpus:
    """One ingested corpus. Document ids count from 0. Open it with ``Corpus.open``.

    Not for use by several threads at once: each opens its own.
    """

    def __init__(self, path: Path, manifest: Manifest, columns: Columns) -> None:
        self.path = path
        self.manifest = manifest
        self._columns = columns
        self._pages = CheckedPages(columns, table=path / DOCUMENTS_FILE, pages=path / PAGES_FILE)
        self.mask_runs: Columns | None = None
        """start, stop, before: int64 [R] each, read-only, mapped (``mask_runs.py``); None: no masks."""
        if MASK_COLUMNS.keys() <= columns.keys():
            self.mask_runs = map_table(path / RUNS_FILE, RUN_COLUMNS)
            self._run_pages = CheckedPages(
                self.mask_runs, table=path / RUNS_FILE, pages=path / RUN_PAGES_FILE
            )
        self._token_views: OrderedDict[int, NDArray[np.integer]] = OrderedDict()
        self.max_mapped_files = max_mapped_files()
        """Token files that stay mapped; corpora that are used together share what a process may."""
        self._token_entries = {
            entry.path: entry for entry in manifest.files if entry.path.startswith("tokens-")
        }

    @classmethod
    def open(cls, path: Path | str, *, check: Literal["table", "sizes"] = "table") -> Self:
        """Open a finished corpus.

        Args:
            path: its folder.
            check: ``table``: sizes of files and the hash of the documents table, since wrong
                lengths would make a wrong plan. ``sizes``: sizes only, for who reads a few rows and
                checks those (``check_rows``). Token files are checked where they are used: their size
                when mapped, their bytes per document (``check_document``), all by ``ringfeed verify``.

        Raises:
            ValueError: if there is none, it is half-written, or from a newer ringfeed.
            CorruptDataError: if a file is missing, truncated or damaged; names it.
        """
        folder = Path(path)
        manifest = read_manifest(folder, format=CORPUS_FORMAT)
        check_sizes_at_open(folder, manifest)
        if check == "table":
            for entry in manifest.files:
                if entry.path in (DOCUMENTS_FILE, RUNS_FILE):
                    check_file(folder, entry)
        corpus = cls(folder, manifest, map_documents(folder / DOCUMENTS_FILE))
        if corpus.num_documents != manifest.facts["num_documents"]:
            raise CorruptDataError(
                f"{folder / DOCUMENTS_FILE} has {corpus.num_documents} rows, the manifest says "
                f"{manifest.facts['num_documents']}; restore it from a copy or ingest again"
            )
        return corpus

    @property
    def num_documents(self) -> int:
        return len(self._columns["length"])

    @property
    def num_tokens(self) -> int:
        return int(self.facts["num_tokens"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [num_documents], tokens of each document; read-only, mapped."""
        return self._columns["length"].view(np.int64)

    def row_starts(self) -> NDArray[np.int64]:
        """Return the first document of each input row, and ``num_documents``: int64 [R + 1]."""
        return row_starts(self._columns)

    @property
    def supervised(self) -> NDArray[np.int64]:
        """int64 [num_documents], supervised tokens of each whole document; read-only, mapped."""
        return self._columns["supervised"].view(np.int64)

    @property
    def documents(self) -> Columns:
        """All columns of ``documents.arrow`` (``pipeline/documents_table.py``)."""
        return self._columns

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    @property
    def name(self) -> str:
        return str(self.facts["name"])

    @property
    def fingerprint(self) -> str:
        """What shaped the documents, and their content; the same wherever it was made."""
        return self.manifest.fingerprint

    @property
    def pad_id(self) -> int:
        return int(self.facts["pad_id"])

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """uint16 or int32, of every token file."""
        return TOKEN_DTYPES[self.facts["token_dtype"]]

    @property
    def num_token_files(self) -> int:
        return len(self._token_entries)

    def document(self, index: int) -> NDArray[np.integer]:
        """Return the tokens of a document, uint16 | int32 [length], read-only, not copied.

        Raises:
            IndexError: if there is no such document; negative ids do not count from the end.
            CorruptDataError: if its token file is damaged so that it cannot be found.
        """
        row = self._row(index)
        tokens = self.token_view(int(row["token_file"]))
        start, length = int(row["token_start"]), int(row["length"])
        if not 0 <= start <= start + length <= len(tokens):
            raise CorruptDataError(
                f"{self.path / DOCUMENTS_FILE}: document {index} lies at {start} to {start + length} "
                f"of {token_file_name(int(row['token_file']))}, which has {len(tokens)} tokens"
            )
        return tokens[start : start + length]

    def token_view(self, token_file: int) -> NDArray[np.integer]:
        """Return all tokens of a token file, flat, read-only, mapped, 64-byte aligned.

        Raises:
            CorruptDataError: if there is no such file, or it cannot be read.
        """
        view = self._token_views.get(token_file)
        if view is None:
            view = self._map(token_file)
            self._token_views[token_file] = view
            if len(self._token_views) > self.max_mapped_files:
                self._token_views.popitem(last=False)
        else:
            self._token_views.move_to_end(token_file)
        return view

    def locate(
        self, ids: NDArray[np.integer]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Return where documents are: token_file int32 [D], token_start int64 [D], length int64 [D]."""
        columns = self._columns
        return (
            columns["token_file"][ids].view(np.int32),
            columns["token_start"][ids].view(np.int64),
            columns["length"][ids].view(np.int64),
        )

    def check_rows(self, ids: NDArray[np.integer]) -> None:
        """Hash what the tables say of documents (int [D], which exist), each page once, and compare.

        Raises:
            CorruptDataError: if a byte of such a page changed; names the table.
        """
        self._pages.check(ids)
        if self.mask_runs is None:
            return
        first, count = (self._columns[name][ids].view(np.int64) for name in MASK_COLUMNS)
        # The rows are right, so that the runs are there; a document without one has none to check.
        some = count > 0
        self._run_pages.check(rows_of_documents(first[some], count[some]))

    def check_pages(self) -> None:
        """Compare all rows of the tables with the digests of their pages; errors as ``check_rows``."""
        self._pages.check_all()
        if self.mask_runs is not None:
            self._run_pages.check_all()

    def check_document(self, index: int) -> None:
        """Hash the tokens of a document and compare.

        Raises:
            IndexError: if there is no such document.
            CorruptDataError: if a byte of it changed; names the file and the document.
        """
        tokens = self.document(index)
        row = self._row(index)
        if xxhash.xxh3_64_intdigest(tokens.data) != int(row["xxh3_64"]):
            name = token_file_name(int(row["token_file"]))
            raise CorruptDataError(
                f"{self.path / name}: document {index} of corpus {self.name!r} is damaged "
                "(its xxh3_64 differs); restore the file from a copy or ingest again"
            )

    def entry(self, name: str) -> FileEntry:
        """Return the manifest's entry of a file.

        Raises:
            CorruptDataError: if the manifest does not list it.
        """
        for entry in self.manifest.files:
            if entry.path == name:
                return entry
        raise CorruptDataError(f"{self.path}: the manifest lists no {name}")

    def close(self) -> None:
        """Drop the mappings of token files; arrays that were handed out keep theirs."""
        self._token_views.clear()

    def _row(self, index: int) -> dict[str, np.generic]:
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of corpus {self.name!r}, which has {self.num_documents}")
        return {name: column[index] for name, column in self._columns.items()}

    def _map(self, token_file: int) -> NDArray[np.integer]:
        entry = self._token_entries.get(token_file_name(token_file))
        if entry is None:
            raise CorruptDataError(
                f"{self.path / DOCUMENTS_FILE} names token file {token_file} of {self.num_token_files}"
            )
        check_size(self.path, entry)
        path = self.path / entry.path
        view = map_tokens(path)
        if view.dtype != self.token_dtype:
            raise CorruptDataError(f"{path} holds {view.dtype}, the manifest says {self.token_dtype}")
        return view
