"""Documents by random access, mapped, checked."""

import gc
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.manifest import CorruptDataError, check_file

DOCUMENTS = [np.arange(n) + 10 * n for n in (3, 1, 200, 7, 64, 2)]
UINT16: dict[str, Any] = {"token_dtype": "uint16"}


@pytest.fixture
def corpus(tmp_path):
    # Files of 100 tokens: the document of 200 has one to itself.
    return write_corpus(tmp_path / "web", DOCUMENTS, name="web", pad_id=5, token_file_bytes=400)


def flip(path, position):
    with path.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))


def test_documents_lengths_and_counts(corpus):
    assert corpus.num_documents == 6
    assert corpus.lengths.tolist() == [3, 1, 200, 7, 64, 2]
    assert corpus.supervised.tolist() == [2, 0, 199, 6, 63, 1]
    assert [corpus.document(i).tolist() for i in range(6)] == [d.tolist() for d in DOCUMENTS]
    assert (corpus.name, corpus.pad_id, corpus.num_tokens) == ("web", 5, 277)
    assert corpus.num_token_files == 3


def test_locate_points_into_the_token_files(corpus):
    files, starts, lengths = corpus.locate(np.array([4, 2, 0]))
    assert files.tolist() == [2, 1, 0]
    assert lengths.tolist() == [64, 200, 3]
    view = corpus.token_view(int(files[0]))
    assert view[starts[0] : starts[0] + 64].tolist() == DOCUMENTS[4].tolist()


def test_all_is_mapped_read_only_and_aligned(corpus):
    arrays = [corpus.lengths, corpus.supervised, corpus.document(0), corpus.token_view(2)]
    assert not any(array.flags.writeable or array.flags.owndata for array in arrays)
    assert all(corpus.token_view(i).ctypes.data % 64 == 0 for i in range(3))


@pytest.mark.parametrize("num_documents", [*range(1, 18), 100])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_values_are_aligned_for_any_number_of_rows(tmp_path, num_documents, dtype):
    documents = [np.arange(i % 5 + 1) for i in range(num_documents)]
    corpus = write_corpus(tmp_path / "c", documents, name="c", token_dtype=dtype)
    assert corpus.token_view(0).ctypes.data % 64 == 0
    assert corpus.document(num_documents - 1).tolist() == documents[-1].tolist()


def test_any_arrow_reader_opens_the_files(corpus):
    with pa.OSFile(str(corpus.path / "tokens-00000.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema.field("tokens").type == pa.large_list(pa.int32())
    assert table.column("tokens").to_pylist() == [DOCUMENTS[0].tolist(), DOCUMENTS[1].tolist()]
    with pa.OSFile(str(corpus.path / "documents.arrow")) as source:
        rows = pa.ipc.open_file(source).read_all()
    assert rows.column("length").to_pylist() == [3, 1, 200, 7, 64, 2]


def test_arrays_outlive_the_corpus(corpus):
    document, lengths = corpus.document(2), corpus.lengths
    corpus.close()
    del corpus
    gc.collect()
    assert document.tolist() == DOCUMENTS[2].tolist()
    assert lengths.sum() == 277


def test_there_is_no_document_before_the_first_or_after_the_last(corpus):
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"document {index} of corpus 'web', which has 6"):
            corpus.document(index)


def test_a_flipped_token_is_found_in_its_document_and_named(corpus, tmp_path):
    path = tmp_path / "web" / "tokens-00002.arrow"
    position = path.read_bytes().index(DOCUMENTS[4].astype(np.int32).tobytes()) + 40
    flip(path, position)
    damaged = Corpus.open(tmp_path / "web")

    damaged.check_document(3)
    with pytest.raises(CorruptDataError, match=r"tokens-00002\.arrow: document 4 of corpus 'web' is damaged"):
        damaged.check_document(4)
    with pytest.raises(CorruptDataError, match=r"tokens-00002\.arrow"):
        check_file(damaged.path, damaged.entry("tokens-00002.arrow"))


def test_every_flipped_byte_of_a_token_file_is_found_by_its_hash(corpus, tmp_path):
    path = tmp_path / "web" / "tokens-00000.arrow"
    entry = corpus.entry("tokens-00000.arrow")
    for position in range(0, path.stat().st_size, 7):
        flip(path, position)
        with pytest.raises(CorruptDataError):
            check_file(corpus.path, entry)
        flip(path, position)
    check_file(corpus.path, entry)


def test_no_flipped_byte_of_a_token_file_gives_wrong_tokens_or_a_crash(tmp_path):
    documents = [np.arange(20), np.arange(5)]
    write_corpus(tmp_path / "c", documents, name="c")
    path = tmp_path / "c" / "tokens-00000.arrow"
    for position in range(path.stat().st_size):
        flip(path, position)
        damaged = Corpus.open(tmp_path / "c")
        for i in range(2):
            try:
                damaged.check_document(i)
            except CorruptDataError:
                continue
            assert damaged.document(i).tolist() == documents[i].tolist()
        flip(path, position)


def test_a_flipped_byte_of_the_table_is_refused_when_opened(corpus, tmp_path):
    path = tmp_path / "web" / "documents.arrow"
    for position in range(0, path.stat().st_size, 97):
        flip(path, position)
        with pytest.raises(CorruptDataError, match=r"documents\.arrow"):
            Corpus.open(tmp_path / "web")
        flip(path, position)


def test_a_flipped_byte_of_the_table_is_found_where_its_rows_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr("ringfeed.pipeline.paged_table.PAGE_ROWS", 2)
    write_corpus(tmp_path / "c", [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])], name="c")
    path = tmp_path / "c" / "documents.arrow"
    lengths = np.array([3, 1, 2], dtype=np.int64)
    path.write_bytes(path.read_bytes().replace(lengths.tobytes(), (lengths - [1, 0, 0]).tobytes()))
    damaged = Corpus.open(tmp_path / "c", check="sizes")
    damaged.check_rows(np.array([2]))
    for document in (0, 1):
        with pytest.raises(CorruptDataError, match=r"documents\.arrow is damaged in rows 0 and following"):
            damaged.check_rows(np.array([2, document]))


