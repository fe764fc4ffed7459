import pytest

from ringfeed.sharding.magi.chunking import ChunkRule


@pytest.mark.parametrize(
    ("rule", "total", "cp_size", "expected"),
    [
        # (chunk size, padding, chunks). Eight chunks a rank: 4096 / (8 * 2) = 256.
        ({}, 4096, 2, (256, 0, 16)),
        # The requested size is only an upper bound ...
        ({"chunk_size": 512}, 4096, 2, (256, 0, 16)),
        # ... and holds where it makes more chunks.
        ({"chunk_size": 64}, 4096, 2, (64, 0, 64)),
        ({"chunk_size": 64}, 4100, 2, (64, 124, 66)),
        ({"min_chunks_per_rank": 1}, 10, 4, (3, 2, 4)),
        ({"min_chunks_per_rank": 1, "uneven": True}, 10, 4, (3, 0, 4)),
        # A single rank has one chunk, of everything; the rule's own size is told all the same.
        ({"chunk_size": 512}, 1001, 1, (126, 7, 1)),
    ],
)
def test_grid(rule, total, cp_size, expected):
    grid = ChunkRule(**rule).grid(total, cp_size=cp_size)

    assert (grid.chunk_size, grid.pad_size, grid.num_chunks) == expected
    assert grid.padded_total == total + grid.pad_size


def test_runs_lie_end_to_end_and_only_the_last_may_be_shorter():
    uneven = ChunkRule(min_chunks_per_rank=1, uneven=True).grid(10, cp_size=4)

    assert uneven.runs().tolist() == [[0, 3], [3, 3], [6, 3], [9, 1]]
    assert ChunkRule(chunk_size=512).grid(1001, cp_size=1).runs().tolist() == [[0, 1008]]


@pytest.mark.parametrize(
    ("rule", "cp_size", "expected"),
    [
        ({}, 4, 32),
        ({"chunk_size": 512}, 4, 2048),
        # 100 is no multiple of 8, so short packs would get chunks of other lengths.
        ({"chunk_size": 100}, 4, 800),
        ({"chunk_size": 512, "min_chunks_per_rank": 3}, 2, 3072),
        ({"chunk_size": 512, "uneven": True}, 4, 1),
    ],
)
def test_pad_free_multiple(rule, cp_size, expected):
    assert ChunkRule(**rule).pad_free_multiple(cp_size) == expected


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (0, "at least 1 token, got total=0"),
        (9, "total=9 tokens make 3 chunks of 3, but cp_size=4 ranks need one each"),
    ],
)
def test_too_few_tokens_are_refused(total, message):
    with pytest.raises(ValueError, match=message):
        ChunkRule(min_chunks_per_rank=1).grid(total, cp_size=4)


@pytest.mark.parametrize("name", ["chunk_size", "min_chunks_per_rank"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_sizes_that_are_none_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value!r}"):
        ChunkRule(**{name: value})
