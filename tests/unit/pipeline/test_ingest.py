"""Ingest as a whole: what comes out, what is refused, what a rerun does."""

import dataclasses
import io
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.ingest import IngestOptions, run_ingest
from ringfeed.pipeline.manifest import check_file
from ringfeed.pipeline.progress import LineProgress, SilentProgress
from ringfeed.pipeline.sources.encoding import EncodingErrors


@pytest.fixture
def tree(tmp_path):
    """A folder with one file of each kind, and one empty."""
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "empty.txt").write_text("")
    (folder / "lines.jsonl").write_text('{"text": "second"}\n{"text": ""}\n{"text": "third"}\n')
    pq.write_table(pa.table({"text": ["fourth", "fifth"]}), folder / "rows.parquet")
    (folder / "sub" / "z.txt").write_text("sixth")
    return folder


def ingest(*sources, output, progress=None, executor=None, **options):
    asked = IngestOptions(sources=sources, output=output, **options)
    return run_ingest(asked, progress=progress or SilentProgress(), executor=executor)


def texts_of(corpus):
    return [bytes(corpus.document(i)[1:-1].astype("u1")).decode() for i in range(corpus.num_documents)]


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_all_kinds_end_in_one_corpus(tree, tmp_path):
    report = ingest(tree, output=tmp_path / "corpus")
    corpus = Corpus.open(tmp_path / "corpus")

    assert texts_of(corpus) == ["first", "second", "third", "fourth", "fifth", "sixth"]
    assert corpus.token_dtype.name == "uint16"
    assert corpus.pad_id == 258
    assert corpus.documents["file"].tolist() == [0, 2, 2, 3, 3, 4]
    assert corpus.documents["row"].tolist() == [0, 0, 2, 0, 1, 0]
    assert corpus.supervised.tolist() == (corpus.lengths - 1).tolist()
    assert (report.documents, report.tokens, report.files) == (6, 44, 5)
    assert (report.skipped_empty, report.skipped_encoding) == (2, 0)
    assert (report.resumed, report.already_finished, report.name) == (False, False, "corpus")
    assert report.fingerprint == corpus.fingerprint


def test_the_corpus_says_where_documents_come_from(tree, tmp_path):
    ingest(tree, tree / "a.txt", output=tmp_path / "corpus", glob="*.txt")
    with pa.OSFile(str(tmp_path / "corpus" / "inputs.arrow")) as source:
        inputs = pa.ipc.open_file(source).read_all().to_pylist()
    assert [(row["source"], row["path"], row["bytes"]) for row in inputs] == [
        (0, "tree/a.txt", 5),
        (0, "tree/empty.txt", 0),
        (0, "tree/sub/z.txt", 5),
        (1, "a.txt", 5),
    ]


def test_every_file_of_the_corpus_is_listed_with_its_hash(tree, tmp_path):
    ingest(tree, output=tmp_path / "corpus", token_file_bytes=20)
    corpus = Corpus.open(tmp_path / "corpus")
    listed = {entry.path for entry in corpus.manifest.files}
    assert {path.name for path in (tmp_path / "corpus").iterdir()} == listed | {"manifest.json"}
    assert corpus.num_token_files == 6
    for entry in corpus.manifest.files:
        check_file(corpus.path, entry)


def test_token_columns_take_the_dtype_of_the_column(tmp_path):
    for kind, dtype in ((pa.uint16(), "uint16"), (pa.int16(), "uint16"), (pa.int64(), "int32")):
        path = tmp_path / f"{kind}.parquet"
        pq.write_table(pa.table({"ids": pa.array([[1, 2], [3]], pa.list_(kind))}), path)
        ingest(path, output=tmp_path / f"c-{kind}", tokens_column="ids", pad_id=9)
        corpus = Corpus.open(tmp_path / f"c-{kind}")
        assert corpus.token_dtype == dtype
        assert [corpus.document(i).tolist() for i in range(2)] == [[1, 2], [3]]
        assert (corpus.pad_id, corpus.facts["tokenizer"]) == (9, {"kind": "tokens"})


def test_tokenizer_files_decide_the_tokens_and_the_fingerprint(tree, tmp_path):
    words = ["first", "second", "third", "fourth", "fifth", "sixth"]
    for name, order in (("a", words), ("b", words[::-1])):
        model = tokenizers.models.WordLevel({w: i for i, w in enumerate(order)}, **{"unk_token": words[0]})
        tokenizers.Tokenizer(model).save(str(tmp_path / f"{name}.json"))
        ingest(tree, output=tmp_path / name, tokenizer=str(tmp_path / f"{name}.json"))
    one, two = Corpus.open(tmp_path / "a"), Corpus.open(tmp_path / "b")
    assert [one.document(i).tolist() for i in range(6)] == [[0], [1], [2], [3], [4], [5]]
    assert [two.document(i).tolist() for i in range(6)] == [[5], [4], [3], [2], [1], [0]]
    assert one.facts["tokenizer"]["kind"] == "hf"
    assert one.fingerprint != two.fingerprint


