"""Cutting one chunk for all ranks: what comes out, what is refused, what stays untouched."""

from typing import Any

import numpy as np
import pytest
import torch

from ringfeed.pipeline.thd import ThdChunk
from ringfeed.pipeline.views import concat_views, cut_all, cut_chunk
from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.layouts import make_layout

OFFSETS = [0, 8, 24, 32]


def columns(num_tokens=32):
    ids = np.arange(num_tokens, dtype=np.int32)
    return {"input_ids": ids, "labels": (ids + 1).astype(np.int64), "kind": (ids % 3).astype(np.uint8)}


def chunk(num_packs=1):
    ids = np.arange(32, dtype=np.int32)
    labels = np.where(ids % 4 == 3, -100, ids + 1).astype(np.int32)
    return ThdChunk(
        tokens=ids,
        labels=labels,
        position_ids=ids % 8,
        padding_mask=ids % 4 == 3,
        cu_seqlens=np.array([0, 6, 18, 24], dtype=np.int32),
        cu_seqlens_padded=np.array(OFFSETS, dtype=np.int32),
        documents=np.array([4, 5, 6]),
        num_packs=num_packs,
        extras={"weight": ids.astype(np.float32) / 2},
    )


def test_te_ranks_get_both_ends_of_every_slot():
    first, second = cut_all(columns(), OFFSETS, layout=make_layout("te"), cp_size=2)

    assert first["input_ids"].tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23, 24, 25, 30, 31]
    assert second["labels"].tolist() == [3, 4, 5, 6, 13, 14, 15, 16, 17, 18, 19, 20, 27, 28, 29, 30]


@pytest.mark.parametrize("layout", ["te", "head_tail", "contiguous", "whole_document", "identity"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_column_is_what_the_index_map_takes(layout, cp_size):
    chosen = make_layout(layout)
    maps = chosen.index_maps(OFFSETS, cp_size=cp_size)

    parts = cut_all(columns(), OFFSETS, layout=chosen, cp_size=cp_size)

    for part, index_map in zip(parts, maps, strict=True):
        for name, column in columns().items():
            assert part[name].dtype == column.dtype
            assert part[name].tolist() == index_map.take(column).tolist()


def test_runs_out_of_chunk_order_are_cut_right():
    class Backwards:
        """Every rank holds two runs, the later one first."""

        def index_maps(self, cu_seqlens_padded, *, cp_size, **_options):
            return [
                IndexMap(np.array([[16 + 8 * r, 8], [8 * r, 8]], dtype=np.int64), int(cu_seqlens_padded[-1]))
                for r in range(cp_size)
            ]

    backwards: Any = Backwards()
    first, second = cut_all(columns(), OFFSETS, layout=backwards, cp_size=2)

    assert first["input_ids"].tolist() == [*range(16, 24), *range(8)]
    assert second["kind"].tolist() == [n % 3 for n in [*range(24, 32), *range(8, 16)]]


def test_a_layout_may_be_named():
    by_name = cut_all(columns(), OFFSETS, layout="contiguous", cp_size=2)

    assert by_name[1]["input_ids"].tolist() == list(range(16, 32))


def test_strided_columns_lists_and_tensors_are_taken():
    wide = np.arange(64).reshape(32, 2)

    parts = cut_all(
        {"strided": wide[:, 1], "list": list(range(32)), "tensor": torch.arange(32)},
        torch.tensor(OFFSETS),
        layout="contiguous",
        cp_size=2,
    )

    assert parts[0]["strided"].tolist() == list(range(1, 33, 2))
    assert parts[1]["list"].tolist() == parts[1]["tensor"].tolist() == list(range(16, 32))


def test_out_is_filled_again_and_returned():
    parts = cut_all(columns(), OFFSETS, layout="te", cp_size=2)
    buffers = [dict(part) for part in parts]
    other = {name: column + 1 for name, column in columns().items()}

    again = cut_all(other, OFFSETS, layout="te", cp_size=2, out=parts)

    assert again is parts
    for part, buffer, fresh in zip(
        again, buffers, cut_all(other, OFFSETS, layout="te", cp_size=2), strict=True
    ):
        for name in other:
            assert part[name] is buffer[name]
            assert part[name].tolist() == fresh[name].tolist()


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("layout", ["te", "identity"])
def test_output_shares_no_memory_with_the_input(layout, cp_size):
    given = columns()
    parts = cut_all(given, OFFSETS, layout=layout, cp_size=cp_size)
    for part in parts:
        for values in part.values():
            values[:] = 77

    assert all((given[name] == column).all() for name, column in columns().items())
    assert not np.shares_memory(parts[0]["input_ids"], parts[-1]["input_ids"]) or cp_size == 1


def _broken_out(kind):
    out = cut_all(columns(), OFFSETS, layout="te", cp_size=2)
    if kind == "ranks":
        return out[:1]
    changed: dict[str, np.ndarray] = {
        "shape": np.empty(15, dtype=np.int64),
        "dtype": np.empty(16, dtype=np.int32),
        "stride": np.empty(32, dtype=np.int64)[::2],
    }
    if kind == "name":
        del out[1]["labels"]
    elif kind == "readonly":
        out[1]["labels"].flags.writeable = False
    else:
        out[1]["labels"] = changed[kind]
    return out


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ranks", r"out has 1 ranks, cp_size=2"),
        ("name", r"out\[1\] has columns \['input_ids', 'kind'\]"),
        ("shape", r"out\[1\]\['labels'\] is int64 \[15\], need int64 \[16\]"),
        ("dtype", r"out\[1\]\['labels'\] is int32 \[16\], need int64"),
        ("stride", r"out\[1\]\['labels'\] must be contiguous and writeable"),
        ("readonly", r"out\[1\]\['labels'\] must be contiguous and writeable"),
    ],
)
def test_out_that_does_not_fit_is_refused_by_name(kind, message):
    with pytest.raises(ValueError, match=message):
        cut_all(columns(), OFFSETS, layout="te", cp_size=2, out=_broken_out(kind))


