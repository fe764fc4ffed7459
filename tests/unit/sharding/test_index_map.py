import pickle

import numpy as np
import pytest
import torch

from ringfeed.sharding.index_map import IndexMap, expand_runs, merge

# Short runs are gathered and long ones copied, so that both ways are tested.
WIDTHS = pytest.mark.parametrize("width", [1, 3, 3000], ids=["gathered", "gathered-3", "copied"])


def two_ranks(width):
    """Ranks 0 and 1 of a chunk of 4 * width tokens: pieces 0 and 3, and pieces 1 and 2."""
    outer = IndexMap(np.array([[0, width], [3 * width, width]]), 4 * width)
    inner = IndexMap(np.array([[width, width], [2 * width, width]]), 4 * width)
    return outer, inner


def test_runs_are_merged_and_empty_ones_dropped():
    index_map = IndexMap(np.array([[0, 2], [2, 0], [2, 3], [9, 1], [7, 0], [6, 1]]), 10)

    assert index_map.runs.tolist() == [[0, 5], [9, 1], [6, 1]]
    assert index_map.runs.dtype == np.int64
    assert len(index_map) == 7


def test_runs_cannot_be_changed():
    raw = np.array([[0, 2]])
    index_map = IndexMap(raw, 4)

    raw[0] = 3
    with pytest.raises(ValueError, match="read-only"):
        index_map.runs[0] = 3
    assert index_map.runs.tolist() == [[0, 2]]


def test_positions_and_inverse_undo_each_other():
    index_map = IndexMap(np.array([[6, 2], [1, 3]]), 9)

    assert index_map.positions.tolist() == [6, 7, 1, 2, 3]
    assert index_map.positions.dtype == torch.int64
    assert index_map.inverse.tolist() == [-1, 2, 3, 4, -1, -1, 0, 1, -1]


def test_index_map_of_nothing_is_empty():
    index_map = IndexMap(np.empty((0, 2), dtype=np.int64), 5)

    assert len(index_map) == 0
    assert index_map.positions.tolist() == []
    assert index_map.take(np.zeros((5, 2))).shape == (0, 2)
    assert index_map.take(torch.zeros(5, 2)).shape == (0, 2)


def test_index_map_survives_pickling():
    index_map = pickle.loads(pickle.dumps(two_ranks(3)[0]))  # noqa: S301

    assert index_map.runs.tolist() == [[0, 3], [9, 3]]
    assert len(index_map) == 6


@pytest.mark.parametrize("run", [[3, 2], [-1, 2], [0, -1], [5, 0]])
def test_run_outside_the_chunk_is_refused_by_row(run):
    with pytest.raises(ValueError, match=rf"run 1 \(start {run[0]}, length {run[1]}\).*4-token chunk"):
        IndexMap(np.array([[0, 1], run]), 4)


def test_runs_must_be_rows_of_two():
    with pytest.raises(ValueError, match=r"must be \[K, 2\].*got shape \[3\]"):
        IndexMap(np.array([0, 1, 2]), 4)


@WIDTHS
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_take_picks_rows_of_any_dim(kind, dim, width):
    sizes = [2, 2, 2]
    sizes[dim] = 4 * width
    chunk = np.arange(np.prod(sizes)).reshape(sizes)
    outer, _ = two_ranks(width)

    part = outer.take(chunk if kind == "numpy" else torch.from_numpy(chunk), dim=dim)

    assert isinstance(part, np.ndarray if kind == "numpy" else torch.Tensor)
    assert np.array_equal(np.asarray(part), np.take(chunk, outer.positions.numpy(), axis=dim))


@WIDTHS
def test_take_reads_non_contiguous_input(width):
    wide = np.arange(16 * width).reshape(2, 8 * width)
    view = wide[:, ::2].T
    outer, _ = two_ranks(width)
    expected = view[outer.positions.numpy()]

    assert np.array_equal(outer.take(view), expected)
    assert np.array_equal(outer.take(torch.from_numpy(wide)[:, ::2].T).numpy(), expected)


@WIDTHS
@pytest.mark.parametrize("runs_of", [lambda width: [[0, 4 * width]], lambda width: [[width, width]]])
def test_taken_rows_are_a_copy(runs_of, width):
    index_map = IndexMap(np.array(runs_of(width)), 4 * width)
    array, tensor = np.zeros(4 * width), torch.zeros(4 * width)

    index_map.take(array)[:] = 1
    index_map.take(tensor)[:] = 1

    assert not array.any()
    assert not tensor.any()


@WIDTHS
def test_gradient_flows_back_to_the_taken_rows(width):
    outer, _ = two_ranks(width)
    chunk = torch.zeros(4 * width, requires_grad=True)

    outer.take(chunk).sum().backward()

    assert chunk.grad is not None
    assert chunk.grad.tolist() == [1.0] * width + [0.0] * 2 * width + [1.0] * width


