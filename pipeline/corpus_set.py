"""Several corpora as one, with global document ids.

In:   corpora in the order of the command (``pipeline/corpus.py``)
Out:  ``CorpusSet``: lengths, token addresses and sources by global id

Global id = documents of the corpora before it + id in its corpus. Ids are never checked per token:
``piece_tokens`` checks every piece once, so that kernels may read from plain addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.corpus import DOCUMENTS_FILE, Corpus
from ringfeed.pipeline.manifest import CorruptDataError, describe_difference

__all__ = ["CorpusSet", "PieceTokens"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PieceTokens:
    """Where the tokens of P pieces lie in memory."""

    addresses: NDArray[np.int64]
    """int64 [P], of the first token of each piece."""
    itemsizes: NDArray[np.int64]
    """int64 [P], bytes of one token: 2 (uint16) or 4 (int32)."""
    after: NDArray[np.int64]
    """int64 [P], tokens of the document that follow the piece; the next one may be read if > 0."""
    keep: tuple[NDArray[np.integer], ...]
    """The mappings behind the addresses: hold this object while they are used."""


class CorpusSet:
    """Corpora that may be mixed: one tokenizer, one pad id. Some may have masks and others none."""

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        if not corpora:
            raise ValueError("no corpus given: name at least one")
        self.corpora = tuple(corpora)
        self.names = _unique_names(self.corpora)
        _check_compatible(self.corpora)
        self.bounds = np.cumsum([0, *(corpus.num_documents for corpus in self.corpora)], dtype=np.int64)
        """int64 [S + 1]: corpus s has the ids from ``bounds[s]`` to ``bounds[s + 1]``."""

    @classmethod
    def open(cls, paths: Sequence[Path | str], *, check: Literal["table", "sizes"] = "table") -> Self:
        """Open corpora in command order. One path may come several times, to count several times.

        Args:
            paths: corpus folders.
            check: as in ``Corpus.open``.

        Raises:
            ValueError: if there is none, two different ones have one name, or they differ in
                tokenizer or pad id (with the difference).
            CorruptDataError: if one is damaged.
        """
        corpora = [Corpus.open(path, check=check) for path in paths]
        for corpus in corpora:
            corpus.max_mapped_files = max(1, corpus.max_mapped_files // len(corpora))
        return cls(corpora)

    @property
    def num_documents(self) -> int:
        return int(self.bounds[-1])

    @property
    def pad_id(self) -> int:
        return self.corpora[0].pad_id

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(corpus.path for corpus in self.corpora)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(corpus.fingerprint for corpus in self.corpora)

    def made_from(self) -> list[dict[str, Any]]:
        """Return per corpus its fingerprint and what went into it, JSON-able, for a readable diff."""
        return [{"fingerprint": corpus.fingerprint, **corpus.manifest.made_from} for corpus in self.corpora]

    def source_of(self, ids: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return the corpus of each document: int [D] -> int32 [D].

        Raises:
            IndexError: if there is no such document.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.num_documents):
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise IndexError(f"document {wrong} of {self.num_documents}")
        if len(self.corpora) == 1:
            return np.zeros(len(ids), dtype=np.int32)
        # "right": an empty corpus owns no id, the last corpus that starts at the id does.
        return (np.searchsorted(self.bounds, ids, side="right") - 1).astype(np.int32)

    def lengths(self, ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the tokens of each document: int [D] -> int64 [D]."""
        return self._gather(ids, "length").astype(np.int64, copy=False)

    def row_starts(self) -> NDArray[np.int64]:
        """Return the first document of each input row, and ``num_documents``: int64 [R + 1]."""
        parts = [c.row_starts()[:-1] + first for c, first in zip(self.corpora, self.bounds, strict=False)]
        return np.concatenate([*parts, self.bounds[-1:]])

    def supervised(self, ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the supervised tokens of each whole document: int [D] -> int64 [D]."""
        return self._gather(ids, "supervised").astype(np.int64, copy=False)

    def locate(
        self, ids: NDArray[np.integer]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Return token_file int32 [D], token_start int64 [D] and length int64 [D].

        Token files are counted within the document's own corpus (``source_of``).
        """
        return (
            self._gather(ids, "token_file").astype(np.int32, copy=False),
            self._gather(ids, "token_start").astype(np.int64, copy=False),
            self.lengths(ids),
        )

    def document(self, index: int) -> NDArray[np.integer]:
        """Return the tokens of one document, uint16 | int32, read-only, not copied."""
        corpus, local = self._local(index)
        return corpus.document(local)

    def check_rows(self, ids: NDArray[np.integer]) -> None:
        """Check the rows of documents (int [D]) in the tables of their corpora.

        Raises:
            CorruptDataError: if a byte near one of them changed; names the table.
        """
        sources = self.source_of(ids)
        for source in np.unique(sources).tolist():
            self.corpora[source].check_rows(np.asarray(ids)[sources == source] - self.bounds[source])

    def check_documents(self, ids: NDArray[np.integer]) -> None:
        """Hash the tokens of documents, int [D], and compare.

        Raises:
            IndexError: if there is no such document.
            CorruptDataError: if a byte changed; names the file and the document.
        """
        places = (self.source_of(ids), *self.locate(ids), self._gather(ids, "xxh3_64"))
        for document, (source, file, start, length, digest) in zip(
            ids.tolist(), zip(*(column.tolist() for column in places), strict=True), strict=True
        ):
            tokens = self.corpora[source].token_view(file)[max(start, 0) : start + length]
            if len(tokens) != length or xxhash.xxh3_64_intdigest(tokens.data) != digest:
                # Once more, for the reason: a loader's thread has no time to gather it for every document.
                self.corpora[source].check_document(document - int(self.bounds[source]))

    def piece_tokens(
        self, ids: NDArray[np.integer], starts: NDArray[np.integer], lengths: NDArray[np.integer]
    ) -> PieceTokens:
        """Return where the tokens of pieces lie: documents, starts and lengths, int [P] each.

        Raises:
            IndexError: if there is no such document.
            ValueError: if a piece is no part of its document.
            CorruptDataError: if a document lies outside its token file.
        """
        starts, lengths = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        files, token_starts, document_lengths = self.locate(ids)
        after = document_lengths - starts - lengths
        bad = np.flatnonzero((starts < 0) | (lengths < 0) | (after < 0))
        if len(bad):
            i = int(bad[0])
            raise ValueError(
                f"piece {starts[i]} to {starts[i] + lengths[i]} of document {ids[i]}, which has "
                f"{document_lengths[i]} tokens"
            )
        # A shuffled pack has pieces of a hundred files: one look at each, and no mask per file.
        keys, which = np.unique((self.source_of(ids).astype(np.int64) << 32) + files, return_inverse=True)
        sources = keys >> 32
        keep = tuple(
            self.corpora[source].token_view(file)
            for source, file in zip(sources.tolist(), (keys & 0xFFFF_FFFF).tolist(), strict=True)
        )
        facts = [(v.__array_interface__["data"][0], v.itemsize, len(v)) for v in keep]
        bases, itemsizes, num_tokens = np.array(facts, dtype=np.int64).reshape(-1, 3)[which].T
        outside = (token_starts < 0) | (document_lengths < 0) | (token_starts + document_lengths > num_tokens)
        if outside.any():
            path = self.corpora[int(sources[which][outside.argmax()])].path / DOCUMENTS_FILE
            raise CorruptDataError(f"{path} is damaged: a document lies outside its token file")
        addresses = bases + itemsizes * (token_starts + starts)
        return PieceTokens(addresses=addresses, itemsizes=itemsizes, after=after, keep=keep)

    def close(self) -> None:
        """Drop the mappings of all corpora."""
        for corpus in self.corpora:
            corpus.close()

    def _local(self, index: int) -> tuple[Corpus, int]:
        source = int(self.source_of(np.asarray([index]))[0])
        return self.corpora[source], int(index - self.bounds[source])

    def _gather(self, ids: NDArray[np.integer], column: str) -> NDArray[np.generic]:
        ids = np.asarray(ids, dtype=np.int64)
        sources = self.source_of(ids)
        if len(self.corpora) == 1:
            taken: NDArray[np.generic] = self.corpora[0].documents[column][ids]
            return taken
        out = np.empty(len(ids), dtype=self.corpora[0].documents[column].dtype)
        for source in np.unique(sources).tolist():
            inside = sources == source
            out[inside] = self.corpora[source].documents[column][ids[inside] - self.bounds[source]]
        return out


def _unique_names(corpora: tuple[Corpus, ...]) -> tuple[str, ...]:
    """Return the corpora's names; a corpus that is there twice gets ``name#2``."""
    paths: dict[str, list[Path]] = {}
    names = []
    for corpus in corpora:
        path = corpus.path.resolve()
        same = paths.setdefault(corpus.name, [])
        if same and path != same[0]:
            raise ValueError(
                f"{same[0]} and {path} are both named {corpus.name!r}, so their counts could not be told "
                "apart; ingest one again with another --name"
            )
        same.append(path)
        names.append(corpus.name if len(same) == 1 else f"{corpus.name}#{len(same)}")
    return tuple(names)


def _check_compatible(corpora: tuple[Corpus, ...]) -> None:
    first = corpora[0]
    for other in corpora[1:]:
        difference = describe_difference(_shared_facts(first), _shared_facts(other))
        if difference:
            raise ValueError(
                f"{first.path} and {other.path} cannot be mixed ({difference}); "
                "ingest them with the same tokenizer and pad id"
            )


def _shared_facts(corpus: Corpus) -> dict[str, Any]:
    # Not the mask rule: which tokens are trained on is a fact of each document, and mixes.
    return {key: corpus.facts[key] for key in ("tokenizer", "pad_id")}
