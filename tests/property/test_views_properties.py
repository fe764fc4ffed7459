"""What must hold for every cut and every conversion, whatever the lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.bshd import thd_from_bshd
from ringfeed.pipeline.views import cut_all, cut_chunk
from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import make_layout

LAYOUTS = ["te", "head_tail", "contiguous", "whole_document", "identity"]
PAD = 3

cp_sizes = st.sampled_from([1, 2, 3, 4, 8])
rows_of_lengths = st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=1, max_size=4)
dtypes = st.sampled_from([np.int8, np.uint16, np.int32, np.int64, np.bool_])


@st.composite
def chunks(draw):
    """Offsets that fit every layout at some cp size, and columns of mixed dtypes."""
    cp_size = draw(cp_sizes)
    slots = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any))
    offsets = np.cumsum([0, *(slot * 2 * cp_size for slot in slots)])
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    columns = {
        f"column{i}": rng.integers(0, 2, offsets[-1]).astype(dtype)
        for i, dtype in enumerate(draw(st.lists(dtypes, max_size=4)))
    }
    return cp_size, offsets, columns


@pytest.mark.parametrize("name", LAYOUTS)
@given(chunk=chunks())
@settings(max_examples=40)
def test_cutting_then_merging_gives_every_column_back(name, chunk):
    cp_size, offsets, columns = chunk
    layout = make_layout(name)
    before = {column: values.copy() for column, values in columns.items()}

    parts = cut_all(columns, offsets, layout=layout, cp_size=cp_size)

    maps = layout.index_maps(offsets, cp_size=cp_size)
    for column, values in columns.items():
        merged = merge(maps, [part[column] for part in parts])
        assert merged.dtype == values.dtype
        assert merged.tobytes() == before[column].tobytes() == values.tobytes()


@given(rows=rows_of_lengths, pads=st.integers(0, 5), cp_size=cp_sizes, data=st.data())
@settings(max_examples=60)
def test_bshd_conversion_equals_a_loop_over_sequences(rows, pads, cp_size, data):
    slots = [[n + data.draw(st.integers(0, pads)) for n in row] for row in rows]
    batch = bshd_batch(rows, slots)
    chunks = thd_from_bshd(batch, layout=make_layout("te"), cp_size=cp_size, pad_id=PAD, num_chunks=len(rows))

    for row, chunk in enumerate(chunks):
        assert sequences_of(chunk) == expected_sequences(batch, row, rows[row], slots[row])
        assert (chunk.tokens[chunk.padding_mask] == PAD).all()
        assert (chunk.labels[chunk.padding_mask] == -100).all()
        assert (np.diff(chunk.cu_seqlens_padded) % (2 * cp_size if cp_size > 1 else 1) == 0).all()
    assert len({len(chunk.tokens) for chunk in chunks}) == 1


@pytest.mark.parametrize("name", LAYOUTS)
@given(rows=rows_of_lengths, cp_size=st.sampled_from([1, 2, 4]))
@settings(max_examples=25)
def test_all_ranks_together_hold_the_converted_row(name, rows, cp_size):
    layout = make_layout(name)
    batch = bshd_batch(rows, rows)
    for chunk in thd_from_bshd(batch, layout=layout, cp_size=cp_size, pad_id=PAD, num_chunks=len(rows)):
        views = cut_chunk(chunk, layout=layout, cp_size=cp_size)
        maps = layout.index_maps(chunk.cu_seqlens_padded, cp_size=cp_size, cu_seqlens=chunk.cu_seqlens)

        whole = {"input_ids": chunk.tokens, "labels": chunk.labels, "padding_mask": chunk.padding_mask}
        for column, values in whole.items():
            assert merge(maps, [view.tensors[column] for view in views]).tolist() == values.tolist()
        replicas = cp_size if name == "identity" else 1
        assert sum(view.local_supervised for view in views) == replicas * int((chunk.labels != -100).sum())


def bshd_batch(rows, slots):
    """Rows of random tokens, some equal to the pad id, wide enough for every row's slots."""
    width = max(1, *(sum(row) for row in slots))
    most = max(1, *(len(row) for row in rows))
    rng = np.random.default_rng(len(rows) + width)
    return {
        "input_ids": rng.integers(0, 6, (len(rows), width)),
        "seq_lens": np.array([row + [0] * (most - len(row)) for row in rows]),
        "seq_lens_padded": np.array([row + [-1000] * (most - len(row)) for row in slots]),
    }


def expected_sequences(batch, row, lengths, slots):
    start, found = 0, []
    for length, slot in zip(lengths, slots, strict=True):
        ids = batch["input_ids"][row, start : start + length].tolist()
        found.append((ids, [*ids[1:], -100], list(range(length))))
        start += slot
    return found


def sequences_of(chunk):
    lengths = np.diff(chunk.cu_seqlens)
    found = []
    for start, length in zip(chunk.cu_seqlens_padded[:-1].tolist(), lengths.tolist(), strict=True):
        part = slice(start, start + length)
        if length:
            found.append([array[part].tolist() for array in (chunk.tokens, chunk.labels, chunk.position_ids)])
    return [tuple(sequence) for sequence in found]
