"""MagiAttention's dispatch against what MagiAttention computed.

Origin: ``data/magi_dispatch_dev.json``, outputs of the unmodified package at commit 2c641357 (dispatch as in
v1.1.1), once per rank. Never regenerate from ringfeed.

Where MagiAttention raises an AssertionError or a RuntimeError, ringfeed raises ValueError.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.magi.layout import MagiLayout
from ringfeed.sharding.magi.masks import varlen_slices

CASES = json.loads((Path(__file__).parent / "data" / "magi_dispatch_dev.json").read_text())["cases"]
REFUSALS = {
    "error_too_short": "total=3 tokens make 3 chunks of 1, but cp_size=4 ranks need one each",
    "error_no_partitions": "algorithm='dynamic_programming' is not supported; supported: min_heap, seq",
    "error_uneven_equal_alg": "uneven=True needs .* min_heap or sequential_select; algorithm='topp_heap'",
}


def cases(*, refused):
    chosen = [case for case in CASES if ("expected_error" in case) == refused]
    return pytest.mark.parametrize("case", chosen, ids=[f"{case['id']}-{case['group']}" for case in chosen])


def make(given) -> MagiLayout:
    options = {name: given[name] for name in ("chunk_size", "min_chunks_per_rank")}
    if given["api"] == "varlen":
        varlen = given["varlen"]
        options |= {"causal": varlen["causal"], "window": varlen["window_size"]}
    algorithm = dict(given["alg"])
    name, uneven = algorithm.pop("name"), given["uneven_shard"]
    layout = make_layout("magi", algorithm=name, uneven=uneven, **options, **algorithm)
    assert isinstance(layout, MagiLayout)
    return layout


def dispatch(given):
    layout, cp_size = make(given), given["cp_size"]
    if given["api"] == "flex":
        flex = given["flex"]
        rows = zip(flex["q_ranges"], flex["k_ranges"], flex["mask_types"], strict=True)
        slices = [(*queries, *keys, kind) for queries, keys, kind in rows]
        return layout.partition_slices(slices, flex["total_seqlen"], cp_size=cp_size)
    queries, keys = given["varlen"]["cu_seqlens_q"], given["varlen"]["cu_seqlens_k"]
    if queries == keys:
        return layout.partition(queries, cp_size=cp_size)
    documents = varlen_slices(queries, mask=layout.mask, cu_seqlens_k=keys)
    return layout.partition_slices(documents, queries[-1], cp_size=cp_size)


def sha256(values):
    return hashlib.sha256(np.asarray(values, dtype="<i8").tobytes()).hexdigest()


def facts(partition):
    """All that a case may tell, under the names of the vector file."""
    ranks = range(len(partition.partitions))
    positions = [partition.position_ids(rank) for rank in ranks]
    gathered = [partition.gather_index(rank) for rank in ranks]
    return {
        "chunk_size": partition.chunk_size,
        "pad_size": partition.pad_size,
        "padded_total": partition.padded_total,
        "layout_chunk_size": partition.grid.stride,
        "num_chunks": partition.grid.num_chunks,
        "last_chunk_size": int(partition.grid.runs()[-1, 1]),
        "partitions": partition.partitions,
        "shard_lens": partition.shard_lens,
        "max_valid_ids": partition.max_valid_ids,
        "rank_areas": partition.rank_areas,
        "total_area": sum(partition.rank_areas),
        "chunk_areas": partition.chunk_areas.tolist(),
        "slices": [list(row) for row in partition.slices.to_tuples()],
        "position_ids_sha256": [sha256(values) for values in positions],
        "gather_index_sha256": [sha256(values) for values in gathered],
        "position_ids": [values.tolist() for values in positions],
        "gather_index": [values.tolist() for values in gathered],
    }


@cases(refused=False)
def test_partition_is_what_magi_computed(case):
    actual = facts(dispatch(case["input"]))

    assert {name: actual[name] for name in case["expected"]} == case["expected"]


@cases(refused=False)
def test_index_maps_tile_the_padded_stream_and_agree_with_the_gather_index(case):
    partition = dispatch(case["input"])

    maps = partition.index_maps

    positions = [index_map.positions.numpy() for index_map in maps]
    assert np.array_equal(np.sort(np.concatenate(positions)), np.arange(partition.padded_total))
    for rank, tokens in enumerate(positions):
        real = np.where(tokens < case["expected"]["padded_total"] - case["expected"]["pad_size"], tokens, -1)
        assert np.array_equal(partition.gather_index(rank), real)
        assert maps[rank].num_tokens == case["expected"]["padded_total"]


@cases(refused=True)
def test_what_magi_refuses_is_refused_as_a_mistake_of_the_user(case):
    with pytest.raises(ValueError, match=REFUSALS[case["group"]]):
        dispatch(case["input"])


def test_every_solver_and_every_kind_of_mask_has_a_case():
    words = json.dumps(CASES)

    assert len(CASES) == 63
    for word in ("min_heap", "sequential_select", "topp_heap", "batch_topp_heap", "backtracing_pruning"):
        assert f'"name": "{word}"' in words
    for word in ("full", "causal", "inv_causal", "bi_causal"):
        assert f'"{word}"]' in words
