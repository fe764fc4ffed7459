"""What goes into a corpus comes out of it, whatever its documents and however it is cut."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.ingest import IngestOptions, run_ingest
from ringfeed.pipeline.progress import SilentProgress

token_lists = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), min_size=1, max_size=20).filter(any)
text_lists = st.lists(st.text(max_size=20), min_size=1, max_size=20).filter(any)
sizes = st.integers(1, 200)
# Each file is synced to disk: not too many of them.
file_sizes = st.integers(100, 800)


def ingest(path, output, **options):
    run_ingest(IngestOptions(sources=(path,), output=output, **options), progress=SilentProgress())
    return Corpus.open(output)


def write_tokens(folder, suffix, documents):
    path = folder / f"x.{suffix}"
    table = pa.table({"ids": pa.array(documents, pa.list_(pa.int64()))})
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in documents))
    elif suffix == "parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return path


@settings(max_examples=25)
@given(
    documents=token_lists,
    suffix=st.sampled_from(["jsonl", "parquet", "arrow"]),
    part_bytes=sizes,
    token_file_bytes=file_sizes,
)
def test_ingested_tokens_are_read_back(documents, suffix, part_bytes, token_file_bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = write_tokens(Path(folder), suffix, documents)
        corpus = ingest(
            path,
            Path(folder) / "c",
            tokens_column="ids",
            part_bytes=part_bytes,
            token_file_bytes=token_file_bytes,
        )
        kept = [(row, ids) for row, ids in enumerate(documents) if ids]

        assert [corpus.document(i).tolist() for i in range(corpus.num_documents)] == [d for _, d in kept]
        assert corpus.documents["row"].tolist() == [row for row, _ in kept]
        assert corpus.lengths.tolist() == [len(ids) for _, ids in kept]
        assert corpus.supervised.tolist() == [len(ids) - 1 for _, ids in kept]
        assert corpus.facts["skipped_empty"] == len(documents) - len(kept)
        for i in range(corpus.num_documents):
            corpus.check_document(i)


@settings(max_examples=25)
@given(texts=text_lists, part_bytes=sizes, token_file_bytes=file_sizes, ascii_only=st.booleans())
def test_ingested_text_is_read_back(texts, part_bytes, token_file_bytes, ascii_only):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) + "\n" for text in texts]
        path.write_bytes("".join(lines).encode())
        corpus = ingest(path, Path(folder) / "c", part_bytes=part_bytes, token_file_bytes=token_file_bytes)
        documents = [corpus.document(i) for i in range(corpus.num_documents)]

        assert [d[1:-1].astype(np.uint8).tobytes().decode() for d in documents] == [t for t in texts if t]
        assert all(d[0] == 256 and d[-1] == 257 for d in documents)


@settings(max_examples=12)
@given(documents=token_lists, cuts=st.lists(sizes, min_size=2, max_size=2), files=file_sizes)
def test_how_the_input_is_cut_into_parts_changes_no_byte(documents, cuts, files):
    with tempfile.TemporaryDirectory() as folder:
        path = write_tokens(Path(folder), "jsonl", documents)
        made = []
        for number, part_bytes in enumerate(cuts):
            output = Path(folder) / str(number)
            ingest(path, output, tokens_column="ids", part_bytes=part_bytes, token_file_bytes=files)
            made.append({p.name: p.read_bytes() for p in output.iterdir() if p.name != "manifest.json"})

        assert made[0] == made[1]
