"""The command ``convert``: columns that are found by themselves, and mistakes told before anything starts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringfeed.pipeline.sources.column_names import column_names
from ringfeed.pipeline.sources.inputs import InputError, list_inputs
from ringfeed.workers.cli import main

ROW = {"input_ids": [5, 6, 7, 0], "seq_lens": [3]}


def write(path, row=ROW):
    if path.suffix == ".jsonl":
        path.write_text("\n" + json.dumps(row) + "\n")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        table = pa.Table.from_pylist([row])
        new = pa.ipc.new_stream if path.stem == "stream" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "stream.arrow"])
def test_columns_are_found_in_every_kind_of_file(tmp_path, name):
    (file,) = list_inputs([write(tmp_path / name)])

    assert column_names(file) == ["input_ids", "seq_lens"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"text", "is text, and no rows of tokens"),
        ("a.parquet", b"nothing", "cannot be read"),
        ("a.arrow", b"nothing", "cannot be read"),
        ("a.jsonl", b"nothing", "cannot be read"),
    ],
)
def test_what_is_no_file_of_rows_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    (file,) = list_inputs([tmp_path / name])
    with pytest.raises(InputError, match=f"{name} {message}"):
        column_names(file)


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"input_ids": [1]}, [], "has no column 'seq_lens' (it has input_ids); name the one"),
        (ROW, ["--tokens-column", "ids"], "has no column 'ids'"),
        (ROW, ["--layout", "rings"], "rings"),
        ({**ROW, "seq_lens": [9]}, [], "row 0 (from 0) has 4 tokens, its lengths sum to 9"),
        (ROW, ["--pack-tokens", "3"], "pack_tokens=3"),
    ],
)
def test_mistakes_end_with_2_and_one_line(tmp_path, capsys, row, flags, message):
    path = write(tmp_path / "a.parquet", row)
    code = main(["convert", str(path), "-o", str(tmp_path / "out"), "--cp", "2", "--layout", "te", *flags])

    assert code == 2
    told = capsys.readouterr().err.splitlines()
    assert message in told[-1]
    assert not (tmp_path / "out").exists()