def test_a_table_that_points_outside_is_found_without_its_hash(corpus, tmp_path):
    path = tmp_path / "web" / "documents.arrow"
    data = path.read_bytes()
    starts = np.array([0, 3, 0, 0, 7, 71], dtype=np.int64).tobytes()
    path.write_bytes(data.replace(starts, np.array([0, 3, -9, 10**12, 7, 71]).tobytes()))
    damaged = Corpus.open(tmp_path / "web", check="sizes")
    for document in (2, 3):
        with pytest.raises(CorruptDataError, match=rf"documents\.arrow: document {document} lies at"):
            damaged.check_document(document)


@pytest.mark.parametrize("name", ["tokens-00001.arrow", "documents.arrow", "inputs.arrow"])
def test_a_truncated_file_is_refused_when_opened(corpus, tmp_path, name):
    path = tmp_path / "web" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match=re.escape(name)):
        Corpus.open(tmp_path / "web", check="sizes")


def test_a_token_file_truncated_after_opening_is_found(corpus, tmp_path):
    opened = Corpus.open(tmp_path / "web", check="sizes")
    path = tmp_path / "web" / "tokens-00000.arrow"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptDataError, match=r"tokens-00000\.arrow has \d+ bytes, its manifest says"):
        opened.document(0)


def test_more_token_files_than_may_be_open_can_be_read(tmp_path):
    documents = [np.full(10, i) for i in range(300)]
    corpus = write_corpus(tmp_path / "c", documents, name="c", token_file_bytes=1)
    assert corpus.num_token_files == 300
    corpus.max_mapped_files = 128
    first = corpus.document(0)
    assert [int(corpus.document(i)[0]) for i in range(300)] == list(range(300))
    assert first.tolist() == [0] * 10


def test_fingerprint_depends_on_content_and_not_on_name_or_files(tmp_path):
    one = write_corpus(tmp_path / "a", DOCUMENTS, name="a")
    two = write_corpus(tmp_path / "b", DOCUMENTS, name="b", token_file_bytes=40)
    three = write_corpus(tmp_path / "c", [*DOCUMENTS[:-1], np.array([1, 2])], name="c")
    assert one.fingerprint == two.fingerprint != three.fingerprint


def test_write_corpus_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="document 1 has tokens 0 to 65536, need 0 to 65535"):
        write_corpus(tmp_path / "c", [np.array([1]), np.array([0, 65536])], name="c", **UINT16)
    with pytest.raises(ValueError, match="document 0 is float64"):
        write_corpus(tmp_path / "c", [np.array([1.0])], name="c")
    with pytest.raises(ValueError, match="needs a document with a token"):
        write_corpus(tmp_path / "c", [np.array([], dtype=int)], name="c")
    write_corpus(tmp_path / "c", [np.array([1])], name="c")
    with pytest.raises(ValueError, match="exists"):
        write_corpus(tmp_path / "c", [np.array([1])], name="c")
