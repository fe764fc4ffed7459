"""``whole_document`` against its rule, spelled out slot by slot in plain Python."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.piece_cost import PieceCost


def share_out(slots, real, cp_size, threshold, cost):
    """Return the (start, stop) parts of each rank in placing order, by the rule's words."""
    starts = np.cumsum([0, *slots]).tolist()
    share = sum(slots) // cp_size
    held: list[list] = [[] for _ in range(cp_size)]
    work, tokens = [0] * cp_size, [0] * cp_size

    def give(rank, slot, start, stop):
        stop = min(stop, start + share - tokens[rank])
        if stop > start:
            held[rank].append((starts[slot] + start, starts[slot] + stop))
            tokens[rank] += stop - start
            if real[slot]:
                work[rank] += sum(cost.per_token + cost.per_pair * (k + 1) for k in range(start, stop))
        return stop

    def give_by_work(slot, start, stop):
        while start < stop:
            rank = min((r for r in range(cp_size) if tokens[r] < share), key=lambda r: (work[r], r))
            start = give(rank, slot, start, stop)

    long = [s for s in range(len(slots)) if real[s] and slots[s] >= threshold]
    rests = []
    for slot in long:
        start = 0
        for piece in range(2 * cp_size):
            stop = start + slots[slot] // (2 * cp_size)
            stop += piece >= 2 * cp_size - slots[slot] % (2 * cp_size)
            placed = give(min(piece, 2 * cp_size - 1 - piece), slot, start, stop)
            rests.append((slot, placed, stop))
            start = stop
    for rest in rests:
        give_by_work(*rest)
    others = [s for s in range(len(slots)) if s not in long]
    for slot in sorted(others, key=lambda s: (not real[s], -slots[s], s)):
        give_by_work(slot, 0, slots[slot])
    return held, work


@st.composite
def chunks(draw):
    cp_size = draw(st.integers(1, 6))
    slots = draw(st.lists(st.integers(0, 40) | st.sampled_from([1, 12]), min_size=1, max_size=14))
    real = [draw(st.sampled_from([slot, slot, slot, 0])) for slot in slots]
    # The tail slot brings T to a multiple of R.
    tail = -sum(slots) % cp_size + cp_size * draw(st.integers(0, 6))
    return [*slots, tail], [*real, 0], cp_size


costs = st.sampled_from([PieceCost(per_pair=1), PieceCost(per_token=1), PieceCost(per_token=24, per_pair=2)])


@given(chunk=chunks(), threshold=st.integers(1, 41), cost=costs)
def test_shares_follow_the_rule(chunk, threshold, cost):
    slots, real, cp_size = chunk
    held, _ = share_out(slots, real, cp_size, threshold, cost)
    layout = make_layout("whole_document", threshold=threshold, cost=cost)

    maps = layout.index_maps(np.cumsum([0, *slots]), cp_size=cp_size, cu_seqlens=np.cumsum([0, *real]))

    for parts, index_map in zip(held, maps, strict=True):
        expected = [token for start, stop in sorted(parts) for token in range(start, stop)]
        assert index_map.positions.tolist() == expected


@given(chunk=chunks(), threshold=st.integers(1, 41))
def test_at_most_one_short_document_is_cut_per_rank(chunk, threshold):
    slots, real, cp_size = chunk
    starts = np.cumsum([0, *slots])
    layout = make_layout("whole_document", threshold=threshold)
    maps = layout.index_maps(starts, cp_size=cp_size, cu_seqlens=np.cumsum([0, *real]))
    owner = np.empty(starts[-1], dtype=int)
    for rank, index_map in enumerate(maps):
        owner[index_map.positions.numpy()] = rank

    short = [s for s in range(len(slots)) if real[s] and slots[s] < threshold]
    ranks_of = [set(owner[starts[s] : starts[s + 1]].tolist()) for s in short]
    # Each cut fills a share, so no more cuts than ranks, less the one that gets the last token.
    assert sum(len(ranks) - 1 for ranks in ranks_of if ranks) <= cp_size - 1


@given(chunk=chunks(), threshold=st.integers(1, 41))
def test_work_differs_by_no_more_than_one_short_document_and_one_token_per_long_one(chunk, threshold):
    slots, real, cp_size = chunk
    # A tail so long that no share is full before the documents are placed.
    slots = [*slots, cp_size * sum(slots)]
    real = [*real, 0]
    layout = make_layout("whole_document", threshold=threshold)
    maps = layout.index_maps(np.cumsum([0, *slots]), cp_size=cp_size, cu_seqlens=np.cumsum([0, *real]))
    keys = np.concatenate([np.arange(1, s + 1) * bool(r) for s, r in zip(slots, real, strict=True)])

    work = [int(index_map.take(keys).sum()) for index_map in maps]

    short = [s * (s + 1) // 2 for s, r in zip(slots, real, strict=True) if r and s < threshold]
    # Two ranks' pieces of a dual-chunked document differ by the remainder: under two rows of it.
    long = [2 * s for s, r in zip(slots, real, strict=True) if r and s >= threshold]
    assert max(work) - min(work) <= max(short, default=0) + sum(long)


@given(widths=st.lists(st.integers(1, 5), min_size=1, max_size=6), cp_size=st.integers(2, 6))
def test_everything_dual_chunked_is_te(widths, cp_size):
    padded = np.cumsum([0, *(2 * cp_size * width for width in widths)])

    dual = make_layout("whole_document", threshold=1).index_maps(padded, cp_size=cp_size)

    te = make_layout("te").index_maps(padded, cp_size=cp_size)
    assert [index_map.runs.tolist() for index_map in dual] == [index_map.runs.tolist() for index_map in te]
