"""Rows that were packed before: each sequence is a document that knows its row, labels are shifted."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringfeed.pipeline.cli import main
from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.sources.inputs import InputError
from ringfeed.pipeline.verify import verify

# Sequences of 3 and 2 in slots of 4 and 2, one of 4, none at all, three of 1, 2 and 1 end to end.
ROWS: list[dict[str, list[int]]] = [
    {"ids": [5, 6, 7, 0, 8, 9, 0, 0], "n": [3, 2, -1000], "held": [4, 2, -1000]},
    {"ids": [1, 2, 3, 4], "n": [4], "held": [4]},
    {"ids": [0, 0], "n": [0], "held": [0]},
    {"ids": [10, 11, 12, 13], "n": [1, 2, 1], "held": [1, 2, 1]},
]
DOCUMENTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4], [10], [11, 12], [13]]
LABELS = [
    [6, -100, -100, 55, 9, -100, 0, 0],
    [2, 3, 4, -100],
    [7, 7],
    [-100, 12, -100, -100],
]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def ingest(path, **options):
    output = path.parent / "corpus"
    packed = {"tokens_column": "ids", "lengths_column": "n", "padded_lengths_column": "held"}
    run_ingest(
        IngestOptions(sources=(path,), output=output, **{**packed, **options}), progress=SilentProgress()
    )
    return Corpus.open(output)


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_sequences_become_documents_that_know_their_row(tmp_path, name, part_bytes):
    corpus = ingest(write(tmp_path / name, ROWS), part_bytes=part_bytes, token_file_bytes=8)

    assert [corpus.document(i).tolist() for i in range(corpus.num_documents)] == DOCUMENTS
    assert corpus.documents["row"].tolist() == [0, 0, 1, 3, 3, 3]
    assert corpus.row_starts().tolist() == [0, 2, 3, 6]
    assert corpus.facts["skipped_empty"] == 1
    assert verify(corpus.path).findings == ()


def test_without_padded_lengths_sequences_lie_end_to_end(tmp_path):
    corpus = ingest(write(tmp_path / "a.jsonl", ROWS), padded_lengths_column=None)

    assert corpus.document(1).tolist() == [0, 8]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_shifted_labels_say_what_is_trained_on(tmp_path, name):
    labels = [[-100 if label == 55 else label for label in row] for row in LABELS]
    rows = [{**row, "labels": own} for row, own in zip(ROWS, labels, strict=True)]
    corpus = ingest(write(tmp_path / name, rows), labels_column="labels")

    assert corpus.supervised.tolist() == [1, 1, 3, 0, 1, 0]
    starts, stops = (corpus.mask_runs[column].tolist() for column in ("start", "stop"))
    assert list(zip(starts, stops, strict=True)) == [(1, 2), (1, 2), (1, 4), (1, 2)]


def test_flags_stand_at_their_own_token(tmp_path):
    rows = [{**row, "mask": [int(token % 2) for token in row["ids"]]} for row in ROWS]
    corpus = ingest(write(tmp_path / "a.jsonl", rows), mask_column="mask")

    assert corpus.supervised.tolist() == [1, 1, 1, 0, 0, 0]


def test_how_documents_were_packed_is_part_of_the_fingerprint(tmp_path):
    other = [{"ids": document, "n": [len(document)], "held": [len(document)]} for document in DOCUMENTS]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    packed = ingest(write(tmp_path / "one" / "a.jsonl", ROWS))
    single = ingest(write(tmp_path / "two" / "a.jsonl", other))

    assert packed.fingerprint != single.fingerprint
    assert packed.manifest.made_from["content"] == single.manifest.made_from["content"]
    assert single.row_starts().tolist() == list(range(7))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"n": [3, 6], "held": [3, 6]}, r"line 1 has 8 tokens, its padded lengths sum to 9"),
        ({"n": [3], "held": [3, 2]}, r"line 1 has 1 lengths and 2 padded lengths"),
        ({"n": [3, 2], "held": [4, 1]}, r"a sequence of length 2 with padded length 1; a slot is at least"),
        ({"n": [3, 0], "held": [4, 1]}, r"a sequence of length 0 with padded length 1"),
        ({"labels": [6, 7]}, r"line 1 has 8 tokens and 2 labels"),
        (
            {"labels": [*LABELS[0][:1], 55, *LABELS[0][2:]]},
            r"has label 55 at token 1 .* whose next token is 7",
        ),
        ({"labels": [6, 7, 8, 0, 9, -100, 0, 0]}, r"has label 8 at token 2 of a sequence of 3, its last one"),
    ],
)
def test_what_does_not_fit_together_names_the_row(tmp_path, row, message):
    rows = [{"labels": [-100] * 8, **ROWS[0], **row}]

    with pytest.raises(InputError, match=message):
        ingest(write(tmp_path / "a.jsonl", rows), labels_column="labels")
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_column": None}, "goes with tokens_column"),
        ({"lengths_column": None}, "padded_lengths_column='held' goes with lengths_column"),
        ({"labels_column": "n"}, "are columns of their own"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    given = {"tokens_column": "ids", "lengths_column": "n", "padded_lengths_column": "held"}
    with pytest.raises(ValueError, match=message):
        IngestOptions(sources=(Path("a"),), output=Path("b"), **{**given, **options})


def test_a_column_that_is_not_there_is_told(tmp_path, capsys):
    for name in ("a.jsonl", "a.parquet"):
        path = write(tmp_path / name, ROWS)
        code = main(
            [
                "ingest",
                str(path),
                "-o",
                str(tmp_path / "c"),
                "--tokens-column",
                "ids",
                "--lengths-column",
                "m",
            ]
        )
        assert code == 2
        assert "--lengths-column" in capsys.readouterr().err


def test_documents_of_memory_are_rows_of_their_own(tmp_path):
    from ringfeed.pipeline.corpus_writer import write_corpus

    corpus = write_corpus(tmp_path / "c", [np.arange(3), np.arange(0), np.arange(2)], name="c")

    assert corpus.row_starts().tolist() == [0, 1, 2]
    assert "rows" not in corpus.manifest.made_from
