"""Layout ``magi`` and its parts against their definitions, pair by pair and rank by rank in plain Python."""

import heapq
import itertools
import math
from collections import Counter

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringfeed.sharding.index_map import merge
from ringfeed.sharding.magi.chunking import ChunkGrid
from ringfeed.sharding.magi.layout import MagiLayout
from ringfeed.sharding.magi.masks import WindowMask, prefix_tree_slices, varlen_slices
from ringfeed.sharding.magi.slices import MaskSlices
from ringfeed.sharding.magi.solver import ChunkWork
from ringfeed.sharding.magi.solvers import make_solver

KINDS = ("full", "causal", "inv_causal", "bi_causal")


def allowed(row, q, k):
    """Say whether the pair of a query and a key of a slice is allowed, by the definition."""
    q0, q1, k0, k1, kind = row
    late = kind in ("causal", "bi_causal") and k - k0 > q - q0 + (k1 - k0) - (q1 - q0)
    early = kind in ("inv_causal", "bi_causal") and k - k0 < q - q0
    return not (late or early)


def pairs_of(row):
    q0, q1, k0, k1, _ = row
    return [(q, k) for q in range(q0, q1) for k in range(k0, k1) if allowed(row, q, k)]


@st.composite
def masks(draw, most=40):
    total = draw(st.integers(1, most))
    spans = st.tuples(st.integers(0, total), st.integers(0, total)).map(sorted)
    rows = draw(st.lists(st.tuples(spans, spans, st.sampled_from(KINDS)), min_size=1, max_size=6))
    return total, [(*queries, *keys, kind) for queries, keys, kind in rows]


