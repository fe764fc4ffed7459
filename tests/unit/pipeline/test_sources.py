"""Files of each kind, written by their own libraries, read in parts of any size."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringfeed.pipeline.sources.encoding import EncodingErrors, find_broken
from ringfeed.pipeline.sources.inputs import InputError, SourceKind, list_inputs
from ringfeed.pipeline.sources.read_part import PartReader, column_type, cut_parts
from ringfeed.pipeline.sources.rows import ColumnChoice, join_texts
from ringfeed.pipeline.tokenizer import ByteTokenizer

TEXT = ColumnChoice()
TOKENS = ColumnChoice(name="ids", is_tokens=True)
PART_SIZES = [1, 7, 40, 1 << 20]


def reader_of(column, errors=EncodingErrors.FAIL):
    tokenizer = None if column.is_tokens else ByteTokenizer()
    dtype = {"token_dtype": "int32"}
    return PartReader(column=column, tokenizer=tokenizer, encoding_errors=errors, **dtype)


def read(paths, column=TEXT, *, part_bytes=1 << 20, errors=EncodingErrors.FAIL):
    """Return (source, file, row, tokens) of all documents, and (empty, not UTF-8) counts."""
    reader = reader_of(column, errors)
    documents: list[tuple] = []
    skipped, next_row = np.zeros(2, dtype=int), 0
    for part in cut_parts(list_inputs(paths), part_bytes=part_bytes):
        batch = reader(part)
        first_row = next_row if batch.first_row is None else batch.first_row
        next_row = first_row + batch.num_rows
        pieces = np.split(batch.tokens, np.cumsum(batch.lengths))[:-1]
        rows = (batch.rows + first_row).tolist()
        documents += zip(batch.sources.tolist(), batch.files.tolist(), rows, map(list, pieces), strict=True)
        skipped += [batch.skipped_empty, batch.skipped_encoding]
    return documents, tuple(skipped.tolist())


def texts_of(documents):
    return [bytes(tokens[1:-1]).decode() for *_, tokens in documents]


@pytest.fixture
def tree(tmp_path):
    for name in ("b/z.txt", "b/a.txt", "b-1/c.txt", "a.txt", ".hidden", ".git/config", "empty.txt"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.txt" else f"text of {name}")
    return tmp_path / "tree"


def test_a_folder_is_read_in_sorted_path_order_without_hidden_files(tree):
    inputs = list_inputs([tree])
    names = ["a.txt", "b/a.txt", "b/z.txt", "b-1/c.txt", "empty.txt"]
    assert [file.name for file in inputs] == [f"tree/{name}" for name in names]
    visible = [path for path in tree.rglob("*") if path.is_file() and "/." not in str(path)]
    assert [file.path for file in inputs] == sorted(visible)


def test_glob_chooses_names_in_folders_and_not_named_files(tree):
    def names(glob):
        return [file.name for file in list_inputs([tree, tree / "a.txt"], glob=glob)]

    assert names("z.*") == ["tree/b/z.txt", "a.txt"]
    assert names("b/*.txt") == ["tree/b/a.txt", "tree/b/z.txt", "a.txt"]


def test_sources_without_a_file_are_refused(tmp_path, tree):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no file \(hidden ones are left out\)"):
        list_inputs([tree, tmp_path / "empty"])
    with pytest.raises(InputError, match=r"has no file that matches '\*\.md'"):
        list_inputs([tree], glob="*.md")
    with pytest.raises(InputError, match=r"there is no file or folder .*gone"):
        list_inputs([tmp_path / "gone"])


def test_the_suffix_says_how_a_file_is_read(tmp_path):
    names = ["a.jsonl", "b.NDJSON", "c.parquet", "d.pq", "e.arrow", "f.feather", "g.json", "h", "i.py"]
    for name in names:
        (tmp_path / name).write_text("x")
    kinds = [file.kind for file in list_inputs([tmp_path])]
    kind = SourceKind
    assert kinds == [kind.JSONL] * 2 + [kind.PARQUET] * 2 + [kind.ARROW] * 2 + [kind.TEXT] * 3


@pytest.mark.parametrize("part_bytes", PART_SIZES)
def test_text_files_are_one_document_each_and_empty_ones_are_counted(tree, part_bytes):
    documents, skipped = read([tree], part_bytes=part_bytes)
    assert texts_of(documents) == [f"text of {n}" for n in ("a.txt", "b/a.txt", "b/z.txt", "b-1/c.txt")]
    assert [entry[:3] for entry in documents] == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0)]
    assert skipped == (1, 0)


@pytest.mark.parametrize("part_bytes", PART_SIZES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_jsonl_text_in_parts_of_any_size(tmp_path, part_bytes, newline):
    texts = ["first", "naïve ☃", "", None, 'quote " and \n newline', "x" * 100]
    lines = [json.dumps({"id": i, "text": t}, ensure_ascii=i % 2 == 1) for i, t in enumerate(texts)]
    lines.insert(1, "  ")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + newline.join(lines).encode())
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "next file"}) + newline)

    documents, skipped = read([tmp_path], part_bytes=part_bytes)

    assert texts_of(documents) == [t for t in texts if t] + ["next file"]
    # The blank line is no row, yet it counts where lines are counted.
    assert [row for _, _, row, _ in documents] == [0, 2, 5, 6, 0]
    assert skipped == (2, 0)


@pytest.mark.parametrize("part_bytes", PART_SIZES)
def test_jsonl_tokens(tmp_path, part_bytes):
    lists = [[1, 2, 3], [], [2**31 - 1], [0]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in lists))
    documents, skipped = read([tmp_path / "a.jsonl"], TOKENS, part_bytes=part_bytes)
    assert [tokens for *_, tokens in documents] == [[1, 2, 3], [2**31 - 1], [0]]
    assert skipped == (1, 0)


@pytest.mark.parametrize("part_bytes", PART_SIZES)
@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("{broken", TEXT, "no JSON"),
        ("[1, 2]", TEXT, "a JSON list, not an object with a field 'text'"),
        ('{"body": "x"}', TEXT, r"no field 'text' \(it has 'body'\); name another one with --text-column"),
        ('{"text": 5}', TEXT, "field 'text' is a int, not text"),
        ('{"ids": [1, true]}', TOKENS, "field 'ids' is no list of integers"),
        ('{"ids": [1.0]}', TOKENS, "field 'ids' is no list of integers"),
        ('{"ids": [1, -2]}', TOKENS, "has token -2; tokens must be 0 to 2147483647"),
        ('{"ids": [2147483648]}', TOKENS, "has token 2147483648"),
        ('{"ids": [99999999999999999999]}', TOKENS, "has a token beyond 64 bits"),
        ('{"text": "' + "x" * 9 + '"', TEXT, "no JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, part_bytes, line, column, message):
    good = '{"text": "fine", "ids": [1]}\n'
    (tmp_path / "bad.jsonl").write_text(good * 3 + "\n" + line + "\n" + good)
    with pytest.raises(InputError, match=rf"bad\.jsonl line 5:? .*{message}"):
        read([tmp_path / "bad.jsonl"], column, part_bytes=part_bytes)


def write_arrow(path, table, *, max_chunksize=None):
    new = pa.ipc.new_stream if path.stem.endswith("stream") else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=max_chunksize)


def write_all_kinds(folder, table):
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    write_arrow(folder / "b.arrow", table, max_chunksize=2)
    write_arrow(folder / "c-stream.arrow", table, max_chunksize=2)
    return [folder / name for name in ("a.parquet", "b.arrow", "c-stream.arrow")]


@pytest.mark.parametrize("part_bytes", PART_SIZES)
@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_text_columns_of_any_type(tmp_path, kind, part_bytes):
    texts = ["one", "zwei ☃", "", None, "fünf", "six", "seven"]
    values = pa.array(texts, pa.string()).cast(kind)
    table = pa.table({"other": pa.array(range(7)), "text": values})
    for path in write_all_kinds(tmp_path, table):
        documents, skipped = read([path], part_bytes=part_bytes)
        assert texts_of(documents) == ["one", "zwei ☃", "fünf", "six", "seven"]
        assert [row for _, _, row, _ in documents] == [0, 1, 4, 5, 6]
        assert skipped == (2, 0)


INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


@pytest.mark.parametrize("make_list", [pa.list_, pa.large_list])
@pytest.mark.parametrize("value_type", INTEGERS, ids=str)
def test_token_columns_of_any_type(tmp_path, value_type, make_list):
    lists = [[1, 2, 3], [], None, [127], [0, 5], [9]]
    table = pa.table({"ids": pa.array(lists, make_list(value_type))})
    for path in write_all_kinds(tmp_path, table):
        documents, skipped = read([path], TOKENS, part_bytes=1)
        assert [(row, tokens) for _, _, row, tokens in documents] == [
            (0, [1, 2, 3]),
            (3, [127]),
            (4, [0, 5]),
            (5, [9]),
        ]
        assert skipped == (2, 0)


def test_lists_of_fixed_size_and_slices(tmp_path):
    fixed = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    sliced = pa.table({"ids": pa.array([[9], [1, 2], [3, 4, 5]], pa.list_(pa.int32()))}).slice(1)
    write_arrow(tmp_path / "a.arrow", pa.table({"ids": fixed}))
    write_arrow(tmp_path / "b.arrow", sliced)
    documents, _ = read([tmp_path], TOKENS)
    assert [tokens for *_, tokens in documents] == [[1, 2], [3, 4], [5, 6], [1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([4, -1], r"row 3 \(from 0\) has token -1; tokens must be 0 to 2147483647"),
        ([2**31], r"row 3 \(from 0\) has token 2147483648"),
        ([1, None], r"row 3 \(from 0\) has a token that is null"),
    ],
)
def test_ids_that_are_no_tokens_are_refused_with_file_and_row(tmp_path, bad, message):
    table = pa.table({"ids": pa.array([[1, 2, 3], [], [7], bad, [1]], pa.list_(pa.int64()))})
    for path in write_all_kinds(tmp_path, table):
        for part_bytes in (1, 1 << 20):
            with pytest.raises(InputError, match=rf"{path.name} {message}"):
                read([path], TOKENS, part_bytes=part_bytes)


def test_columns_that_do_not_fit_are_refused_by_name(tmp_path):
    paths = write_all_kinds(tmp_path, pa.table({"body": ["x"], "ids": [[1]], "scores": [[0.5]]}))
    for path in paths:
        (file,) = list_inputs([path])
        with pytest.raises(InputError, match=r"has 0 columns 'text' \(it has body, ids, scores\); name one"):
            column_type(file, TEXT)
        with pytest.raises(InputError, match=r"column 'ids' is list<.*int64>, not text; lists of tokens"):
            column_type(file, ColumnChoice(name="ids"))
        for name in ("body", "scores"):
            with pytest.raises(InputError, match=rf"column '{name}' is .*, not lists of integers"):
                column_type(file, ColumnChoice(name=name, is_tokens=True))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
@pytest.mark.parametrize("content", [b"", b"not that kind of file at all", b"ARROW1\0\0 no", b"PAR1"])
def test_files_that_are_not_what_their_suffix_says(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} is no (Parquet file|Arrow IPC file or stream)"):
        column_type(list_inputs([tmp_path])[0], TEXT)


def test_text_that_is_not_utf8_fails_is_skipped_or_kept_by_policy(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n{"text": "half \\ud83d"}')
    pq.write_table(pa.table({"text": pa.array([b"fine", b"\xff"], pa.binary())}), tmp_path / "d.parquet")
    for name, place in (
        ("b.txt", "b.txt is not UTF-8 (byte 0xe9 at offset 3)"),
        ("c.jsonl", "c.jsonl line 2 is not UTF-8"),
        ("d.parquet", "d.parquet row 1 (from 0) is not UTF-8"),
    ):
        with pytest.raises(InputError) as caught:
            read([tmp_path / name])
        assert place in str(caught.value)
        assert "--encoding-errors skip" in str(caught.value)

    documents, skipped = read([tmp_path], errors=EncodingErrors.SKIP)
    assert texts_of(documents) == ["good", "ok", "fine"]
    assert skipped == (0, 4)

    documents, skipped = read([tmp_path], errors=EncodingErrors.BYTES)
    assert [bytes(tokens[1:-1]) for *_, tokens in documents][:4] == [b"good", b"caf\xe9", b"ok", b"caf\xe9"]
    assert skipped == (0, 0)


def test_a_character_split_between_two_texts_makes_both_broken():
    text, offsets = join_texts(["x☃".encode()[:2], "☃".encode()[1:], b"", "ä".encode()])
    assert find_broken(text, offsets).tolist() == [True, True, False, False]


def test_a_file_that_changes_meanwhile_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    parts = list(cut_parts(list_inputs([path]), part_bytes=1))
    path.write_text("and after")
    with pytest.raises(InputError, match=r"a\.txt changed while it was ingested"):
        reader_of(TEXT)(parts[0])
