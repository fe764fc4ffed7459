"""Skip lists: what a file may say, and that only the set of documents counts."""

import pickle

import numpy as np
import pytest

from ringfeed.pipeline.skip import read_skip_list, skip_list


def write(tmp_path, text):
    path = tmp_path / "skip.txt"
    path.write_text(text)
    return path


def test_reads_ids_comments_and_blank_lines(tmp_path):
    path = write(tmp_path, "# bad licence\n7\n\n 3  # dup of 7\n7\n")

    skip = read_skip_list(path, num_documents=8)

    assert skip is not None
    assert skip.documents.tolist() == [3, 7]


def test_only_the_set_of_documents_shapes_the_digest(tmp_path):
    one = read_skip_list(write(tmp_path, "1\n2\n"), num_documents=9)
    other = read_skip_list(write(tmp_path, "2 # later\n1\n2\n"), num_documents=9)
    third = read_skip_list(write(tmp_path, "1\n3\n"), num_documents=9)

    assert one is not None
    assert other is not None
    assert third is not None
    assert one.digest == other.digest != third.digest


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n"])
def test_a_file_without_ids_is_no_skip_list(tmp_path, text):
    assert read_skip_list(write(tmp_path, text), num_documents=9) is None


def test_tells_which_documents_are_skipped():
    skip = skip_list([9, 2, 5])

    assert skip is not None
    assert skip.skipped(np.array([0, 2, 2, 5, 6, 9, 10])).tolist() == [
        False, True, True, True, False, True, False,
    ]  # fmt: skip
    assert skip.skipped(np.array([], dtype=np.int64)).tolist() == []


def test_travels_to_workers():
    skip = skip_list([9, 2, 5])
    assert skip is not None

    copy = pickle.loads(pickle.dumps(skip))  # noqa: S301

    assert copy.digest == skip.digest
    assert copy.skipped(np.array([2, 3])).tolist() == [True, False]


@pytest.mark.parametrize("entry", ["x", "-1", "1.5", "+3", "1_0", "1 2", "٣", "0x1"])
def test_refuses_what_is_no_id_with_file_and_line(tmp_path, entry):
    path = write(tmp_path, f"0\n{entry}\n")

    with pytest.raises(ValueError, match=r"skip\.txt:2: .* is no document id; write one integer a line"):
        read_skip_list(path, num_documents=99)


def test_refuses_a_document_that_does_not_exist(tmp_path):
    path = write(tmp_path, "3\n4\n")

    with pytest.raises(ValueError, match=r"skip\.txt:2: document 4 does not exist; .* ids 0 to 3"):
        read_skip_list(path, num_documents=4)


def test_refuses_bytes_that_are_no_text_with_file_and_line(tmp_path):
    path = tmp_path / "skip.bin"
    path.write_bytes(b"1\n\xff\xfe\n")

    with pytest.raises(ValueError, match=r"skip\.bin:2: "):
        read_skip_list(path, num_documents=4)


def test_refuses_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"skip='.*absent' is not a file"):
        read_skip_list(tmp_path / "absent", num_documents=4)