@given(mask=masks(), chunk_size=st.integers(1, 50))
def test_areas_and_pieces_are_the_pairs_counted_one_by_one(mask, chunk_size):
    total, rows = mask
    grid = ChunkGrid(total=-(-total // chunk_size) * chunk_size, pad_size=0, cp_size=2, chunk_size=chunk_size)

    work = ChunkWork.measure(grid, MaskSlices.read(rows))

    counted = [0] * grid.num_chunks
    pieces: dict[tuple[int, int], set[int]] = {}
    ordered = sorted(rows, key=lambda row: row[:2])
    for number, row in enumerate(ordered):
        for q, k in pairs_of(row):
            counted[q // chunk_size] += 1
            pieces.setdefault((q // chunk_size, number), set()).add(k)
    assert work.areas.tolist() == counted
    assert work.slices.to_tuples() == ordered
    keys = {(c, s): set(range(k0, k1)) for c, s, k0, k1 in work.pieces.tolist()}
    assert keys == pieces
    banded = [kind == "bi_causal" for *_, kind in ordered]
    exact = [len(pairs_of(row)) for row in ordered]
    for area, pairs, band in zip(work.slice_areas.tolist(), exact, banded, strict=True):
        assert area == pairs or (band and pairs == 0 and area <= 0)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    window=st.tuples(st.integers(-1, 10), st.integers(-1, 10)),
)
def test_windows_allow_the_pairs_within_reach_each_once(lengths, window):
    queries, keys = (np.cumsum([0, *side]).tolist() for side in zip(*lengths, strict=True))

    slices = varlen_slices(queries, mask=WindowMask(*window), cu_seqlens_k=keys)

    left, right = (math.inf if size == -1 else size for size in window)
    expected = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True):
        # The ends of queries and keys are aligned; queries before the first key take no part.
        first = max(q0, q1 - (k1 - k0))
        reach = [(q, k) for q in range(first, q1) for k in range(k0, k1)]
        expected += [(q, k) for q, k in reach if -left <= (k - k1) - (q - q1) <= right]
    assert sorted(pair for row in slices.to_tuples() for pair in pairs_of(row)) == expected


@given(data=st.data())
def test_prefix_trees_allow_a_token_its_own_past_and_its_ancestors(data):
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    parents = [None, *(data.draw(st.integers(0, node - 1)) for node in range(1, len(lengths)))]

    def path(node):
        return [*([] if parents[node] is None else path(parents[node])), node]

    slices = prefix_tree_slices(lengths, [path(node) for node in range(len(lengths))])

    owner = np.repeat(np.arange(len(lengths)), lengths).tolist()
    tokens = range(len(owner))
    expected = [(q, k) for q in tokens for k in tokens if k <= q and owner[k] in path(owner[q])]
    assert sorted(pair for row in slices.to_tuples() for pair in pairs_of(row)) == expected


rules = st.fixed_dictionaries(
    {
        "chunk_size": st.none() | st.integers(1, 20),
        "min_chunks_per_rank": st.integers(1, 9),
        "algorithm": st.sampled_from(["min_heap", "sequential_select"]),
        "uneven": st.booleans(),
    }
)


def partition_of(mask, options, cp_size):
    total, rows = mask
    try:
        return MagiLayout(**options).partition_slices(rows, total, cp_size=cp_size)
    except ValueError as error:
        # Too short, a mask without a pair, or a rank without a chunk: each has its unit test.
        refused = ("ranks need one", "none of the", "leaves rank")
        assume(not any(part in str(error) for part in refused))
        raise


@given(mask=masks(most=200), options=rules, cp_size=st.integers(1, 5))
def test_a_partition_tiles_the_padded_stream(mask, options, cp_size):
    partition = partition_of(mask, options, cp_size)
    stream = np.arange(partition.padded_total)

    maps = partition.index_maps

    assert np.array_equal(merge(maps, [index_map.take(stream) for index_map in maps]), stream)
    assert partition.shard_lens == [len(index_map) for index_map in maps]
    if not options["uneven"]:
        assert len(set(partition.shard_lens)) == 1
        assert partition.pad_size < partition.chunk_size * cp_size
    for rank, index_map in enumerate(maps):
        tokens, last = index_map.positions.numpy(), partition.max_valid_ids - 1
        assert np.array_equal(partition.gather_index(rank), np.where(tokens < mask[0], tokens, -1))
        assert np.array_equal(partition.position_ids(rank), np.minimum(tokens, last))


@given(mask=masks(), options=rules, cp_size=st.integers(1, 5))
def test_rank_areas_are_the_pairs_of_a_ranks_queries(mask, options, cp_size):
    partition = partition_of(mask, options, cp_size)
    pairs = Counter(q for row in mask[1] for q, _ in pairs_of(row))

    held = [index_map.positions.tolist() for index_map in partition.index_maps]
    assert partition.rank_areas == [sum(pairs[token] for token in tokens) for tokens in held]
    assert partition.imbalance == max(partition.rank_areas) * cp_size / max(1, sum(pairs.values()))


@given(options=rules, cp_size=st.integers(1, 8), count=st.integers(1, 12))
def test_packs_of_the_chunk_multiple_are_never_padded(options, cp_size, count):
    layout = MagiLayout(**options)
    total = count * layout.chunk_multiple(cp_size=cp_size)

    assert layout.rule.grid(total, cp_size=cp_size).pad_size == 0


@given(width=st.integers(1, 9), least=st.integers(1, 9), cp_size=st.integers(1, 8), count=st.integers(1, 40))
def test_magis_pad_free_rule(width, least, cp_size, count):
    chunk_size = width * least
    layout = MagiLayout(chunk_size=chunk_size, min_chunks_per_rank=least)

    assert layout.base_multiple(cp_size) == chunk_size * cp_size
    assert layout.rule.grid(count * chunk_size * cp_size, cp_size=cp_size).pad_size == 0


@given(offsets=st.lists(st.integers(0, 99), min_size=1, max_size=9), cp_size=st.integers(1, 4))
def test_the_same_documents_always_give_the_same_shares(offsets, cp_size):
    documents = [0, *sorted(offsets), 128]
    layout, again = MagiLayout(), MagiLayout()

    first, second = (one.partition(documents, cp_size=cp_size) for one in (layout, again))

    assert first.fingerprint == second.fingerprint
    assert first.partitions == second.partitions


@st.composite
def works(draw, most_chunks=10):
    cp_size = draw(st.integers(2, 4))
    num_chunks = cp_size * draw(st.integers(1, most_chunks // cp_size))
    _, rows = draw(masks(most=num_chunks * 4))
    grid = ChunkGrid(total=num_chunks * 4, pad_size=0, cp_size=cp_size, chunk_size=4)
    return ChunkWork.measure(grid, MaskSlices.read(rows))


@given(work=works(most_chunks=24))
def test_min_heap_is_a_heap_of_sums(work):
    areas, cp_size = work.areas.tolist(), work.grid.cp_size
    heap = [(0, rank, 0) for rank in range(cp_size)]
    expected = {}
    for chunk in sorted(range(len(areas)), key=lambda c: (-areas[c], -c)):
        total, rank, count = heapq.heappop(heap)
        expected[chunk] = rank
        if count + 1 < len(areas) // cp_size:
            heapq.heappush(heap, (total + areas[chunk], rank, count + 1))

    assert make_solver("min_heap", {}).assign(work).tolist() == [expected[c] for c in range(len(areas))]


def topp(work, top_p, batch):
    """MagiAttention's batched heap in plain Python, keys counted one by one."""
    areas, cp_size = work.areas.tolist(), work.grid.cp_size
    room, sums = [len(areas) // cp_size] * cp_size, [0] * cp_size
    held: list[Counter] = [Counter() for _ in range(cp_size)]
    keys: list[Counter] = [Counter() for _ in areas]
    for chunk, _, k0, k1 in work.pieces.tolist():
        keys[chunk].update(range(k0, k1))
    order = sorted(range(len(areas)), key=lambda c: (-areas[c], c))
    ranks = {}
    for start in range(0, len(order), batch):
        candidates = []
        for rank in sorted((r for r in range(cp_size) if room[r]), key=lambda r: (sums[r], r)):
            candidates.append(rank)
            if (
                len(candidates) == max(1, math.ceil(cp_size * top_p))
                and sum(room[r] for r in candidates) >= batch
            ):
                break
        for chunk in order[start : start + batch]:
            shared = [
                sum(keys[chunk][k] + held[r][k] - 1 for k in keys[chunk] if held[r][k]) for r in candidates
            ]
            rank = candidates[shared.index(max(shared))]
            ranks[chunk] = rank
            sums[rank] += areas[chunk]
            held[rank].update(keys[chunk])
            room[rank] -= 1
            if not room[rank]:
                candidates.remove(rank)
    return [ranks[chunk] for chunk in range(len(areas))]


@given(work=works(most_chunks=24), top_p=st.sampled_from([0, 0.3, 0.5, 1.0]), batch=st.integers(1, 6))
def test_topp_heaps_follow_the_rule(work, top_p, batch):
    batched = make_solver("batch_topp_heap", {"top_p": top_p, "num_of_select_chunk": batch})

    assert batched.assign(work).tolist() == topp(work, top_p, batch)
    assert make_solver("topp_heap", {"top_p": top_p}).assign(work).tolist() == topp(work, top_p, 1)


@given(work=works(), ratio=st.sampled_from([0, 0.3, 1]))
def test_every_solver_gives_every_rank_as_many_chunks(work, ratio):
    solvers = [
        make_solver("sequential_select", {}),
        make_solver("sorted_sequential_select", {"allocation_ratio": ratio}),
        make_solver("backtracing_pruning", {}),
    ]
    share = work.grid.num_chunks // work.grid.cp_size

    for solver in solvers:
        counts = np.bincount(solver.assign(work), minlength=work.grid.cp_size)
        assert counts.tolist() == [share] * work.grid.cp_size


@given(work=works(most_chunks=8))
@settings(max_examples=40)
def test_backtracing_pruning_is_never_beaten(work):
    areas, cp_size = work.areas.tolist(), work.grid.cp_size

    def busiest(ranks):
        sums = [0] * cp_size
        for area, rank in zip(areas, ranks, strict=True):
            sums[rank] += area
        return max(sums)

    share = len(areas) // cp_size
    all_ranks = itertools.product(range(cp_size), repeat=len(areas))
    best = min(busiest(r) for r in all_ranks if all(r.count(rank) == share for rank in range(cp_size)))
    assert busiest(make_solver("backtracing_pruning", {}).assign(work).tolist()) == best
