"""What conversion must give for every batch: nemo-automodel's stream, and what a loop over rows finds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.conversion import ConvertOptions, convert_batch, numpy_batch
from ringfeed.sharding.automodel import make_cp_batch_for_te, process_input_for_thd
from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import make_layout

PAD = 3
LAYOUTS = ["te", "head_tail", "contiguous", "whole_document", "identity", "ptrr", "magi"]


@st.composite
def full_rows(draw):
    """Rows of slots that fit te at some cp size and fill the rows, as NeMo packs them."""
    cp_size = draw(st.sampled_from([1, 2, 4]))
    unit = 2 * cp_size
    num_rows = draw(st.sampled_from([1, 2, 4]))
    total = draw(st.integers(1, 8))
    rows = []
    for _ in range(num_rows):
        slots, left = [], total
        while left:
            slots.append(draw(st.integers(1, left)))
            left -= slots[-1]
        rows.append([slot * unit for slot in slots])
    lengths = [[slot - draw(st.integers(0, unit - 1)) for slot in row] for row in rows]
    num_chunks = draw(st.sampled_from([n for n in (1, 2, 4) if num_rows % n == 0]))
    return cp_size, num_chunks, torch_batch(lengths, rows, seed=draw(st.integers(0, 9)))


def torch_batch(lengths, slots, *, seed):
    """A batch whose padding is filled as a collator does, with given labels and a further column."""
    rng = np.random.default_rng(seed)
    width, most = sum(slots[0]), max(map(len, slots))
    shape = (len(slots), width)
    batch = {
        "input_ids": rng.integers(0, 50, shape),
        "labels": rng.integers(0, 50, shape),
        "position_ids": rng.integers(0, 99, shape),
        "token_types": rng.integers(0, 5, shape),
        "seq_lens": np.full((len(slots), most), -1000),
        "seq_lens_padded": np.full((len(slots), most), -1000),
    }
    for row, (real, held) in enumerate(zip(lengths, slots, strict=True)):
        batch["seq_lens"][row, : len(real)] = real
        batch["seq_lens_padded"][row, : len(held)] = held
        is_real = np.concatenate([np.arange(slot) < n for n, slot in zip(real, held, strict=True)])
        for name, fill in {"input_ids": PAD, "labels": -100, "position_ids": 0, "token_types": 0}.items():
            batch[name][row, ~is_real] = fill
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def convert(batch, *, layout="te", cp_size, num_chunks):
    options = ConvertOptions(layout=make_layout(layout), cp_size=cp_size, pad_id=PAD, num_chunks=num_chunks)
    return convert_batch(numpy_batch(batch), options)


@given(full_rows())
@settings(max_examples=40)
def test_every_rank_gets_the_tokens_of_nemo_automodel(case):
    cp_size, num_chunks, batch = case
    before = {name: tensor.clone() for name, tensor in batch.items()}
    chunks = convert(batch, cp_size=cp_size, num_chunks=num_chunks)

    for rank in range(cp_size):
        mesh = SimpleNamespace(size=lambda: cp_size, get_local_rank=lambda rank=rank: rank)
        theirs = make_cp_batch_for_te(mesh, dict(batch), padding_token_id=PAD, num_chunks=num_chunks)
        for name in ("input_ids", "labels", "position_ids", "padding_mask", "token_types"):
            expected = theirs[name].reshape(num_chunks, -1)
            for chunk, views in enumerate(chunks):
                assert views[rank].tensors[name].tolist() == expected[chunk].tolist(), (name, rank, chunk)
    assert all(torch.equal(batch[name], before[name]) for name in before)


@given(full_rows())
@settings(max_examples=25)
def test_slots_are_those_of_nemo_automodel(case):
    cp_size, _, batch = case
    ((view, *_),) = convert(batch, cp_size=cp_size, num_chunks=1)
    theirs = process_input_for_thd(dict(batch), padding_token_id=PAD)

    padded = theirs.get("cu_seqlens_padded", theirs["cu_seqlens"])
    assert view.cu_seqlens_padded.tolist() == padded.tolist()
    assert np.diff(view.cu_seqlens).tolist() == batch["seq_lens"][batch["seq_lens"] > 0].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=full_rows(), given_labels=st.booleans())
@settings(max_examples=15)
def test_ranks_together_hold_each_sequence_as_a_loop_finds_it(layout, case, given_labels):
    cp_size, _, batch = case
    if not given_labels:
        batch = {name: tensor for name, tensor in batch.items() if name not in ("labels", "position_ids")}
    chosen = make_layout(layout)
    chunks = convert(batch, layout=layout, cp_size=cp_size, num_chunks=len(batch["input_ids"]))

    for row, views in enumerate(chunks):
        maps = chosen.index_maps(views[0].cu_seqlens_padded, cp_size=cp_size, cu_seqlens=views[0].cu_seqlens)
        names = ("input_ids", "labels", "position_ids")
        whole = {name: merge(maps, [view.tensors[name] for view in views]) for name in names}
        starts = views[0].cu_seqlens_padded.tolist()
        for start, sequence in zip(starts, sequences(batch, row), strict=False):
            for name, values in sequence.items():
                assert whole[name][start : start + len(values)].tolist() == values
        mask = merge(maps, [view.padding_mask for view in views])
        assert (whole["labels"][mask] == -100).all()
        assert int((~mask).sum()) == sum(len(sequence["input_ids"]) for sequence in sequences(batch, row))


def sequences(batch, row):
    """What each sequence of a row has, by a loop that knows nothing of slots and layouts."""
    found, start = [], 0
    pairs = zip(batch["seq_lens"][row].tolist(), batch["seq_lens_padded"][row].tolist(), strict=True)
    for length, slot in pairs:
        if length <= 0:
            continue
        part = slice(start, start + length)
        ids = batch["input_ids"][row, part].tolist()
        labels = batch["labels"][row, part].tolist() if "labels" in batch else [*ids[1:], -100]
        positions = list(range(length))
        if "position_ids" in batch:
            positions = batch["position_ids"][row, part].tolist()
        found.append({"input_ids": ids, "labels": labels, "position_ids": positions})
        start += slot
    return found
