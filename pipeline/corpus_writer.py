"""Make a corpus folder: its tables, its manifest, its name.

In:   appended documents (``pipeline/document_writer.py``), or arrays in memory (``write_corpus``)
Out:  a published corpus folder (``pipeline/corpus.py`` opens it)
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.corpus import (
    CORPUS_FORMAT,
    DOCUMENTS_FILE,
    INPUTS_FILE,
    PAGES_FILE,
    RUN_PAGES_FILE,
    RUNS_FILE,
    Corpus,
)
from ringfeed.pipeline.document_writer import TOKEN_FILE_BYTES, DocumentWriter
from ringfeed.pipeline.documents_table import COLUMNS, MASK_COLUMNS, content_digest, row_starts
from ringfeed.pipeline.manifest import FORMAT_VERSION, FileEntry, Manifest, file_entry, fingerprint
from ringfeed.pipeline.mask_runs import RUN_COLUMNS, MaskRuns, runs_from_flags
from ringfeed.pipeline.paged_table import Columns, ColumnTypes, write_pages, write_table
from ringfeed.pipeline.sources.token_batch import TokenBatch, hash_documents
from ringfeed.pipeline.staging import StagedFolder, write_atomically
from ringfeed.pipeline.token_files import TOKEN_DTYPES

__all__ = ["ALL_TARGETS", "STORED_TARGETS", "publish_corpus", "write_corpus", "write_inputs"]

ALL_TARGETS = "all"
"""Every token but a document's first is a label."""
STORED_TARGETS = "stored"
"""Of those, the ones that the corpus's mask runs name."""


