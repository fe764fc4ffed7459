"""Masks and labels of token columns, from every kind of file, and what is refused."""

import json

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

ROWS: list[dict[str, list[int]]] = [
    {"ids": [5, 6, 7, 8], "mask": [1, 0, 1, 1]},
    {"ids": [], "mask": []},
    {"ids": [9], "mask": [1]},
    {"ids": [1, 2, 3], "mask": [0, 0, 0]},
    {"ids": [4, 4, 4, 4, 4], "mask": [0, 1, 0, 1, 0]},
]
TARGETS = [[2, 3], [], [], [1, 3]]


def labelled(rows):
    return [
        {"ids": r["ids"], "mask": [t if m else -100 for t, m in zip(r["ids"], r["mask"], strict=True)]}
        for r in rows
    ]


def write(path, rows, mask_type=None):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    masks = pa.array([row["mask"] for row in rows], pa.list_(mask_type or pa.int64()))
    table = pa.table({"other": list(range(len(rows))), "ids": [row["ids"] for row in rows], "mask": masks})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def ingest(path, **options):
    output = path.parent / "corpus"
    given = {"sources": (path,), "output": output, "tokens_column": "ids", "mask_column": "mask", **options}
    run_ingest(IngestOptions(**given), progress=SilentProgress())
    return Corpus.open(output)


def targets_of(corpus):
    columns = [corpus.mask_runs[name].tolist() for name in ("start", "stop")]
    runs = list(zip(*columns, strict=True))
    first, count = (corpus.documents[name].tolist() for name in ("first_run", "num_runs"))
    own = [runs[f : f + n] for f, n in zip(first, count, strict=True)]
    return [[k for start, stop in document for k in range(start, stop)] for document in own]


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_flags_are_read_from_every_kind_of_file(tmp_path, name, part_bytes):
    # One token file per document, so that runs of several files are put together.
    corpus = ingest(write(tmp_path / name, ROWS), part_bytes=part_bytes, token_file_bytes=4)
    assert targets_of(corpus) == TARGETS
    assert corpus.supervised.tolist() == [2, 0, 0, 2]
    assert corpus.facts["num_supervised"] == 4
    assert corpus.facts["mask_rule"] == "stored"
    assert verify(corpus.path).findings == ()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_labels_that_are_not_shifted_say_the_same(tmp_path, name):
    rows = labelled(ROWS)
    corpus = ingest(write(tmp_path / name, rows), mask_column=None, labels_column="mask")
    assert targets_of(corpus) == TARGETS


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_flags_may_be_true_and_false(tmp_path, name):
    rows = [{"ids": row["ids"], "mask": [bool(flag) for flag in row["mask"]]} for row in ROWS]
    assert targets_of(ingest(write(tmp_path / name, rows, pa.bool_()))) == TARGETS


def test_without_a_mask_column_all_but_first_tokens_are_trained_on(tmp_path):
    corpus = ingest(write(tmp_path / "a.jsonl", ROWS), mask_column=None)
    assert corpus.mask_runs is None
    assert corpus.supervised.tolist() == [3, 0, 2, 4]
    assert corpus.facts["mask_rule"] == "all"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    ("mask", "kind", "told"),
    [
        ([1, 0], "mask_column", "has 3 tokens and 2 flags; each token needs one"),
        ([1, 0, 2], "mask_column", "has flag 2 at token 2; flags are 0 or 1"),
        ([-100, 6, 7], "labels_column", "has label 6 at token 1, which is 7; a label is its own token or"),
        ([0, 0, 0], "labels_column", "has label 0 at token 0, which is 6"),
    ],
)
def test_a_mask_that_does_not_go_with_its_tokens_is_refused(tmp_path, name, mask, kind, told):
    rows = [{"ids": [1], "mask": [1]}, {"ids": [6, 7, 8], "mask": mask}]
    place = "line 2" if name == "a.jsonl" else r"row 1 \(from 0\)"
    options = {"mask_column": None, kind: "mask"}
    with pytest.raises(InputError, match=rf"{name} {place} {told}"):
        ingest(write(tmp_path / name, rows), **options)
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"ids": [1], "mask": "x"}', "line 1: field 'mask' is no list of integers or of true and false"),
        ('{"ids": [1], "mask": [1.5]}', "field 'mask' is no list of integers"),
        ('{"ids": [1], "mask": [99999999999999999999]}', "field 'mask' has a number beyond 64 bits"),
        ('{"ids": [1]}', r"no field 'mask' \(it has 'ids'\); name another one with --mask-column"),
        ('{"ids": [1], "mask": null}', "has 1 tokens and 0 flags"),
    ],
)
def test_lines_without_a_mask_are_refused(tmp_path, line, told):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match=told):
        ingest(tmp_path / "a.jsonl")


def test_columns_that_are_no_masks_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", ROWS)
    with pytest.raises(InputError, match=r"has 0 columns 'flags' .*; name one with --mask-column"):
        ingest(path, mask_column="flags")
    with pytest.raises(InputError, match="column 'other' is int64, not lists of integers or booleans"):
        ingest(path, mask_column="other")
    rows = [{"ids": [1, 2], "mask": [1, None]}]
    with pytest.raises(InputError, match=r"row 0 \(from 0\) has a value in 'mask' that is null"):
        ingest(write(tmp_path / "b.parquet", rows))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"labels_column": "labels"}, "exclude each other"),
        ({"tokens_column": None}, "mask_column='mask' goes with tokens_column"),
        ({"mask_column": "ids"}, "mask_column='ids' is the tokens_column, too"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, options, told):
    with pytest.raises(ValueError, match=told):
        ingest(tmp_path / "a.jsonl", **options)


def test_the_command_tells_how_much_is_trained_on(tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", ROWS)
    flags = ["--tokens-column", "ids", "--mask-column", "mask"]
    assert main(["ingest", str(source), "-o", str(tmp_path / "c"), *flags]) == 0
    assert "4 documents, 13 tokens (4 of them trained on) from 1 files" in capsys.readouterr().out


def test_many_documents_keep_their_masks_over_pages_and_files(tmp_path):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 9, size=9000)
    rows = [{"ids": [1] * n, "mask": draw.integers(0, 2, size=n).tolist()} for n in lengths.tolist()]
    corpus = ingest(write(tmp_path / "a.arrow", rows), token_file_bytes=20_000)
    expected = [[k for k in range(1, len(row["mask"])) if row["mask"][k]] for row in rows]
    assert targets_of(corpus) == expected
    corpus.check_rows(np.arange(corpus.num_documents))
    assert verify(corpus.path).findings == ()
