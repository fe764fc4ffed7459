"""``docs/corpus_format.md`` says what is on disk: files, columns, types, bytes."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.documents_table import COLUMNS, MASK_COLUMNS
from ringfeed.pipeline.mask_runs import RUN_COLUMNS
from ringfeed.pipeline.paged_table import PAGE_ROWS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "corpus_format.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("documented") / "corpus"
    documents = [np.arange(1 + i % 7, dtype=np.int64) for i in range(PAGE_ROWS + 1)]
    dtype = "uint16"
    write_corpus(path, documents, name="documented", token_dtype=dtype, token_file_bytes=20_000).close()
    return path


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    path = tmp_path_factory.mktemp("documented") / "masked"
    masks = [np.array([1, 0, 1, 1, 0, 1], np.bool_), np.ones(3, np.bool_)]
    write_corpus(path, [np.arange(6), np.arange(3)], name="masked", masks=masks).close()
    return path


def batch(path):
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    assert reader.num_record_batches == 1
    return reader.get_batch(0)


def columns_of(heading):
    """The table below a heading: name -> type."""
    section = DOCUMENT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE))


def typed(table):
    return {field.name: str(field.type) for field in table.schema}


def test_the_files_are_those_of_the_document(folder, masked):
    listed = re.findall(r"^  (\S+\.(?:json|arrow))( +with masks only)?", DOCUMENT, re.MULTILINE)
    found, found_masked = (
        {re.sub(r"tokens-\d+", "tokens-N", path.name) for path in corpus.iterdir()}
        for corpus in (folder, masked)
    )

    assert found == {re.sub(r"tokens-\d+", "tokens-N", name) for name, only in listed if not only}
    assert found_masked == {re.sub(r"tokens-\d+", "tokens-N", name) for name, _ in listed}


def test_masks_lie_where_the_document_says(masked):
    runs, documents = batch(masked / "mask_runs.arrow"), batch(masked / "documents.arrow")

    assert typed(runs) == columns_of("mask_runs.arrow") == dict.fromkeys(RUN_COLUMNS, "int64")
    assert typed(documents) == columns_of("documents.arrow") | dict.fromkeys(MASK_COLUMNS, "int64")
    assert [tuple(run.values()) for run in runs.to_pylist()] == [(2, 4, 0), (5, 6, 2), (1, 3, 0)]
    owned = documents.select(["supervised", "first_run", "num_runs"]).to_pylist()
    assert [tuple(row.values()) for row in owned] == [(3, 0, 2), (2, 2, 1)]


@pytest.mark.parametrize("name", ["documents.arrow", "inputs.arrow"])
def test_the_tables_have_the_columns_of_the_document_in_its_order(folder, name):
    assert list(typed(batch(folder / name)).items()) == list(columns_of(name).items())


def test_a_document_takes_the_bytes_that_it_says():
    row = sum(dtype.itemsize for dtype in COLUMNS.values())

    assert f"{row} bytes a document" in DOCUMENT
    assert f"{row} in `documents.arrow`" in DOCUMENT
    run = sum(dtype.itemsize for dtype in RUN_COLUMNS.values())
    masks = sum(dtype.itemsize for dtype in MASK_COLUMNS.values())
    assert f"{run} bytes a run" in DOCUMENT
    assert f"{masks} more, and {run} a run" in DOCUMENT


def test_token_files_are_lists_whose_values_are_aligned(folder):
    for path in folder.glob("tokens-*.arrow"):
        table = batch(path)
        assert typed(table) == {"tokens": "large_list<item: uint16>"}
        begins = table["tokens"].values.buffers()[1].address
        mapped = pa.memory_map(str(path)).read_buffer().address
        assert (begins % 64, mapped % 64) == (0, 0)


def test_tokens_and_their_hashes_lie_where_the_table_says(folder):
    table = batch(folder / "documents.arrow").to_pylist()
    for row in (table[0], table[PAGE_ROWS]):
        values = batch(folder / f"tokens-{row['token_file']:05d}.arrow")["tokens"].values.to_numpy()
        tokens = values[row["token_start"] :][: row["length"]]
        assert tokens.tolist() == list(range(row["length"]))
        assert xxhash.xxh3_64_intdigest(tokens.astype("<u2").tobytes()) == row["xxh3_64"]
        assert row["supervised"] == row["length"] - 1


def test_pages_hash_4096_rows_column_after_column(folder):
    table = batch(folder / "documents.arrow")
    first = b"".join(column.to_numpy()[:4096].tobytes() for column in table.columns)
    rest = b"".join(column.to_numpy()[4096:].tobytes() for column in table.columns)

    found = batch(folder / "documents.pages.arrow")["xxh3_64"].to_pylist()

    assert found == [xxhash.xxh3_64_intdigest(first), xxhash.xxh3_64_intdigest(rest)]
