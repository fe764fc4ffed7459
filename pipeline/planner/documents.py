"""What the planner knows of documents: how long they are and which corpus they belong to.

In:   corpora (``pipeline/corpus_set.py``), or a .npy file of lengths
Out:  ``DocumentTable``: lengths and sources by global document id
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.corpus_masks import piece_supervised
from ringfeed.pipeline.corpus_set import CorpusSet
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.recipe import SourceRef
from ringfeed.pipeline.step_packs import Pieces

__all__ = ["CorpusTable", "DocumentTable", "LengthsTable", "open_documents"]

Ids = NDArray[np.int64]
_HASH_ROWS = 1 << 20


class DocumentTable(Protocol):
    """Lengths of documents by global id."""

    @property
    def sources(self) -> tuple[SourceRef, ...]:
        """What the documents come from, in order; the recipe names it."""
        ...

    @property
    def source_paths(self) -> tuple[Path, ...]: ...

    @property
    def source_made_from(self) -> list[dict[str, Any]]:
        """What went into each source, for a readable difference when it has changed."""
        ...

    @property
    def num_documents(self) -> int: ...

    @property
    def knows_masks(self) -> bool:
        """Is it known which labels are supervised?"""
        ...

    def lengths(self, ids: Ids) -> NDArray[np.int64]:
        """Return the tokens of each document: int64 [D] -> int64 [D]."""
        ...

    def source_of(self, ids: Ids) -> NDArray[np.int32]:
        """Return which source each document belongs to: int64 [D] -> int32 [D]."""
        ...

    def row_starts(self) -> Ids:
        """Return the first document of each row that was packed before, and all: int64 [R + 1].

        A document that was not packed is a row of its own.
        """
        ...

    def supervised(self, pieces: Pieces, *, boundary: str) -> NDArray[np.int64]:
        """Return the supervised tokens of each piece, int64 [P]; only where masks are known."""
        ...


class CorpusTable:
    """The documents of corpora."""

    knows_masks = True

    def __init__(self, corpora: CorpusSet) -> None:
        self._corpora = corpora
        self.num_documents = corpora.num_documents
        self.source_paths = corpora.paths
        self.sources = tuple(
            SourceRef(
                kind="corpus",
                name=name,
                fingerprint=corpus.fingerprint,
                num_documents=corpus.num_documents,
            )
            for name, corpus in zip(corpora.names, corpora.corpora, strict=True)
        )

    @property
    def source_made_from(self) -> list[dict[str, Any]]:
        return self._corpora.made_from()

    def lengths(self, ids: Ids) -> NDArray[np.int64]:
        return self._corpora.lengths(ids)

    def source_of(self, ids: Ids) -> NDArray[np.int32]:
        return self._corpora.source_of(ids)

    def row_starts(self) -> Ids:
        return self._corpora.row_starts()

    def supervised(self, pieces: Pieces, *, boundary: str) -> NDArray[np.int64]:
        return piece_supervised(self._corpora, pieces, boundary=boundary)


@dataclass(frozen=True, slots=True, eq=False)
class LengthsTable:
    """Document lengths from a file, without tokens: document ids are array indices."""

    path: Path
    array: NDArray[np.integer[Any]]
    """1-D, memory-mapped."""
    sources: tuple[SourceRef, ...]
    knows_masks: bool = False

    @classmethod
    def open(cls, path: Path) -> "LengthsTable":
        """Open a .npy file of 1-D integers, none of them negative.

        Raises:
            ValueError: if it is something else; names the file and the first wrong row.
        """
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise ValueError(f"lengths={path}: there is no such file") from None
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"lengths={path} is no .npy file of integers: {error}") from None
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            shown = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
            raise ValueError(f"lengths={path} holds {shown}, needs integers in one dimension")
        source = SourceRef(
            kind="lengths",
            name="lengths",
            fingerprint=_digest_lengths(path, array),
            num_documents=len(array),
        )
        return cls(path, array, (source,))

    @property
    def num_documents(self) -> int:
        return len(self.array)

    @property
    def source_paths(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def source_made_from(self) -> list[dict[str, Any]]:
        return [{"fingerprint": self.sources[0].fingerprint}]

    def lengths(self, ids: Ids) -> NDArray[np.int64]:
        return self.array[ids].astype(np.int64)

    def source_of(self, ids: Ids) -> NDArray[np.int32]:
        return np.zeros(len(ids), np.int32)

    def row_starts(self) -> Ids:
        return np.arange(len(self.array) + 1, dtype=np.int64)

    def supervised(self, pieces: Pieces, *, boundary: str) -> NDArray[np.int64]:
        """Refuse: lengths say nothing of labels."""
        del pieces, boundary
        raise ValueError(f"{self.path} holds lengths alone: which labels are supervised is not known")


def open_documents(options: PlanOptions) -> DocumentTable:
    """Open the corpora or the file of lengths that ``options`` name.

    Raises:
        ValueError: if one of them is not what it should be, or there is no document.
    """
    table: DocumentTable
    if options.lengths is not None:
        table = LengthsTable.open(options.lengths)
    else:
        table = CorpusTable(CorpusSet.open(options.corpora))
    if table.num_documents == 0:
        shown = ", ".join(str(path) for path in table.source_paths)
        raise ValueError(f"{shown} has no document: there is nothing to plan")
    return table


def _digest_lengths(path: Path, array: NDArray[np.integer[Any]]) -> str:
    """Return a digest of the lengths as int64, whatever type the file has."""
    digest = xxhash.xxh3_128()
    for first in range(0, len(array), _HASH_ROWS):
        rows = array[first : first + _HASH_ROWS]
        if rows.dtype == np.uint64 and int(rows.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"lengths={path}: row {first + int(rows.argmax())} is {rows.max()}")
        if int(rows.min()) < 0:
            row = int((rows < 0).argmax())
            raise ValueError(f"lengths={path}: row {first + row} is {rows[row]}; lengths are at least 0")
        digest.update(np.ascontiguousarray(rows, dtype="<i8").data)
    return digest.hexdigest()