def test_a_finished_corpus_is_left_as_it_is_and_says_so(tree, tmp_path):
    ingest(tree, output=tmp_path / "corpus")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}
    stream = io.StringIO()

    report = ingest(tree, output=tmp_path / "corpus", progress=LineProgress(stream))

    assert report.already_finished
    assert report.documents == 6
    assert stream.getvalue() == f"{tmp_path / 'corpus'} is complete already; nothing to do\n"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()} == times


def test_another_request_for_the_same_output_is_refused(tree, tmp_path):
    ingest(tree, output=tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"\(encoding_errors: has 'fail', asked for 'skip'\); delete it or"):
        ingest(tree, output=tmp_path / "corpus", encoding_errors=EncodingErrors.SKIP)
    (tree / "a.txt").write_text("changed and longer")
    with pytest.raises(
        ValueError, match=r"sources\[0\]\.bytes: has \d+, asked for \d+; sources\[0\]\.names_sizes_times"
    ):
        ingest(tree, output=tmp_path / "corpus")


def test_the_fingerprint_is_the_same_wherever_and_whenever(tree, tmp_path):
    here = ingest(tree, output=tmp_path / "corpus").fingerprint
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(tree, moved)
    os.utime(moved / "a.txt", (1, 1))
    there = ingest(moved, output=tmp_path / "other", token_file_bytes=20, part_bytes=3).fingerprint
    (moved / "a.txt").write_text("fiRst")
    changed = ingest(moved, output=tmp_path / "third").fingerprint
    skipping = ingest(tree, output=tmp_path / "fourth", encoding_errors=EncodingErrors.SKIP).fingerprint
    assert here == there
    assert len({here, changed, skipping}) == 3


class Backwards:
    """Works on parts from the last to the first, in threads, and gives results in order."""

    def map(self, function, inputs, /):
        inputs = list(inputs)
        with ThreadPoolExecutor(3) as pool:
            futures = {i: pool.submit(function, inputs[i]) for i in reversed(range(len(inputs)))}
            yield from (futures[i].result() for i in range(len(inputs)))


def test_any_executor_gives_the_same_bytes(tree, tmp_path):
    for name, executor in (("a", None), ("b", Backwards())):
        ingest(tree, output=tmp_path / name, name="c", executor=executor, part_bytes=1, token_file_bytes=16)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_bad_input_leaves_nothing_that_stands_in_the_way(tree, tmp_path):
    (tree / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        ingest(tree, output=tmp_path / "corpus", token_file_bytes=8, part_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]

    report = ingest(tree, output=tmp_path / "corpus", encoding_errors=EncodingErrors.SKIP)
    assert (report.documents, report.skipped_encoding) == (6, 1)


def test_sources_with_no_document_are_refused(tmp_path):
    (tmp_path / "src").mkdir()
    with pytest.raises(ValueError, match="src has no file"):
        ingest(tmp_path / "src", output=tmp_path / "corpus")
    (tmp_path / "src" / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"no document with a token in 1 files \(1 empty, 0 not UTF-8\)"):
        ingest(tmp_path / "src", output=tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_text_files_and_token_columns_do_not_mix(tree, tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt is text, but tokens_column='ids' asks for tokens"):
        ingest(tree / "a.txt", output=tmp_path / "corpus", tokens_column="ids")


def test_the_output_may_not_lie_in_a_source(tree):
    with pytest.raises(ValueError, match=r"output=.*corpus lies in the source .*choose one outside"):
        ingest(tree, output=tree / "sub" / "corpus")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ()}, "sources is empty"),
        ({"text_column": "a", "tokens_column": "b"}, "exclude each other"),
        ({"pad_id": 0}, "pad_id=0 goes with tokens_column"),
        ({"tokens_column": "ids", "pad_id": -1}, "pad_id=-1 must be 0 to 2147483647"),
        ({"part_bytes": 0}, "part_bytes=0 must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        IngestOptions(**{"sources": (tmp_path,), "output": tmp_path / "c"} | options)


def test_bytes_of_broken_text_need_the_byte_tokenizer(tree, tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, **{"unk_token": "a"})).save(
        str(tmp_path / "t")
    )
    with pytest.raises(ValueError, match="encoding_errors=bytes needs tokenizer=bytes"):
        ingest(
            tree,
            output=tmp_path / "c",
            tokenizer=str(tmp_path / "t"),
            encoding_errors=EncodingErrors.BYTES,
        )


def test_the_report_is_plain_data(tree, tmp_path):
    report = ingest(tree, output=tmp_path / "corpus")
    assert json.loads(json.dumps(dataclasses.asdict(report), default=str))["documents"] == 6


@pytest.mark.parametrize(
    ("input_bytes", "expected"),
    [(0, 64 << 20), (128 << 30, 64 << 20), (1 << 40, 512 << 20), (60 << 40, 1 << 30)],
)
def test_token_files_grow_with_the_input_up_to_a_gibibyte(tmp_path, input_bytes, expected):
    options = IngestOptions(sources=(tmp_path,), output=tmp_path / "corpus")

    assert options.token_file_size(input_bytes) == expected