def test_take_keeps_dtype_and_reads_lists_and_read_only_arrays():
    outer, _ = two_ranks(1)
    frozen = np.array([5, 6, 7, 8], dtype=np.uint16)
    frozen.flags.writeable = False

    assert outer.take(frozen).dtype == np.uint16
    assert outer.take([5, 6, 7, 8]).tolist() == [5, 8]


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [
        ((5,), 0, "index map covers 4 tokens, but x has 5 rows in dim 0"),
        ((4, 3), 1, "index map covers 4 tokens, but x has 3 rows in dim 1"),
        ((4,), 1, "x has 1 dimensions, so no dim 1"),
        ((4,), -2, "x has 1 dimensions, so no dim -2"),
    ],
)
def test_take_refuses_what_does_not_fit(shape, dim, message):
    outer, _ = two_ranks(1)

    with pytest.raises(ValueError, match=message):
        outer.take(np.zeros(shape), dim=dim)
    with pytest.raises(ValueError, match=message):
        outer.take(torch.zeros(shape), dim=dim)


@WIDTHS
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_merge_puts_rows_back(dim, width):
    sizes = [3, 3]
    sizes[dim] = 4 * width
    chunk = np.arange(12 * width).reshape(sizes)
    maps = two_ranks(width)

    assert np.array_equal(merge(maps, [m.take(chunk, dim=dim) for m in maps], dim=dim), chunk)
    tensor = torch.from_numpy(chunk)
    assert torch.equal(merge(maps, [m.take(tensor, dim=dim) for m in maps], dim=dim), tensor)


def test_merge_takes_ranks_in_any_order():
    outer, inner = two_ranks(1)

    assert merge([inner, outer], [np.array([1, 2]), np.array([0, 3])]).tolist() == [0, 1, 2, 3]


def test_gradient_flows_back_through_merge():
    outer, inner = two_ranks(1)
    parts = [torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)]

    (merge([outer, inner], parts) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()

    assert [part.grad.tolist() for part in parts if part.grad is not None] == [[1.0, 4.0], [2.0, 3.0]]


def test_replicas_merge_to_one_copy():
    everything = IndexMap(np.array([[0, 3]]), 3)
    parts = [np.array([1, 2, 3]), np.array([1, 2, 3])]

    merged = merge([everything, everything], parts)
    merged[:] = 0

    assert merged.shape == (3,)
    assert parts[0].tolist() == [1, 2, 3]


def test_merge_names_the_first_token_that_is_held_twice():
    twice = IndexMap(np.array([[0, 2]]), 4)

    with pytest.raises(ValueError, match="do not tile the 4-token chunk: token 0 is held 2 times"):
        merge([twice, twice], [np.zeros(2), np.zeros(2)])


def test_a_replica_beside_a_share_does_not_tile():
    everything, half = IndexMap(np.array([[0, 4]]), 4), IndexMap(np.array([[2, 2]]), 4)

    with pytest.raises(ValueError, match="token 2 is held 2 times"):
        merge([everything, half], [np.zeros(4), np.zeros(2)])


def test_merge_names_the_first_token_that_is_held_by_nobody():
    outer, _ = two_ranks(1)

    with pytest.raises(ValueError, match="do not tile the 4-token chunk: token 1 is held 0 times"):
        merge([outer], [np.zeros(2)])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([np.zeros(2)], "one part per index map.*2 index maps and 1 parts"),
        ([np.zeros(2), np.zeros(3)], "its rank holds 2 tokens, but part 1 has 3 rows in dim 0"),
        ([np.zeros((2, 1)), np.zeros((2, 2))], r"part 1 has shape \[2, 2\], part 0 \[2, 1\]"),
        ([np.zeros(2), np.zeros(2, dtype=np.int32)], "part 1 is int32 ndarray, unlike part 0"),
        ([np.zeros(2), torch.zeros(2)], "part 1 is torch.float32 Tensor, unlike part 0"),
    ],
)
def test_merge_refuses_parts_that_do_not_fit(parts, message):
    with pytest.raises(ValueError, match=message):
        merge(two_ranks(1), parts)


def test_merge_refuses_nothing_and_maps_of_different_chunks():
    with pytest.raises(ValueError, match="at least one"):
        merge([], [])
    shorter = IndexMap(np.array([[0, 2]]), 2)
    with pytest.raises(ValueError, match="index map 1 covers 2 tokens, index map 0 covers 4"):
        merge([two_ranks(1)[0], shorter], [np.zeros(2), np.zeros(2)])


def test_expand_runs_counts_along_each_run():
    assert expand_runs(np.array([[4, 3], [0, 2]])).tolist() == [4, 5, 6, 0, 1]
