"""BSHD rows become THD chunks by their lengths, and by nothing else."""

import sys

import numpy as np
import pytest
import torch

from ringfeed.pipeline.bshd import thd_from_bshd
from ringfeed.pipeline.views import cut_chunk
from ringfeed.sharding.layouts import make_layout

TE = make_layout("te")


def batch(**changes):
    """Two rows of 16: sequences of 3 and 5 in slots of 4 and 8; one of 7 in a slot of 8."""
    made = {
        "input_ids": np.arange(100, 132).reshape(2, 16),
        "seq_lens": np.array([[3, 5], [7, -1000]]),
        "seq_lens_padded": np.array([[4, 8], [8, -1000]]),
    }
    return {name: value for name, value in {**made, **changes}.items() if value is not None}


def convert(given, layout=TE, cp_size=2, num_chunks=1):
    return thd_from_bshd(given, layout=layout, cp_size=cp_size, pad_id=9, num_chunks=num_chunks)


def test_rows_keep_slots_that_fit_and_end_in_one_tail_slot():
    (chunk,) = convert(batch())

    assert chunk.cu_seqlens_padded.tolist() == [0, 4, 12, 16, 24, 32]
    assert chunk.cu_seqlens.tolist() == [0, 3, 8, 8, 15, 15]
    assert chunk.tokens[:16].tolist() == [100, 101, 102, 9, 104, 105, 106, 107, 108, *[9] * 7]
    assert chunk.documents.tolist() == [0, 1, 2]
    assert chunk.num_packs == 2


def test_absent_labels_and_positions_are_made_per_sequence():
    (chunk,) = convert(batch())

    assert chunk.labels[:16].tolist() == [101, 102, -100, -100, 105, 106, 107, 108, *[-100] * 8]
    assert chunk.position_ids[:16].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, *[0] * 7]
    assert chunk.padding_mask[:16].tolist() == [False] * 3 + [True] + [False] * 5 + [True] * 7


def test_given_labels_are_taken_as_shifted_and_padding_is_never_supervised():
    labels, positions = np.full((2, 16), 55), np.arange(32).reshape(2, 16)
    (chunk,) = convert(batch(labels=labels, position_ids=positions))

    assert chunk.labels[:16].tolist() == [55] * 3 + [-100] + [55] * 5 + [-100] * 7
    assert chunk.position_ids[:12].tolist() == [0, 1, 2, 0, 4, 5, 6, 7, 8, 0, 0, 0]


def test_slots_that_do_not_fit_the_layout_are_laid_out_again():
    (chunk,) = convert(batch(seq_lens_padded=np.array([[3, 6], [7, 0]])), cp_size=4)

    assert chunk.cu_seqlens_padded.tolist() == [0, 8, 16, 24, 32]
    assert chunk.tokens[8:14].tolist() == [103, 104, 105, 106, 107, 9]


def test_without_padded_lengths_sequences_lie_end_to_end():
    (chunk,) = convert(batch(seq_lens_padded=None))

    assert chunk.cu_seqlens_padded.tolist() == [0, 4, 12, 16, 24, 32]
    assert chunk.tokens[4:9].tolist() == [103, 104, 105, 106, 107]


def test_rows_grow_together_when_padding_needs_more_room():
    given = batch(seq_lens=np.array([[1] * 16, [16] + [0] * 15]), seq_lens_padded=None)
    first, second = convert(given, num_chunks=2)

    assert len(first.tokens) == len(second.tokens) == 64
    assert second.cu_seqlens_padded.tolist() == [0, 16, 64]


def test_a_row_without_a_sequence_is_all_padding():
    first, second = convert(batch(seq_lens=np.array([[3, 5], [0, 0]]), seq_lens_padded=None), num_chunks=2)

    assert (second.cu_seqlens.tolist(), second.cu_seqlens_padded.tolist()) == ([0, 0], [0, 16])
    assert set(second.tokens.tolist()) == {9}
    assert (len(first.documents), len(second.documents)) == (2, 0)


