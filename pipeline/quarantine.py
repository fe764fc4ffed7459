"""Name the documents whose tokens are damaged, so that a run goes on without them.

In:   a corpus, or a plan and its corpora
Out:  a skip list (``skip.py``) of global document ids

A flipped byte damages one document, not the file that it lies in. Loader, ``shard`` and ``serve`` leave the
listed documents out and never read them; all others keep their places.
"""

from __future__ import annotations

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
    from pathlib import Path

    import numpy.typing as npt

    from ringfeed.pipeline.corpus import Corpus
    from ringfeed.pipeline.executor import Executor
    from ringfeed.pipeline.progress import Progress

__all__ = ["find_damaged_documents", "write_quarantine"]


def find_damaged_documents(path: Path, *, executor: Executor, progress: Progress) -> npt.NDArray[np.int64]:
    """Return the documents whose tokens are not what was ingested: int64 [K], rising.

    Args:
        path: a corpus, or a plan: ids count through its corpora in command order.
        executor: where token files are hashed.
        progress: told how far it is.

    Raises:
        ValueError: if ``path`` is neither, or the corpora of the plan are not those it was made from.
        CorruptDataError: if a table of a corpus is damaged, or a file is missing or truncated: no list of
            documents helps there.
    """
    kind = folder_format(path)
    if kind == CORPUS_FORMAT:
        corpora = CorpusSet.open([path])
    elif kind == PLAN_FORMAT:
        corpora = Plan.open(path).open_corpora(check="table")
    else:
        raise ValueError(f"{path} is of format {kind!r}; documents are quarantined for a corpus or a plan")
    found = [np.empty(0, np.int64)]
    for corpus, first in zip(corpora.corpora, corpora.bounds.tolist(), strict=False):
        found += [
            first + _damaged_in(corpus, number) for number in _damaged_files(corpus, executor, progress)
        ]
    corpora.close()
    return np.concatenate(found)


def write_quarantine(path: Path, documents: npt.NDArray[np.int64], *, source: Path) -> None:
    """Write a skip list; ``source`` is where the documents were found damaged."""
    lines = [
        f"# {len(documents)} documents of {source} whose tokens are damaged",
        *map(str, documents.tolist()),
    ]
    with write_atomically(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _damaged_files(corpus: Corpus, executor: Executor, progress: Progress) -> list[int]:
    names = {token_file_name(number): number for number in range(corpus.num_token_files)}
    entries = [entry for entry in corpus.manifest.files if entry.path in names]
    findings = check_all_files(corpus.path, entries, executor=executor, progress=progress)
    bad = {finding.file for finding in findings}
    return [number for name, number in names.items() if str(corpus.path / name) in bad]


def _damaged_in(corpus: Corpus, number: int) -> npt.NDArray[np.int64]:
    """Return the documents of token file ``number`` whose hash is another, int64, ids of the corpus."""
    files, _, _ = corpus.locate(np.arange(corpus.num_documents))
    damaged = []
    for document in np.flatnonzero(files == number).tolist():
        try:
            corpus.check_document(document)
        except CorruptDataError:
            damaged.append(document)
    return np.array(damaged, dtype=np.int64)