def test_out_inside_an_input_is_refused_and_the_input_kept():
    given = {"labels": np.arange(32)}
    out = [{"labels": given["labels"][:16]}, {"labels": np.empty(16, dtype=np.int64)}]

    with pytest.raises(ValueError, match=r"out\[0\]\['labels'\] shares memory with a column"):
        cut_all(given, OFFSETS, layout="te", cp_size=2, out=out)
    assert given["labels"].tolist() == list(range(32))


def test_out_inside_a_strided_input_is_refused():
    base = np.arange(64)
    out = [{"labels": base[:16]}, {"labels": np.empty(16, dtype=np.int64)}]

    with pytest.raises(ValueError, match="shares memory"):
        cut_all({"labels": base[::2]}, OFFSETS, layout="te", cp_size=2, out=out)


def test_a_chunk_that_magi_pads_is_told_with_the_ways_out():
    column = np.arange(1000)
    message = (
        r"columns\['x'\] has 1000 rows, but layout 'magi' at cp_size=2 pads this chunk to 1008; append 8 "
        r"rows of padding to each column, or make the chunk a multiple of 1024 \(layout.chunk_multiple\)"
    )
    layout = make_layout("magi", chunk_size=512)
    with pytest.raises(ValueError, match=message):
        cut_all({"x": column}, [0, 300, 1000], layout=layout, cp_size=2)
    assert layout.chunk_multiple(cp_size=2) == 1024

    parts = cut_all({"x": np.pad(column, (0, 8))}, [0, 300, 1000], layout=layout, cp_size=2)

    assert sorted(np.concatenate([part["x"] for part in parts])) == sorted([*[0] * 8, *range(1000)])


def test_what_is_no_layout_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"unknown layout \['te'\]; known: contiguous, head_tail"):
        cut_all({"x": np.zeros(8, dtype=np.int32)}, [0, 8], layout=["te"], cp_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(31, dtype=np.int32), r"columns\['x'\] has shape \[31\], the offsets say \[32\]"),
        (np.zeros((32, 1), dtype=np.int32), r"columns\['x'\] has shape \[32, 1\]"),
        (np.zeros(32), r"columns\['x'\] must hold integers, got float64"),
    ],
)
def test_a_column_that_does_not_fit_is_refused_by_name(bad, message):
    with pytest.raises(ValueError, match=message):
        cut_all({**columns(), "x": bad}, OFFSETS, layout="te", cp_size=2)


def test_a_slot_that_breaks_the_multiple_is_named():
    with pytest.raises(ValueError, match="slot 1 has 15 tokens"):
        cut_all(columns(), [0, 8, 23, 32], layout="te", cp_size=2)


def test_chunk_views_carry_offsets_counts_and_extras():
    views = cut_chunk(chunk(), layout=make_layout("te"), cp_size=2)

    assert [view.local_supervised for view in views] == [12, 12]
    for view in views:
        assert view.cu_seqlens.tolist() == [0, 6, 18, 24]
        assert view.documents.tolist() == [4, 5, 6]
        assert view.tensors["weight"].tolist() == (view.input_ids / 2).tolist()
        assert (view.padding_mask == (view.labels == -100)).all()
        assert list(view.tensors)[:4] == ["input_ids", "labels", "position_ids", "padding_mask"]


def test_several_packs_in_a_chunk_need_a_layout_that_holds_them():
    assert len(cut_chunk(chunk(num_packs=2), layout=make_layout("te"), cp_size=2)) == 2
    with pytest.raises(ValueError, match="'head_tail' takes one pack per chunk, got 2"):
        cut_chunk(chunk(num_packs=2), layout=make_layout("head_tail"), cp_size=2)


def test_views_end_to_end_shift_their_offsets():
    view = cut_chunk(chunk(), layout=make_layout("te"), cp_size=2)[0]

    both = concat_views([view, view])

    assert both.cu_seqlens.tolist() == [0, 6, 18, 24, 30, 42, 48]
    assert both.cu_seqlens_padded.tolist() == [0, 8, 24, 32, 40, 56, 64]
    assert both.input_ids.tolist() == view.input_ids.tolist() * 2
    assert both.documents.tolist() == [4, 5, 6, 4, 5, 6]
    assert both.local_supervised == 2 * view.local_supervised