def test_chunks_come_in_row_order_with_running_document_ids():
    first, second = convert(batch(), num_chunks=2)

    assert first.documents.tolist() == [0, 1]
    assert second.documents.tolist() == [2]
    assert second.tokens[:7].tolist() == list(range(116, 123))


def test_token_values_say_nothing_about_padding():
    ids = np.full((2, 16), 9)
    (chunk,) = convert(batch(input_ids=ids))

    assert int((~chunk.padding_mask).sum()) == 15
    assert int((chunk.labels != -100).sum()) == 12


def test_token_aligned_columns_are_carried_and_others_left_out():
    weights = np.linspace(0, 1, 32, dtype=np.float32).reshape(2, 16)
    given = batch(weights=weights, qkv_format="thd", attention_mask=np.ones((2, 1, 16, 16)))
    (chunk,) = convert(given)

    assert list(chunk.extras) == ["weights"]
    assert chunk.extras["weights"][4:9].tolist() == weights[0, 4:9].tolist()
    views = cut_chunk(chunk, layout=TE, cp_size=2)
    assert views[0].tensors["weights"].dtype == np.float32


def test_tensors_are_taken_and_left_untouched():
    given = {name: torch.from_numpy(value.copy()) for name, value in batch().items()}
    before = {name: value.clone() for name, value in given.items()}

    (chunk,) = convert(given)
    chunk.tokens[:] = 0

    assert all(torch.equal(given[name], before[name]) for name in before)
    assert chunk.cu_seqlens.tolist() == convert(batch())[0].cu_seqlens.tolist()


def test_the_batch_is_not_changed():
    given = batch(labels=np.zeros((2, 16), dtype=np.int64))
    before = {name: value.copy() for name, value in given.items()}
    (chunk,) = convert(given, cp_size=1)
    for array in (chunk.tokens, chunk.labels, chunk.position_ids):
        array[:] = 1

    assert all((given[name] == before[name]).all() for name in before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": None}, "no seq_lens .*never from token values"),
        ({"input_ids": None}, "no input_ids"),
        (
            {"seq_lens": np.array([[3, 9], [7, 0]])},
            r"row 0: seq_lens_padded\[1\]=8 does not fit seq_lens\[1\]=9",
        ),
        ({"seq_lens": np.array([[3, 5], [0, 0]])}, r"row 1: seq_lens_padded\[0\]=8 does not fit"),
        (
            {"seq_lens_padded": np.array([[4, 8], [20, 0]])},
            "row 1: seq_lens_padded sums to 20, input_ids has 16",
        ),
        ({"seq_lens": np.array([[3, 5]])}, "seq_lens has 1 rows, input_ids 2"),
        ({"seq_lens_padded": np.array([[4], [8]])}, "row 0: seq_lens has 2 entries, seq_lens_padded 1"),
        ({"seq_lens": np.array([[3.0, 5.0], [7.0, 0.0]])}, "seq_lens must be integers"),
        ({"labels": np.zeros((2, 15), dtype=np.int64)}, r"labels has shape \[2, 15\], input_ids \[2, 16\]"),
        ({"input_ids": np.full((2, 16), 2**31)}, "input_ids holds 2147483648"),
    ],
)
def test_lengths_that_do_not_fit_together_are_refused_by_row_and_field(changes, message):
    with pytest.raises(ValueError, match=message):
        convert(batch(**changes))


def test_num_chunks_divides_the_rows():
    with pytest.raises(ValueError, match=r"num_chunks=3 does not divide the 2 rows; use one of \[1, 2\]"):
        convert(batch(), num_chunks=3)


def test_the_layout_may_need_more_than_the_row_has():
    (chunk, _) = convert(batch(), layout=make_layout("head_tail"), cp_size=3, num_chunks=2)

    assert len(chunk.tokens) == 18


def test_conversion_does_not_import_torch():
    import subprocess

    code = "import sys, ringfeed.pipeline.bshd, ringfeed.pipeline.plan_source, ringfeed.pipeline.store; "
    run = subprocess.run(
        [sys.executable, "-c", code + "assert 'torch' not in sys.modules and 'ray' not in sys.modules"],
        check=False,
    )
    assert run.returncode == 0