def write_inputs(path: Path, *, sources: list[int], names: list[str], sizes: list[int]) -> None:
    """Write ``inputs.arrow``: one row per input file, in reading order."""
    table = pa.table(
        {
            "source": pa.array(sources, pa.int32()),
            # Names that are not UTF-8 are legal on disk, and not in Arrow.
            "path": pa.array([name.encode("utf-8", "backslashreplace").decode() for name in names]),
            "bytes": pa.array(sizes, pa.int64()),
        }
    )
    with (
        write_atomically(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def publish_corpus(
    staged: StagedFolder, writer: DocumentWriter, *, shaped_by: Mapping[str, Any], facts: Mapping[str, Any]
) -> Manifest:
    """Finish the tables, write the manifest and give the corpus its name.

    Args:
        staged: the folder; ``inputs.arrow`` is in it.
        writer: has all documents.
        shaped_by: what decided the tokens (tokenizer, policies): goes into the fingerprint.
        facts: ``name``, ``pad_id``, ``tokenizer``, ``token_dtype``.
    """
    columns, runs = writer.finish()
    types = COLUMNS if runs is None else {**COLUMNS, **MASK_COLUMNS}
    tables = _write_paged(staged.path, (DOCUMENTS_FILE, PAGES_FILE), columns, types)
    if runs is not None:
        tables += _write_paged(staged.path, (RUNS_FILE, RUN_PAGES_FILE), runs, RUN_COLUMNS)
    mask_rule = ALL_TARGETS if runs is None else STORED_TARGETS
    counts = {"num_documents": writer.state.num_documents, "num_tokens": writer.state.num_tokens}
    made_from = {
        "format_version": FORMAT_VERSION,
        "mask_rule": mask_rule,
        "content": content_digest(columns, runs=runs),
        **counts,
        **shaped_by,
    }
    starts = row_starts(columns)
    if len(starts) <= writer.state.num_documents:
        # Which documents were packed together; plans may keep them so.
        made_from["rows"] = xxhash.xxh3_128_hexdigest(starts.data)
    num_inputs = _count_rows(staged.path / INPUTS_FILE)
    files = (
        *tables,
        file_entry(staged.path, INPUTS_FILE, num_inputs),
        *writer.entries,
    )
    manifest = Manifest(
        format=CORPUS_FORMAT,
        fingerprint=fingerprint(made_from),
        made_from=made_from,
        files=files,
        facts={
            **facts,
            **counts,
            "mask_rule": mask_rule,
            "num_supervised": int(columns["supervised"].view(np.int64).sum()),
            "num_inputs": num_inputs,
            "skipped_empty": writer.state.skipped_empty,
            "skipped_encoding": writer.state.skipped_encoding,
        },
    )
    staged.publish(manifest)
    return manifest


def _write_paged(
    folder: Path, names: tuple[str, str], columns: Columns, types: ColumnTypes
) -> list[FileEntry]:
    """Write a table and the digests of its pages; return the manifest's entries of both files."""
    table, pages = names
    with write_atomically(folder / table) as temporary:
        write_table(temporary, columns, types)
    with write_atomically(folder / pages) as temporary:
        num_pages = write_pages(temporary, columns)
    num_rows = len(columns[next(iter(types))])
    return [file_entry(folder, table, num_rows), file_entry(folder, pages, num_pages)]


def write_corpus(  # noqa: PLR0913  (each one is a fact about the corpus)
    path: Path,
    documents: Iterable[NDArray[np.integer]],
    *,
    name: str,
    masks: Iterable[NDArray[np.bool_]] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    pad_id: int = 0,
    token_dtype: str = "int32",  # noqa: S107  (no password)
    token_file_bytes: int = TOKEN_FILE_BYTES,
) -> Corpus:
    """Write documents that are in memory as a corpus, through the writer that ingest uses.

    Args:
        path: folder to make; must not exist.
        documents: 1-D integer arrays that fit ``token_dtype``; empty ones are skipped and counted.
        name: name of the corpus in counts per source.
        masks: per document a bool array of its length, True where the token is trained on; a document's first
            token never is. None: all others are.
        tokenizer: facts about the tokenizer, JSON-able; corpora with different ones do not mix.
        pad_id: token of padding.
        token_dtype: ``uint16`` or ``int32``.
        token_file_bytes: size at which a token file ends.

    Raises:
        ValueError: if ``path`` exists, a document does not fit ``token_dtype``, all are empty, or a mask is
            not as long as its document.
    """
    tokenizer = {"kind": "tokens"} if tokenizer is None else dict(tokenizer)
    shaped_by = {"tokenizer": tokenizer, "pad_id": pad_id, "token_dtype": token_dtype}
    with StagedFolder.open(path, format=CORPUS_FORMAT, made_from={**shaped_by, "name": name}) as staged:
        if staged.finished or staged.resumed:
            raise ValueError(f"{path} exists, finished or not; delete it or choose another folder")
        write_inputs(staged.path / INPUTS_FILE, sources=[0], names=["memory"], sizes=[0])
        writer = DocumentWriter(staged, token_dtype=token_dtype, token_file_bytes=token_file_bytes)
        try:
            _append_all(writer, _batches_of(documents, masks, TOKEN_DTYPES[token_dtype]))
        except ValueError:
            staged.discard()
            raise
        publish_corpus(staged, writer, shaped_by=shaped_by, facts={"name": name, **shaped_by})
    return Corpus.open(path)


def _append_all(writer: DocumentWriter, batches: Iterable[TokenBatch]) -> None:
    for batch in batches:
        writer.append(batch)
    if writer.num_documents == 0:
        raise ValueError("a corpus needs a document with a token, none was given")


def _batches_of(
    documents: Iterable[NDArray[np.integer]],
    masks: Iterable[NDArray[np.bool_]] | None,
    dtype: np.dtype[Any],
) -> Iterator[TokenBatch]:
    pairs = zip(documents, repeat(None)) if masks is None else zip(documents, masks, strict=True)
    for row, (document, mask) in enumerate(pairs):
        values = np.asarray(document)
        limits = np.iinfo(dtype)
        if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
            raise ValueError(f"document {row} is {values.dtype} {list(values.shape)}, need integers [length]")
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) <= limits.max):
            raise ValueError(
                f"document {row} has tokens {values.min()} to {values.max()}, "
                f"need 0 to {limits.max} ({dtype})"
            )
        num = min(len(values), 1)
        tokens = values.astype(dtype)
        lengths = np.array([len(values)] * num, dtype=np.int64)
        yield TokenBatch(
            tokens=tokens,
            lengths=lengths,
            hashes=hash_documents(tokens, lengths),
            sources=np.zeros(num, dtype=np.int32),
            files=np.zeros(num, dtype=np.int32),
            rows=np.zeros(num, dtype=np.int64),
            first_row=row,
            num_rows=1,
            skipped_empty=1 - num,
            skipped_encoding=0,
            masks=None if mask is None else _runs_of(mask, lengths, row),
        )


def _runs_of(mask: NDArray[np.bool_], lengths: NDArray[np.int64], row: int) -> MaskRuns:
    flags = np.asarray(mask)
    if flags.dtype != np.bool_ or flags.shape != (int(lengths.sum()),):
        raise ValueError(
            f"the mask of document {row} is {flags.dtype} {list(flags.shape)}, need bool [{lengths.sum()}]"
        )
    return runs_from_flags(flags, lengths)


def _count_rows(path: Path) -> int:
    with pa.memory_map(str(path)) as source:
        return int(pa.ipc.open_file(source).read_all().num_rows)
