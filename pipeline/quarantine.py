"""Name the documents whose tokens are damaged, so that a run goes on without them.

In:   a corpus, or a plan and its corpora
Out:  a skip list (``skip.py``) of global document ids

A flipped byte damages one document, not the file that it lies in. Loader, ``shard`` and ``serve`` leave the
listed documents out and never read them; all others keep their places.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.corpus import CORPUS_FORMAT
from ringfeed.pipeline.corpus_set import CorpusSet
from ringfeed.pipeline.findings import check_all_files, folder_format
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.plan import PLAN_FORMAT, Plan
from ringfeed.pipeline.staging import write_atomically
from ringfeed.pipeline.token_files import token_file_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from ringfeed.pipeline.corpus import Corpus
    from ringfeed.pipeline.executor import Executor
    from ringfeed.pipeline.findings import Finding
    from ringfeed.pipeline.progress import Progress

__all__ = ["check_has_documents", "find_damaged_documents", "write_quarantine"]

_ROWS_AT_ONCE = 1 << 20


def check_has_documents(path: Path) -> None:
    """Refuse a folder whose documents cannot be listed, before anything is hashed.

    Raises:
        ValueError: if it is neither a corpus nor a plan of corpora.
        CorruptDataError: if its manifest is damaged.
    """
    kind = folder_format(path)
    if kind == PLAN_FORMAT:
        Plan.open(path).corpus_paths()
    elif kind != CORPUS_FORMAT:
        raise ValueError(f"{path} is of format {kind!r}; documents are quarantined for a corpus or a plan")


def find_damaged_documents(
    path: Path, findings: Sequence[Finding], *, executor: Executor, progress: Progress
) -> npt.NDArray[np.int64]:
    """Return the documents whose tokens are not what was ingested: int64 [K], rising.

    Args:
        path: a corpus, or a plan: ids count through its corpora in command order.
        findings: of ``verify`` on ``path``. They name a corpus's damaged files; of a plan's corpora they tell
            nothing, and those are hashed here.
        executor: where token files are hashed.
        progress: told how far it is.

    Raises:
        ValueError: if the corpora of the plan are not those it was made from; or as ``check_has_documents``.
        CorruptDataError: if a table of a corpus is damaged, or a file is missing or truncated: no list of
            documents helps there.
    """
    check_has_documents(path)
    known: Sequence[Finding] | None = None
    if folder_format(path) == CORPUS_FORMAT:
        corpora, known = CorpusSet.open([path]), findings
    else:
        corpora = Plan.open(path).open_corpora(check="table")
    with closing(corpora):
        found = [
            first + _damaged_in(corpus, _damaged_files(corpus, known, executor, progress))
            for corpus, first in zip(corpora.corpora, corpora.bounds.tolist(), strict=False)
        ]
    return np.concatenate(found)


def write_quarantine(path: Path, documents: npt.NDArray[np.int64], *, source: Path) -> None:
    """Write a skip list; ``source`` is where the documents were found damaged."""
    lines = [
        f"# {len(documents)} documents of {source} whose tokens are damaged",
        *map(str, documents.tolist()),
    ]
    with write_atomically(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _damaged_files(
    corpus: Corpus, findings: Sequence[Finding] | None, executor: Executor, progress: Progress
) -> list[int]:
    """Return the numbers of the token files that are not what they were; None: nobody has looked yet."""
    names = {token_file_name(number): number for number in range(corpus.num_token_files)}
    if findings is None:
        entries = [entry for entry in corpus.manifest.files if entry.path in names]
        findings = check_all_files(corpus.path, entries, executor=executor, progress=progress)
    bad = {finding.file for finding in findings}
    return [number for name, number in names.items() if str(corpus.path / name) in bad]


def _damaged_in(corpus: Corpus, files: list[int]) -> npt.NDArray[np.int64]:
    """Return the documents of token ``files`` whose hash is another, int64, ids of the corpus."""
    damaged = []
    for document in _documents_in(corpus, files):
        try:
            corpus.check_document(document)
        except CorruptDataError:
            damaged.append(document)
    return np.array(damaged, dtype=np.int64)


def _documents_in(corpus: Corpus, files: list[int]) -> Iterator[int]:
    owners = corpus.documents["token_file"].view(np.int32)
    for first in range(0, len(owners) if files else 0, _ROWS_AT_ONCE):
        inside = np.isin(owners[first : first + _ROWS_AT_ONCE], files)
        yield from (first + np.flatnonzero(inside)).tolist()
