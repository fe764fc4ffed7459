"""Segments of keys by merging equal those by sorting, in whatever order the ranges come."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.magi.chunk_kernels import chunk_runs, first_without_chunk
from ringfeed.sharding.magi.segments import key_segments

piece = st.tuples(st.integers(0, 5), st.just(0), st.integers(0, 20), st.integers(1, 9))


def check(pieces, num_chunks):
    found = key_segments(pieces, num_chunks=num_chunks)

    ordered = pieces[np.argsort(pieces[:, 0], kind="stable")]
    edges = np.unique(ordered[:, 2:])
    assert found.widths.tolist() == np.diff(edges).tolist()
    assert edges[found.spans].tolist() == ordered[:, 2:].tolist()
    assert np.diff(found.firsts).tolist() == [int((pieces[:, 0] == c).sum()) for c in range(num_chunks)]


def ranges(drawn):
    pieces = np.array(drawn, dtype=np.int64).reshape(-1, 4)
    pieces[:, 3] += pieces[:, 2]
    return pieces


@given(st.lists(piece, max_size=12))
def test_pieces_of_any_order(drawn):
    check(ranges(drawn), 6)


@given(st.lists(piece, max_size=12))
def test_pieces_of_documents_whose_keys_rise(drawn):
    pieces = ranges(sorted(drawn))
    pieces[:, 2:].sort(axis=0)
    check(pieces, 6)


@given(ranks=st.lists(st.integers(0, 3), min_size=1, max_size=20), cut=st.integers(0, 4))
def test_runs_are_the_chunks_of_a_rank_joined(ranks, cut):
    num_tokens = 5 * len(ranks) - cut
    chunks = np.array(ranks)
    for first, num in ((0, 4), (2, 1), (1, 3)):
        runs, bounds, lengths = chunk_runs(chunks, 5, num_tokens, first, num)
        for rank in range(num):
            held = runs[bounds[rank] : bounds[rank + 1]].tolist()
            tokens = [token for start, length in held for token in range(start, start + length)]
            assert tokens == [t for t in range(num_tokens) if ranks[t // 5] == first + rank]
            assert lengths[rank] == len(tokens)
            assert all(a[0] + a[1] < b[0] for a, b in pairwise(held))


def test_the_first_rank_without_a_chunk_is_found():
    assert first_without_chunk(np.array([0, 2, 1]), 3) == -1
    assert first_without_chunk(np.array([0, 2, 2]), 4) == 1
