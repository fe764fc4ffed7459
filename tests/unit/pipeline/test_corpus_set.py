"""Several corpora under global ids."""

import ctypes
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_set import CorpusSet
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.manifest import CorruptDataError

WEB = [np.arange(n) + n for n in (3, 50, 8)]
UINT16: dict[str, Any] = {"token_dtype": "uint16"}
CODE = [np.arange(n) + 1000 for n in (4, 60)]


@pytest.fixture
def corpora(tmp_path):
    write_corpus(tmp_path / "web", WEB, name="web", **UINT16, token_file_bytes=100)
    write_corpus(tmp_path / "code", CODE, name="code")
    return CorpusSet.open([tmp_path / "web", tmp_path / "code"])


def read(tokens, lengths):
    """Read pieces from their addresses, as a kernel does."""
    types = {2: ctypes.c_uint16, 4: ctypes.c_int32}
    return [
        list((types[size] * length).from_address(address))
        for address, size, length in zip(
            tokens.addresses.tolist(), tokens.itemsizes.tolist(), lengths.tolist(), strict=True
        )
    ]


def test_ids_run_through_the_corpora_in_order(corpora):
    assert corpora.num_documents == 5
    assert corpora.names == ("web", "code")
    assert corpora.source_of(np.array([4, 0, 2, 3])).tolist() == [1, 0, 0, 1]
    assert corpora.lengths(np.arange(5)).tolist() == [3, 50, 8, 4, 60]
    assert corpora.supervised(np.array([4, 1])).tolist() == [59, 49]
    assert [corpora.document(i).tolist() for i in range(5)] == [d.tolist() for d in [*WEB, *CODE]]


def test_pieces_are_read_from_their_addresses(corpora):
    ids, starts, lengths = np.array([4, 1, 1, 0]), np.array([7, 0, 20, 3]), np.array([5, 20, 30, 0])
    tokens = corpora.piece_tokens(ids, starts, lengths)

    assert tokens.itemsizes.tolist() == [4, 2, 2, 2]
    assert tokens.after.tolist() == [48, 30, 0, 0]
    documents = [*WEB, *CODE]
    assert read(tokens, lengths) == [
        documents[i][s : s + n].tolist() for i, s, n in zip(ids, starts, lengths, strict=True)
    ]


def test_a_piece_outside_its_document_is_refused(corpora):
    for start, length in ((0, 51), (-1, 2), (50, 1), (3, -1)):
        with pytest.raises(ValueError, match="of document 1, which has 50 tokens"):
            corpora.piece_tokens(np.array([1]), np.array([start]), np.array([length]))
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=f"document {wrong} of 5"):
            corpora.piece_tokens(np.array([0, wrong]), np.array([0, 0]), np.array([1, 1]))


def test_a_damaged_table_never_becomes_an_address(tmp_path):
    write_corpus(tmp_path / "c", WEB, name="c")
    path = tmp_path / "c" / "documents.arrow"
    starts = np.array([0, 3, 53], dtype=np.int64)
    path.write_bytes(path.read_bytes().replace(starts.tobytes(), (starts + 10**9).tobytes()))
    damaged = CorpusSet.open([tmp_path / "c"], check="sizes")
    with pytest.raises(CorruptDataError, match=r"documents\.arrow is damaged"):
        damaged.piece_tokens(np.array([1]), np.array([0]), np.array([1]))


def test_corpora_share_the_files_that_a_process_may_map(tmp_path, monkeypatch):
    monkeypatch.setattr("ringfeed.pipeline.corpus.max_mapped_files", lambda: 12)
    for number in range(3):
        documents = [np.full(10, i) for i in range(9)]
        write_corpus(tmp_path / f"c{number}", documents, name=f"c{number}", token_file_bytes=1)
    corpora = CorpusSet.open([tmp_path / f"c{number}" for number in range(3)])
    ids = np.arange(27)
    found = corpora.piece_tokens(ids, np.zeros(27, dtype=int), np.full(27, 10))
    assert len(set(found.addresses.tolist())) == 27
    assert sum(len(corpus._token_views) for corpus in corpora.corpora) == 12


def test_one_path_twice_counts_twice_under_two_names(tmp_path):
    write_corpus(tmp_path / "web", WEB, name="web")
    twice = CorpusSet.open([tmp_path / "web", tmp_path / "." / "web"])
    assert twice.names == ("web", "web#2")
    assert twice.document(4).tolist() == WEB[1].tolist()


def test_two_corpora_of_one_name_are_refused(tmp_path):
    write_corpus(tmp_path / "a", WEB, name="web")
    write_corpus(tmp_path / "b", CODE, name="web")
    with pytest.raises(ValueError, match=r"a and .*b are both named 'web'.*--name"):
        CorpusSet.open([tmp_path / "a", tmp_path / "b"])


def test_corpora_that_do_not_fit_are_refused_with_the_difference(tmp_path):
    write_corpus(tmp_path / "a", WEB, name="a", tokenizer={"kind": "bytes"}, pad_id=1)
    write_corpus(tmp_path / "b", WEB, name="b", tokenizer={"kind": "hf"}, pad_id=2)
    expected = "pad_id: expected 1, found 2; tokenizer.kind: expected 'bytes', found 'hf'"
    with pytest.raises(ValueError, match=rf"cannot be mixed \({expected}\)"):
        CorpusSet.open([tmp_path / "a", tmp_path / "b"])


def test_a_set_needs_a_corpus():
    with pytest.raises(ValueError, match="no corpus given"):
        CorpusSet.open([])
