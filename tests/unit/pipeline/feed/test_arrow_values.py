"""Numpy's view of Arrow values: the same memory, never writable, and no pandas before the first batch."""

import importlib.util
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from ringfeed.pipeline.arrow_values import numpy_values

READ = """
import sys
import pyarrow as pa
from ringfeed.pipeline.arrow_values import numpy_values
from ringfeed.pipeline.step_block import column_digests
with pa.ipc.open_file(sys.argv[1]) as file:
    rows = file.get_batch(0)
    assert column_digests(rows) == dict(pair.split("=") for pair in sys.argv[2:])
if "pandas" in sys.modules:
    sys.exit("reading a block imports pandas")
"""


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint64])
def test_values_of_a_slice_lie_in_its_memory_and_are_read_only(dtype):
    array = pa.array(np.arange(9, dtype=dtype))[2:7]

    found = numpy_values(array)

    assert found.dtype == dtype
    assert found.tolist() == [2, 3, 4, 5, 6]
    assert found.ctypes.data == array.buffers()[1].address + 2 * found.itemsize
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_memory_that_is_writable_is_not_so_for_the_reader():
    memory = np.arange(4, dtype=np.int32)
    array = pa.Array.from_buffers(pa.int32(), 4, [None, pa.foreign_buffer(memory.ctypes.data, 16, memory)])

    assert not numpy_values(array).flags.writeable
    assert numpy_values(array).tolist() == [0, 1, 2, 3]


def test_values_outlive_their_array():
    array = pa.array(np.arange(1_000))
    found = numpy_values(array)
    del array

    assert found.tolist() == list(range(1_000))


@pytest.mark.parametrize(
    "array", [pa.array([], pa.int32()), pa.array([1, 2], pa.int32())[2:], pa.nulls(0, pa.int32())]
)
def test_no_values(array):
    assert numpy_values(array).tolist() == []
    assert numpy_values(array).dtype == np.int32


def test_nulls_are_refused():
    with pytest.raises(pa.ArrowInvalid, match="1 of 2 values are null"):
        numpy_values(pa.array([1, None], pa.int32()))


def test_reading_a_block_imports_no_pandas(tmp_path):
    from ringfeed.pipeline.step_block import column_digests

    # Without it there would be nothing to import.
    assert importlib.util.find_spec("pandas")
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), pa.array([5, 6, 7], pa.int32()))
    rows = pa.record_batch({"flat": pa.array([1, 2]), "lists": lists})
    with pa.ipc.new_file(tmp_path / "block", rows.schema) as file:
        file.write(rows)
    digests = [f"{name}={digest}" for name, digest in column_digests(rows).items()]

    command = [sys.executable, "-c", READ, str(tmp_path / "block"), *digests]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert result.returncode == 0, result.stderr
