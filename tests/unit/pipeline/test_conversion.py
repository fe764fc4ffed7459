"""One batch converted in one process: what is taken, what is refused, and that nothing is shared."""

import numpy as np
import pytest
import torch

from ringfeed.pipeline.conversion import (
    ConvertOptions,
    batch_bytes,
    convert_batch,
    numpy_batch,
    own_views,
)
from ringfeed.sharding.layouts import make_layout


def options(layout="te", **changes):
    return ConvertOptions(**{"layout": make_layout(layout), "cp_size": 2, "pad_id": 9, **changes})


def rows(num_rows=4, width=16):
    ids = np.arange(num_rows * width).reshape(num_rows, width)
    return {"input_ids": ids, "seq_lens": np.full((num_rows, 1), width)}


def test_rows_are_split_into_chunks_in_order():
    chunks = convert_batch(rows(), options(num_chunks=2))

    assert [len(views) for views in chunks] == [2, 2]
    assert chunks[1][0].input_ids.tolist() == [*range(32, 36), *range(44, 48), *range(48, 52), *range(60, 64)]
    assert chunks[1][1].cu_seqlens_padded.tolist() == [0, 16, 32]


def test_a_layout_that_takes_one_pack_says_how_many_chunks_would_do():
    with pytest.raises(ValueError, match=r"num_chunks=2 puts 2 rows into one; use num_chunks=4"):
        convert_batch(rows(), options("magi", num_chunks=2))

    assert len(convert_batch(rows(), options("head_tail", num_chunks=4))) == 4


def test_chunks_that_do_not_divide_the_rows_are_refused():
    with pytest.raises(ValueError, match=r"num_chunks=3 does not divide the 4 rows; use one of \[1, 2, 4\]"):
        convert_batch(rows(), options(num_chunks=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_size": 0}, "cp_size must be at least 1"),
        ({"num_chunks": 0}, "num_chunks=0 must be at least 1"),
        ({"pad_id": -1}, "pad_id=-1 must be 0"),
    ],
)
def test_options_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_tensors_lists_and_rows_of_a_data_set_become_arrays():
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    ragged = np.empty(2, dtype=object)
    ragged[:] = [np.array([1, 3]), np.array([4])]

    for given in (
        {"input_ids": torch.tensor(ids), "seq_lens": torch.tensor([[1, 3], [4, -1000]])},
        {"input_ids": ids, "seq_lens": [[1, 3], [4]]},
        {"input_ids": np.array(ids), "seq_lens": ragged},
        {"input_ids": [np.array(row) for row in ids], "seq_lens": [np.array([1, 3]), np.array([4])]},
    ):
        arrays = numpy_batch(given)
        assert arrays["input_ids"].tolist() == ids
        assert np.where(arrays["seq_lens"] < 0, 0, arrays["seq_lens"]).tolist() == [[1, 3], [4, 0]]
        assert all(type(array) is np.ndarray for array in arrays.values())


def test_only_what_is_converted_goes_along():
    given = rows() | {
        "weights": np.ones((4, 16), np.float32),
        "padding_mask": np.zeros((4, 16), bool),
        "attention_mask": np.ones((4, 1, 16, 16)),
        "names": ["a", "b", "c", "d"],
        "labels": None,
    }

    assert sorted(numpy_batch(given)) == ["input_ids", "seq_lens", "weights"]


def test_what_cannot_become_an_array_is_named():
    with pytest.raises(ValueError, match="weights cannot become one array"):
        numpy_batch(rows() | {"weights": torch.ones((4, 16), dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="input_ids cannot become one array"):
        numpy_batch({"input_ids": [[1, 2], [3]], "seq_lens": [[2], [1]]})
    with pytest.raises(ValueError, match="a batch is a dict of tensors or arrays"):
        numpy_batch([1, 2])
    with pytest.raises(ValueError, match="the batch has no input_ids"):
        numpy_batch({"tokens": np.ones((2, 2))})


def test_positions_of_one_row_are_those_of_every_row():
    given = rows(2) | {"position_ids": np.arange(100, 116)[None]}
    ((view,),) = convert_batch(given, options(cp_size=1))

    assert view.position_ids.tolist() == [*range(100, 116)] * 2


def test_owned_views_share_nothing_and_can_be_written():
    chunks = convert_batch(rows() | {"weights": np.ones((4, 16))}, options())
    first, second = own_views(chunks)[0]
    for name, array in first.tensors.items():
        assert array.flags.writeable
        for other in (chunks[0][0], chunks[0][1], second):
            assert not np.shares_memory(array, other.tensors[name])


def test_bytes_count_what_comes_and_what_goes():
    arrays = numpy_batch(rows())
    given = arrays["input_ids"].nbytes + arrays["seq_lens"].nbytes

    assert batch_bytes(arrays, options()) == given + 13 * 64
    assert batch_bytes(arrays, options("identity")) == given + 2 * 13 * 64


def test_slots_that_are_added_to_every_row_count():
    arrays = numpy_batch(rows())
    more = batch_bytes(arrays, options(num_chunks=None, pack_slots=1000)) - batch_bytes(arrays, options())

    assert more == 13 * 4 * (1000 - 16)
    views = convert_batch(arrays, options(num_chunks=None, pack_slots=1000))
    made = sum(array.nbytes for chunk in views for view in chunk for array in view.tensors.values())
    assert made <= batch_bytes(arrays, options(num_chunks=None, pack_slots=1000))
    assert batch_bytes(arrays, options(pack_slots=8)) == batch_bytes(arrays, options())
