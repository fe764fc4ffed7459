import numpy as np
import pytest

from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.magi.layout import MagiLayout
from ringfeed.sharding.magi.slices import MaskSlices


def magi(**options) -> MagiLayout:
    layout = make_layout("magi", **options)
    assert isinstance(layout, MagiLayout)
    return layout


def test_the_index_map_covers_the_padded_stream():
    # Chunks of ceil(37 / 16) = 3 tokens, 14 of them: 42 tokens, 5 of them padding.
    layout = magi()
    partition = layout.partition([0, 1, 28, 37], cp_size=2)

    maps = layout.index_maps([0, 1, 28, 37], cp_size=2)

    assert (partition.chunk_size, partition.pad_size, partition.padded_total) == (3, 5, 42)
    assert [index_map.num_tokens for index_map in maps] == [42, 42]
    assert [index_map.runs.tolist() for index_map in maps] == [
        index_map.runs.tolist() for index_map in partition.index_maps
    ]
    with pytest.raises(ValueError, match="index map covers 42 tokens, but x has 37 rows"):
        maps[0].take(np.arange(37))


@pytest.mark.parametrize(
    ("options", "cp_size", "sizes", "expected"),
    [
        ({}, 4, {}, 32),
        ({"chunk_size": 512}, 4, {}, 2048),
        ({"chunk_size": 512}, 4, {"tp_size": 2, "unit": 16}, 2048),
        ({"chunk_size": 8}, 2, {"tp_size": 3, "unit": 16}, 96),
        ({"uneven": True}, 4, {}, 4),
    ],
)
def test_chunk_multiple(options, cp_size, sizes, expected):
    layout = magi(**options)

    assert layout.chunk_multiple(cp_size=cp_size, **sizes) == expected
    assert layout.length_multiple(cp_size) == 1


def test_uneven_shards_cannot_be_split_again():
    with pytest.raises(ValueError, match=r"uneven=True .* tp_size=2 and unit=1 cannot split"):
        magi(uneven=True).chunk_multiple(cp_size=2, tp_size=2)


def test_slices_come_from_slots_and_empty_slots_see_nothing():
    layout = magi()
    padded, real = [0, 4, 8, 12], [0, 3, 3, 7]

    assert layout.slices(padded).to_tuples() == [
        (0, 4, 0, 4, "causal"),
        (4, 8, 4, 8, "causal"),
        (8, 12, 8, 12, "causal"),
    ]
    assert layout.slices(padded, cu_seqlens=real).to_tuples() == [
        (0, 4, 0, 4, "causal"),
        (8, 12, 8, 12, "causal"),
        (4, 8, 0, 0, "full"),
    ]


def test_a_chunk_without_a_real_token_counts_as_its_slots():
    layout = magi()

    assert layout.slices([0, 8], cu_seqlens=[0, 0]).to_tuples() == [(0, 8, 0, 8, "causal")]


def test_a_tail_slot_is_no_work():
    # 64 tokens, 16 real: without the tail's work all chunks of the document are spread over both ranks.
    maps = magi().index_maps([0, 16, 64], cp_size=2, cu_seqlens=[0, 16, 16])

    keys = np.concatenate([np.arange(1, 17), np.zeros(48, dtype=int)])
    held = [int(index_map.take(keys).sum()) for index_map in maps]
    assert sum(held) == 136
    # Chunks of 4 tokens have 10, 26, 42, 58 pairs: 58 + 10 against 42 + 26.
    assert held == [68, 68]


def test_a_window_makes_other_shares_than_no_window():
    offsets = [0, 4096]
    plain = magi(causal=False).partition(offsets, cp_size=2)
    window = magi(causal=False, window=(63, 0)).partition(offsets, cp_size=2)

    assert sum(plain.rank_areas) == 4096 * 4096
    assert sum(window.rank_areas) == 4096 * 64 - 63 * 64 // 2


