"""Manifests: every damage is found, every refusal says what to do."""

import json

import pytest

from ringfeed.pipeline.manifest import (
    CorruptDataError,
    Manifest,
    check_file,
    check_size,
    describe_difference,
    file_entry,
    fingerprint,
    read_manifest,
    write_manifest,
)

MADE_FROM = {"seed": 1, "tokenizer": {"kind": "bytes"}}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "plan"
    folder.mkdir()
    (folder / "rows.bin").write_bytes(b"0123456789" * 1000)
    write_manifest(
        folder,
        Manifest(
            format="ringfeed-plan",
            fingerprint=fingerprint(MADE_FROM),
            made_from=MADE_FROM,
            files=(file_entry(folder, "rows.bin", 7),),
            facts={"num_steps": 3},
        ),
    )
    return folder


def test_what_is_written_is_read(folder):
    manifest = read_manifest(folder, format="ringfeed-plan")

    assert manifest.made_from == MADE_FROM
    assert manifest.facts == {"num_steps": 3}
    assert [(entry.path, entry.rows, entry.bytes) for entry in manifest.files] == [("rows.bin", 7, 10_000)]


def test_fingerprint_depends_on_content_and_not_on_order():
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert len(fingerprint({})) == 32


def test_any_flipped_bit_of_the_manifest_is_found(folder):
    path = folder / "manifest.json"
    original = path.read_bytes()
    unnoticed = []
    for i in range(len(original)):
        damaged = bytearray(original)
        damaged[i] ^= 1
        path.write_bytes(damaged)
        try:
            same = read_manifest(folder, format="ringfeed-plan")
        except ValueError:
            continue
        unnoticed.append((i, same))

    assert unnoticed == []


def test_a_truncated_manifest_is_damaged_data(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptDataError, match=r"manifest\.json is damaged"):
        read_manifest(folder, format="ringfeed-plan")


def test_a_flipped_byte_of_a_file_is_found_and_named(folder):
    entry = read_manifest(folder, format="ringfeed-plan").files[0]
    check_file(folder, entry)
    with (folder / "rows.bin").open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"x")

    check_size(folder, entry)
    with pytest.raises(CorruptDataError, match=r"rows\.bin has xxh3_64 .* a byte of it changed"):
        check_file(folder, entry)


def test_a_truncated_and_a_missing_file_are_found_by_size_alone(folder):
    entry = read_manifest(folder, format="ringfeed-plan").files[0]
    (folder / "rows.bin").write_bytes(b"0")
    with pytest.raises(CorruptDataError, match=r"rows\.bin has 1 bytes, its manifest says 10000"):
        check_size(folder, entry)
    (folder / "rows.bin").unlink()
    with pytest.raises(CorruptDataError, match=r"rows\.bin is missing; restore it"):
        check_size(folder, entry)


def test_another_format_and_a_newer_version_are_refused(folder):
    with pytest.raises(ValueError, match="is a plan, not a corpus"):
        read_manifest(folder, format="ringfeed-corpus")
    body = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(body | {"version": 99}))
    with pytest.raises(ValueError, match="format version 99, this ringfeed reads up to 1; upgrade"):
        read_manifest(folder, format="ringfeed-plan")


def test_what_is_no_finished_folder_is_refused_with_its_reason(tmp_path):
    with pytest.raises(ValueError, match="there is no corpus at"):
        read_manifest(tmp_path / "gone", format="ringfeed-corpus")
    (tmp_path / "half.partial").mkdir()
    way_out = "run the same `ringfeed ingest` again to finish it"
    with pytest.raises(ValueError, match=f"half is half-written .*{way_out}"):
        read_manifest(tmp_path / "half", format="ringfeed-corpus")
    with pytest.raises(ValueError, match=rf"half\.partial is half-written; {way_out}"):
        read_manifest(tmp_path / "half.partial", format="ringfeed-corpus")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"other is no corpus: it has no manifest\.json"):
        read_manifest(tmp_path / "other", format="ringfeed-corpus")


def test_difference_names_each_field_on_one_line():
    old = {"seed": 1, "tokenizer": {"kind": "bytes", "eos": 257}, "files": ["a", "b"]}
    new = {"seed": 2, "tokenizer": {"kind": "hf", "eos": 257}, "files": ["a"], "extra": True}

    assert describe_difference(old, old) == ""
    assert describe_difference(old, new) == (
        "files[1]: expected 'b', found nothing; seed: expected 1, found 2; "
        "tokenizer.kind: expected 'bytes', found 'hf'; extra: expected nothing, found True"
    )


def test_difference_tells_numbers_from_flags_and_empty_from_absent():
    assert describe_difference({"a": 1}, {"a": True}) == "a: expected 1, found True"
    assert describe_difference({"a": {}}, {}) == "a: expected {}, found nothing"


def test_a_long_difference_is_cut():
    many = {f"key{i:02d}": i for i in range(20)}
    assert describe_difference(many, {}).endswith("key07: expected 7, found nothing; and 12 more")