def test_at_cp_1_the_resolved_chunk_size_is_told_and_one_chunk_is_held():
    partition = magi(chunk_size=512).partition([0, 1001], cp_size=1)

    assert (partition.chunk_size, partition.pad_size, partition.partitions) == (126, 7, [[0]])
    assert partition.shard_lens == [1008]
    assert partition.index_maps[0].runs.tolist() == [[0, 1008]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (7, 0)}, r"window=\(7, 0\) needs causal=False"),
        ({"window": 7}, "window must be two integers, .* got 7"),
        ({"window": (7, 0.5), "causal": False}, "window must be two integers"),
        ({"causal": "yes"}, "causal must be True or False, got 'yes'"),
        ({"uneven": 2}, "uneven must be True or False, got 2"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1"),
        ({"algorithm": ["min_heap"]}, r"algorithm=\['min_heap'\] is not supported; supported: min_heap"),
        ({"algorithm": "binary_search"}, "algorithm='binary_search' is not supported; supported: min_heap"),
        ({"top_p": 0.5}, "algorithm 'min_heap' has no top_p"),
        ({"uneven": True, "algorithm": "backtracing_pruning"}, "uneven=True needs .*min_heap or sequential"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        magi(**options)


def test_options_survive_json_and_make_the_same_layout():
    layout = MagiLayout(chunk_size=64, algorithm="topp_heap", top_p=0.5, causal=False, window=(8, -1))

    assert layout.options["window"] == [8, -1]
    assert magi(**layout.options) == layout


def test_a_rank_without_a_chunk_is_refused():
    # Five chunks on four ranks, two each: the chunks that see nothing go to the lowest rank until it is full.
    layout = magi(uneven=True, chunk_size=1, min_chunks_per_rank=1)

    with pytest.raises(
        ValueError, match=r"'min_heap' leaves rank 3 without one of 5 chunks.*sequential_select"
    ):
        layout.partition_slices([(0, 1, 0, 1, "full")], 5, cp_size=4)
    other = magi(uneven=True, chunk_size=1, algorithm="sequential_select")
    assert other.partition_slices([(0, 1, 0, 1, "full")], 5, cp_size=4).shard_lens == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "none of the 0 slices has both queries and keys"),
        ([(0, 4, 2, 2, "full")], "none of the 1 slices has both queries and keys"),
        ([(0, 99, 0, 4, "full")], r"slice 0 has queries \[0, 99\)"),
    ],
)
def test_masks_that_make_no_sense_are_refused(slices, message):
    with pytest.raises(ValueError, match=message):
        magi().partition_slices(slices, 64, cp_size=2)


def test_more_pairs_than_a_number_holds_are_refused():
    row = (0, 2**31 - 1, 0, 2**31 - 1, "full")

    with pytest.raises(ValueError, match=r"up to 9.22e\+18 query-key pairs"):
        magi().partition_slices([row, row], 2**31 - 1, cp_size=2)


def test_positions_are_cut_off_and_the_gather_index_tells_padding():
    partition = magi().partition([0, 1, 28, 37], cp_size=2)

    assert partition.max_valid_ids == 37
    assert partition.position_ids(0)[-6:].tolist() == [36] * 6
    assert partition.gather_index(0)[-6:].tolist() == [36, -1, -1, -1, -1, -1]
    with pytest.raises(ValueError, match="cp_rank=2"):
        partition.gather_index(2)


def test_fingerprint_covers_mask_rule_and_result():
    def fingerprint(offsets=(0, 100, 512), cp_size=2, **options):
        return magi(**options).partition(list(offsets), cp_size=cp_size).fingerprint

    prints = [
        fingerprint(),
        fingerprint(offsets=(0, 101, 512)),
        fingerprint(cp_size=4),
        fingerprint(chunk_size=16),
        fingerprint(min_chunks_per_rank=4),
        fingerprint(causal=False),
        fingerprint(uneven=True),
        fingerprint(algorithm="topp_heap"),
        fingerprint(algorithm="topp_heap", top_p=0.5),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint() == prints[0]
    assert len(prints[0]) == 32


def test_fingerprint_does_not_depend_on_the_order_of_the_slices():
    rows = [(0, 30, 0, 30, "causal"), (30, 64, 30, 64, "causal")]
    layout = magi()

    forward, backward = (
        layout.partition_slices(MaskSlices.read(some), 64, cp_size=2) for some in (rows, rows[::-1])
    )

    assert forward.fingerprint == backward.fingerprint
    assert forward.partitions == backward.partitions
